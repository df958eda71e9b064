"""The record of an attempt of a step: its result, or its error and when the next attempt is due."""

from typing import Any

from fastness.errors import FastnessError, PayloadTooLarge
from fastness.hosts.workflows.operations import StepCall
from fastness.hosts.workflows.steps import error_of
from fastness.hosts.workflows.values import canonical_flat, plain
from fastness.limits import RUN_RESULT_BYTES_MAX
from fastness.wire import run_records as words
from fastness.wire.canonical import canonical


def step_entry(
    call: StepCall[Any], now_ms: int, started_ms: int, result: Any, error: BaseException | None
) -> tuple[bytes, int | None]:
    """The record of an attempt that has ended, and when the timer for the next one is due."""
    if error is None:
        try:
            return _result_entry(call, now_ms, started_ms, result), None
        except FastnessError as unusable:
            error = unusable
    return _error_entry(call, now_ms, started_ms, error)


def _result_entry(call: StepCall[Any], now_ms: int, started_ms: int, result: Any) -> bytes:
    """The record of a step's result.

    Raises:
        PayloadTooLarge, InvalidArgument, InvalidValue: it cannot be recorded.
    """
    value = plain(result)
    call.convert(value)
    entry = canonical_flat([words.STEP, now_ms, call.number, call.name, started_ms, value])
    if len(entry) > RUN_RESULT_BYTES_MAX:
        raise PayloadTooLarge(
            f"The result of step {call.name} has {len(entry)} bytes and may have {RUN_RESULT_BYTES_MAX}; store it as a "
            "blob in the step, and return its hash"
        )
    return entry


def _error_entry(call: StepCall[Any], now_ms: int, started_ms: int, error: BaseException) -> tuple[bytes, int | None]:
    """The record of a failed attempt, and when its timer is due, if it has one."""
    failures, retry = call.attempts + 1, call.retry
    delay = None
    if retry is not None and call.queue is None and isinstance(error, retry.on):
        delay = retry.delay_after(failures)
    if delay is None:
        record = [words.FAILED, now_ms, call.number, call.name, started_ms, error_of(error), failures]
        return canonical(record), None
    due_ms = now_ms + round(delay * 1_000)
    record = [words.RETRY, now_ms, call.number, call.name, started_ms, error_of(error), due_ms]
    return canonical(record), due_ms if due_ms - now_ms > words.TIMER_DELAY_MS else None
