"""The record of an attempt of a step: its result, or its error, inputs, and when the next attempt is due."""

from collections.abc import Awaitable, Callable
from typing import Any, Final, NamedTuple

from fastness.errors import FastnessError, PayloadTooLarge
from fastness.handles.workers.consumers import is_final
from fastness.hosts.failures import text_of
from fastness.hosts.workflows.operations import StepCall
from fastness.hosts.workflows.steps import error_of
from fastness.hosts.workflows.values import canonical_flat, plain
from fastness.limits import FAILURES_BYTES_MAX, RUN_BLOB_BYTES_MAX, RUN_RESULT_BYTES_MAX, TRACEBACK_BYTES_MAX
from fastness.wire import run_records as words
from fastness.wire.canonical import canonical

Store = Callable[[bytes], Awaitable[str]]  # Stores a blob; its hash.

_TRACEBACKS_MAX: Final = (
    FAILURES_BYTES_MAX // TRACEBACK_BYTES_MAX
)  # Of one step: of its first attempts, and of the last.
_DESCRIBED_CHARACTERS: Final = 1_000  # Of an input that cannot be recorded.


class StepOutcome(NamedTuple):
    """The record of an attempt that has ended."""

    entry: bytes
    due_ms: int | None = None  # Of the timer for the next attempt.
    blob: str | None = None  # That the record names.


async def step_outcome(
    call: StepCall[Any], result: Any, error: BaseException | None, *, now_ms: int, started_ms: int, store: Store
) -> StepOutcome:
    """The record of an attempt, with what is too large for it in a blob.

    Raises:
        FastnessError: a blob cannot be stored now, and may be later.
    """
    if error is None:
        try:
            return await _result(call, now_ms, started_ms, result, store)
        except FastnessError as unusable:
            if not is_final(unusable):
                raise
            error = unusable
    return await _failure(call, now_ms, started_ms, error, store)


async def _result(call: StepCall[Any], now_ms: int, started_ms: int, result: Any, store: Store) -> StepOutcome:
    """The record of a step's result.

    Raises:
        PayloadTooLarge, InvalidArgument, InvalidValue: it cannot be recorded.
    """
    value = plain(result)
    call.convert(value)
    record = [words.STEP, now_ms, call.number, call.name, started_ms]
    entry = canonical_flat([*record, value])
    if len(entry) <= RUN_RESULT_BYTES_MAX:
        return StepOutcome(entry)
    if len(entry) > RUN_BLOB_BYTES_MAX:
        raise PayloadTooLarge(
            f"The result of step {call.name} has {len(entry)} bytes and may have {RUN_BLOB_BYTES_MAX}; write it with "
            "plane.blobs.write in the step, and return its hash"
        )
    blob = await store(canonical(value))
    return StepOutcome(canonical_flat([*record, None, blob]), blob=blob)


async def _failure(
    call: StepCall[Any], now_ms: int, started_ms: int, error: BaseException, store: Store
) -> StepOutcome:
    """The record of a failed attempt."""
    failures, retry = call.attempts + 1, call.retry
    delay = None
    if retry is not None and call.queue is None and isinstance(error, retry.on):
        delay = retry.delay_after(failures)
    described = error_of(error)
    if call.queue is None and (delay is None or failures < _TRACEBACKS_MAX):  # The dead letter of a task has its own.
        described.append(text_of(error))
    record = [now_ms, call.number, call.name, started_ms, described]
    if delay is None:
        inputs, blob = await _inputs(call, store)
        return StepOutcome(canonical([words.FAILED, *record, failures, *inputs]), blob=blob)
    inputs, blob = await _inputs(call, store) if failures == 1 else ([], None)
    due_ms = now_ms + round(delay * 1_000)
    entry = canonical([words.RETRY, *record, due_ms, *inputs])
    return StepOutcome(entry, due_ms if due_ms - now_ms > words.TIMER_DELAY_MS else None, blob)


async def _inputs(call: StepCall[Any], store: Store) -> tuple[list[Any], str | None]:
    """What a step was called with, as its record has it, and the blob that this names."""
    inputs = [
        [_recordable(each) for each in call.args],
        {name: _recordable(each) for name, each in call.kwargs.items()},
    ]
    encoded = canonical(inputs)
    if len(encoded) <= RUN_RESULT_BYTES_MAX // 2:  # The error needs space, too.
        return [inputs], None
    try:
        blob = await store(encoded)
    except FastnessError:  # The failure itself is recorded all the same.
        return [], None
    return [None, blob], blob


def _recordable(value: Any) -> Any:
    """An input as CBOR has it; what has no such form is described."""
    try:
        found = plain(value)
        canonical([[[found]]])  # As deep as it is in the record.
    except FastnessError:
        return _described(value)
    return found


def _described(value: Any) -> str:
    try:
        text = repr(value)[:_DESCRIBED_CHARACTERS]
    except Exception as error:  # Of the value's own code.
        text = f"<{type(value).__name__}, whose repr raises {type(error).__name__}>"
    return text.encode(errors="replace").decode()
