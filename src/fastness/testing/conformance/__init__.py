"""Conformance checks for key space backends. Each takes an open database.

    for check in CHECKS:
        check(database)

Each check clears the subspace it works in, so checks can share a database and run again. A key space that passes all of
them supports every layer of Fastness. The last check closes the database.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Final

from fastness.kv import Database
from fastness.testing.conformance import concurrency, reading, refusals, watches

Check = Callable[[Database], None]


def _checks(module: ModuleType) -> list[Check]:
    return [check for name, check in vars(module).items() if name.startswith("check_")]


CHECKS: Final[tuple[Check, ...]] = tuple(
    check for module in (reading, concurrency, watches, refusals) for check in _checks(module)
)
