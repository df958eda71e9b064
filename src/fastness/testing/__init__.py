"""Test tools that ship with Fastness.

    HostTest, AsyncHostTest    programs and workflows in memory, under a clock that a test moves
    crash_everywhere           crashes them at every boundary, and checks that nothing is done twice or lost
    ManualClock                a clock for `fastness.open(url, clock=...)`

`conformance` checks backends, `faults` injects errors, `simulation` schedules many clients by a seed, and `histories`
checks what they saw.
"""

from fastness.lazy_exports import lazy_exports

# Imported when they are first used: the submodules of this package need much less than the hosts.
_MODULE_OF, __getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "clock": "ManualClock",
        "hosts.crashes": "CrashFailure CrashReport crash_everywhere",
        "hosts.host_test": "AsyncHostTest HostTest StuckRun",
    },
)
__all__ = list(_MODULE_OF)
