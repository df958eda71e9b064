"""A server's recovery of its key space goes on after errors that nobody expected."""

import asyncio

import pytest

from fastness import limits
from fastness.backends.memory import MemoryDatabase
from fastness.errors import DatabaseFailed, DiskFull, FastnessError
from fastness.plane.services import Services
from fastness.server.recovery import Recovery


class FailedDatabase(MemoryDatabase):
    """A key space that has failed; reopening it raises each of `errors`, then works."""

    def __init__(self, *errors: Exception) -> None:
        super().__init__()
        self._failed: FastnessError | None = DatabaseFailed("the device is gone")
        self._errors = list(errors)

    @property
    def failure(self) -> FastnessError | None:
        return self._failed

    def reopen(self) -> None:
        if self._errors:
            raise self._errors.pop(0)
        self._failed = None


async def test_recovery_goes_on_after_any_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(limits, "REOPEN_SECONDS_MIN", 0.001)
    database = FailedDatabase(DiskFull("no space"), DiskFull("no space"), RuntimeError("a defect"), OSError(5, "I/O"))
    services = Services(database, None)
    recovery = Recovery(services)
    recovery.start()
    try:
        async with asyncio.timeout(30):
            while database.failure is not None:
                await asyncio.sleep(0.01)
    finally:
        await recovery.end()
        services.stop()
    messages = [record.message for record in caplog.records if record.name == "fastness.recovery"]
    assert "the device is gone" in messages[0]
    assert [each for each in messages if "no space" in each] == ["the key space cannot be reopened yet: no space"]
    assert any("a defect" in each for each in messages)
