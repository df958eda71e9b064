"""Test tools that ship with Holdfast.

    HostTest, AsyncHostTest    programs and workflows in memory, under a clock that a test moves
    crash_everywhere           crashes them at every boundary, and checks that nothing is done twice or lost
    ManualClock                a clock for `holdfast.open(url, clock=...)`

`conformance` checks backends, `faults` injects errors, `simulation` schedules many clients by a seed, and `histories`
checks what they saw.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from holdfast.testing.clock import ManualClock
    from holdfast.testing.hosts.crashes import CrashFailure, CrashReport, crash_everywhere
    from holdfast.testing.hosts.host_test import AsyncHostTest, HostTest, StuckRun

__all__ = [
    "AsyncHostTest",
    "CrashFailure",
    "CrashReport",
    "HostTest",
    "ManualClock",
    "StuckRun",
    "crash_everywhere",
]

# Imported when they are first used: the submodules of this package need much less than the hosts.
_MODULES: Final = {
    "AsyncHostTest": "holdfast.testing.hosts.host_test",
    "CrashFailure": "holdfast.testing.hosts.crashes",
    "CrashReport": "holdfast.testing.hosts.crashes",
    "HostTest": "holdfast.testing.hosts.host_test",
    "ManualClock": "holdfast.testing.clock",
    "StuckRun": "holdfast.testing.hosts.host_test",
    "crash_everywhere": "holdfast.testing.hosts.crashes",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found: object = getattr(import_module(_MODULES[name]), name)
    globals()[name] = found
    return found
