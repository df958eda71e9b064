"""Generated from fastness/testing/__init__.py by tools/make_twins.py; change that file instead."""

from fastness.testing.clock import ManualClock
from fastness.testing.hosts.crashes import CrashFailure, CrashReport, crash_everywhere
from fastness.testing.hosts.host_test import AsyncHostTest, HostTest, StuckRun

_MODULE_OF: dict[str, str]
# fmt: off
__all__ = \
["ManualClock", "CrashFailure", "CrashReport", "crash_everywhere", "AsyncHostTest", "HostTest", "StuckRun"]
