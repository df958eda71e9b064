"""Runs of workflows pass the same conformance checks on every key space."""

from collections.abc import Callable

import pytest

from fastness.kv import Database
from fastness.testing.conformance.runs import RUN_CHECKS, Check


@pytest.mark.parametrize("check", RUN_CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_runs(check: Check, open_database: Callable[..., Database]) -> None:
    with open_database() as database:
        check(database)
        check(database)  # It clears its universe.
