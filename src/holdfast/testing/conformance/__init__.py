"""What every backend must do, as checks that take one that is open.

    for check in CHECKS:
        check(database)

Each check works in a room of its own and clears it first, so that they can share a database and run again. A key space
that passes them all carries every layer of Holdfast. The last one closes it.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Final

from holdfast.kv import Database
from holdfast.testing.conformance import concurrency, reading, refusals, watches

Check = Callable[[Database], None]


def _checks(module: ModuleType) -> list[Check]:
    return [check for name, check in vars(module).items() if name.startswith("check_")]


CHECKS: Final[tuple[Check, ...]] = tuple(
    check for module in (reading, concurrency, watches, refusals) for check in _checks(module)
)
