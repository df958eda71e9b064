"""Every key space passes the same conformance checks."""

from collections.abc import Callable

import pytest

from fastness.kv import Database
from fastness.testing.conformance import CHECKS, Check


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_conformance(check: Check, open_database: Callable[..., Database]) -> None:
    with open_database() as database:
        check(database)
