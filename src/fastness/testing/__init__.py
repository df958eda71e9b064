"""Test tools that ship with Fastness.

    HostTest, AsyncHostTest    programs and workflows in memory, under a clock that a test moves
    crash_everywhere           crashes them at every boundary, and checks that nothing is done twice or lost
    ManualClock                a clock for `fastness.open(url, clock=...)`

`conformance` checks backends, `faults` injects errors, `simulation` schedules many clients by a seed, and `histories`
checks what they saw.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from fastness.testing.clock import ManualClock
    from fastness.testing.hosts.crashes import CrashFailure, CrashReport, crash_everywhere
    from fastness.testing.hosts.host_test import AsyncHostTest, HostTest, StuckRun

__all__ = ["AsyncHostTest", "CrashFailure", "CrashReport", "HostTest", "ManualClock", "StuckRun", "crash_everywhere"]

# Imported when they are first used: the submodules of this package need much less than the hosts.
_EXPORTS: Final = {
    "clock": "ManualClock",
    "hosts.crashes": "CrashFailure CrashReport crash_everywhere",
    "hosts.host_test": "AsyncHostTest HostTest StuckRun",
}
_MODULES: Final = {name: f"{__name__}.{module}" for module, names in _EXPORTS.items() for name in names.split()}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found: object = getattr(import_module(_MODULES[name]), name)
    globals()[name] = found
    return found
