"""Worlds pass the same conformance checks on every key space."""

from collections.abc import Callable

import pytest

from fastness.kv import Database
from fastness.testing.conformance.worlds import WORLD_CHECKS, Check
from tests.support.backends import rotating_backends


@pytest.mark.parametrize("check", WORLD_CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_worlds(check: Check, open_database: Callable[..., Database]) -> None:
    with open_database() as database:
        check(database)


@pytest.mark.parametrize("backend", rotating_backends("memory"), indirect=True)
def test_the_checks_share_a_database_and_run_again(open_database: Callable[..., Database]) -> None:
    with open_database() as database:
        for check in (*WORLD_CHECKS, *WORLD_CHECKS):
            check(database)
