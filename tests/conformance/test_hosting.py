"""Hosting passes the same conformance checks on every key space."""

from collections.abc import Callable

import pytest

from fastness.kv import Database
from fastness.testing.conformance.hosting import HOSTING_CHECKS, Check


@pytest.mark.parametrize("check", HOSTING_CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_hosting(check: Check, open_database: Callable[..., Database]) -> None:
    with open_database() as database:
        check(database)
        check(database)
