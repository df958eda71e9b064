"""Runs the code of a workflow, deterministically: the same history gives the same execution.

The code is not run by an event loop. Its main coroutine and the branches of its groups are *strands*. A strand runs
until it awaits a call that has no result. Records of the history give results to calls, strictly in their order, and
after each one all strands that can run do so, first come first served. A live run takes each record when it is
committed, and a restored run takes the same records from its journal: both execute the code in the same order.

Every call gets the next number when it is made. A record says which call it belongs to, and what that call was. If the
code makes another call at that number, the code was changed, and the run is stopped with `WorkflowChanged`.

While the code runs, asyncio finds no event loop: a timeout, for example, would cancel a task of the host.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from random import Random
from typing import Any, Final

from fastness.errors import FastnessError, RunCancelled, RunFailed, StepFailed, WorkflowChanged, WorkflowMisuse
from fastness.hosts.workflows.operations import (
    Call,
    ChildCall,
    Operation,
    SentCall,
    StepCall,
    Strand,
    WaitCall,
)
from fastness.hosts.workflows.records import CANCEL, ENDED, FIRED, RECEIVED, START, Record
from fastness.limits import RUN_CALLS_MAX
from fastness.wire import run_records as words
from fastness.wire.runs import COMPLETED

Begin = Callable[[list[Any], dict[str, Any]], Coroutine[Any, Any, Any]]


class Continued(BaseException):
    """Raised by `run.continue_as_new`. Not an Exception: the code must not catch it by accident."""

    def __init__(self, arguments: list[Any]) -> None:
        super().__init__()
        self.arguments = arguments


class Scheduler:
    """One generation of a run: its strands, and what they wait for."""

    def __init__(
        self, run_id: str, begin: Begin, *, generation: int = 0, patches: frozenset[str] = frozenset()
    ) -> None:
        """The execution of a run's code.

        Args:
            run_id: names the run in errors.
            begin: makes the main coroutine from args and kwargs.
            generation: how often the run was continued as new.
            patches: the names of the patches that the whole history has.
        """
        self.run_id = run_id
        self.generation = generation
        self.now_ms = 0
        self.random = Random(0)
        self.is_replaying = False  # Further records of the history follow.
        self.is_running = False  # Code of the workflow is running now.
        self.is_closed = False
        self.main: Strand[Any] | None = None
        self.continued: list[Any] | None = None  # The arguments for the next generation.
        self.cancel_reason: str | None = None
        self.requested: dict[int, Call[Any]] = {}  # Calls by number that the host has to begin.
        self.dropped: list[Call[Any]] = []  # Calls that were cancelled, until the host has seen them.
        self.new_patches: list[str] = []  # Their records are missing.
        self.timers: dict[str, int] = {}  # The numbers of calls by their timers, which have not fired.
        self.stale_timers: list[str] = []  # Timers that are not needed any more, until the host has cancelled them.
        self.children: dict[str, int] = {}  # The numbers of calls by the ids of runs that have not ended.
        self.child_ids: set[str] = set()  # Of all children that the code has asked for.
        self.signals: list[tuple[str, Any]] = []  # Received, and not consumed.
        self._begin = begin
        self._arguments: list[Any] = [[], {}]
        self._calls = 0
        self._pending: dict[int, Call[Any]] = {}
        self._waits: dict[str, deque[WaitCall]] = {}  # By signal; the oldest first.
        self._ready: deque[Strand[Any]] = deque()
        self._strands: dict[Strand[Any], None] = {}  # That have not ended.
        self._current: Strand[Any] | None = None  # The one that runs now, or ran last.
        self._no_loop: Any = _NoEventLoop(run_id)
        self._patches: dict[str, bool] = dict.fromkeys(patches, True)
        self._apply: Final[dict[str, Callable[[Record], None]]] = {
            START: self._on_start,
            RECEIVED: self._on_signal,
            FIRED: self._on_timer,
            ENDED: self._on_child_end,
            CANCEL: self._on_cancel,
            words.BEGIN: self._on_begin,
            words.STARTED: self._on_started,
            words.STEP: self._on_step,
            words.RETRY: self._on_retry,
            words.FAILED: self._on_failed,
            words.QUEUED: self._on_queued,
            words.SLEEP: self._on_timer_set,
            words.WAIT: self._on_timer_set,
            words.CHILD: self._on_child,
            words.PATCH: self._ignore,
            words.END: self._ignore,
            **dict.fromkeys(words.SENT, self._on_sent),
        }

    @property
    def is_ended(self) -> bool:
        """Whether the code has ended, so that only its outcome is left to record.

        A cancelled run ends when its branches have cleaned up, also those that it does not await any more.
        """
        if self.main is None:
            return False
        if self.cancel_reason is not None:
            return not self._strands
        return self.continued is not None or self.main.is_done

    @property
    def waits_for_others(self) -> bool:
        """Whether the code waits for a signal, or for the end of a child."""
        return bool(self.children) or any(not call.is_done for waits in self._waits.values() for call in waits)

    @property
    def next_number(self) -> int:
        """The number of the next call."""
        return self._calls

    def feed(self, record: Record) -> None:
        """Apply the next record of the history, and run the code as far as it goes.

        Raises:
            WorkflowChanged: the code does not make the call that the record belongs to.
        """
        self.now_ms = max(self.now_ms, record[1])
        self._apply[record[0]](record)
        if self._ready:
            self._run_strands()

    def call(self, call: Call[Any]) -> None:
        """Number a call that the code makes, and ask the host for it."""
        self.check_running()
        if self._calls >= RUN_CALLS_MAX:
            raise WorkflowMisuse(
                f"Run {self.run_id} has made {RUN_CALLS_MAX} calls, and its history has a limit; "
                "call run.continue_as_new from time to time"
            )
        call.number = self._calls
        call.made_by = self._current
        self._calls += 1
        if isinstance(call, WaitCall) and self._consume_signal(call):
            return
        self._pending[call.number] = call
        self.requested[call.number] = call

    def branch(self, coroutine: Coroutine[Any, Any, Any]) -> Strand[Any]:
        """Run a coroutine beside the others."""
        strand = Strand(coroutine, self._ready)
        strand.made_by = self._current
        self._strands[strand] = None
        self._ready.append(strand)
        return strand

    def patched(self, name: str) -> bool:
        """Whether the changed code applies: unless the history was recorded here without the patch."""
        self.check_running()
        applies = self._patches.get(name)
        if applies is None:
            applies = self._patches[name] = not self.is_replaying
            if applies:
                self.new_patches.append(name)
        return applies

    def check_running(self) -> None:
        """Raise unless the code of the workflow is running now.

        Raises:
            WorkflowMisuse: it is not: `run` was used in a step, or in another task or thread.
        """
        if self.is_closed:
            raise GeneratorExit  # The coroutine is being closed; its `finally` must not begin anything.
        if not self.is_running:
            raise WorkflowMisuse(
                f"Run {self.run_id}: run.* was called outside of the workflow's code; a step or a thread must not "
                "use it: return a value from the step, and call run.* with it"
            )

    def close(self) -> None:
        """Drop the code where it is, without running it further."""
        self.is_closed = True
        for strand in list(self._strands):
            _close(strand.coroutine)
        self._strands.clear()
        self._ready.clear()

    # What the records of the history do.

    def _on_start(self, record: Record) -> None:
        self._arguments = record[2]

    def _on_begin(self, record: Record) -> None:
        self.random = Random(record[2])
        if self.cancel_reason is not None:  # It has done nothing that must be cleaned up.
            self.main = self.branch(_raise(self._cancelled(self.cancel_reason)))
        else:
            args, kwargs = self._arguments
            self.main = self.branch(self._begin(args, kwargs))

    def _on_started(self, record: Record) -> None:
        call = self._recorded(record)
        if isinstance(call, StepCall):
            call.is_started = True
            self.requested[call.number] = call

    def _on_step(self, record: Record) -> None:
        call = self._recorded(record)
        if isinstance(call, StepCall):
            try:
                value = call.convert(record[5])
            except FastnessError as error:
                raise self._misfit(call, error) from None
            self._end(call, value)

    def _on_retry(self, record: Record) -> None:
        call = self._recorded(record)
        if isinstance(call, StepCall):
            call.attempts += 1
            call.message_id = None
            if record[6] - record[1] > words.TIMER_DELAY_MS:
                self.timers[self.timer_of(call.number)] = call.number
                self.requested.pop(call.number, None)
            else:
                call.due_ms = record[6]
                self.requested[call.number] = call

    def _on_failed(self, record: Record) -> None:
        call = self._recorded(record)
        if call is not None:
            (kind, message, *_), attempts = record[5], record[6]
            self._end(call, StepFailed(call.name or call.kind, kind, message, attempts), is_error=True)

    def _on_queued(self, record: Record) -> None:
        call = self._recorded(record)
        if isinstance(call, StepCall):
            call.message_id = record[5]

    def _on_timer_set(self, record: Record) -> None:
        call = self._recorded(record)
        if record[4] is not None:
            timer = self.timer_of(record[2])
            if call is None:
                self.stale_timers.append(timer)
            else:
                self.timers[timer] = record[2]
        self.requested.pop(record[2], None)

    def _on_child(self, record: Record) -> None:
        self._recorded(record)
        self.children[record[4]] = record[2]
        self.requested.pop(record[2], None)

    def _on_sent(self, record: Record) -> None:
        call = self._recorded(record)
        self.requested.pop(record[2], None)
        if call is not None:
            self._end(call, None)

    def _on_signal(self, record: Record) -> None:
        _, _, name, value = record[:4]
        waits = self._waits.get(name)
        while waits:
            call = waits.popleft()
            if not call.is_done:
                self._end(call, value)
                return
        self.signals.append((name, value))

    def _on_timer(self, record: Record) -> None:
        number = self.timers.pop(record[2], None)
        call = None if number is None else self._pending.get(number)
        if isinstance(call, StepCall):
            self.requested[call.number] = call  # Its next attempt is due.
        elif call is not None:
            self._end(call, None)

    def _on_child_end(self, record: Record) -> None:
        number = self.children.pop(record[2], None)
        call = None if number is None else self._pending.get(number)
        if not isinstance(call, ChildCall):
            return
        outcome = record[3]
        if outcome["state"] == COMPLETED:
            try:
                value = call.convert(outcome["result"])
            except FastnessError as error:
                raise self._misfit(call, error) from None
            self._end(call, value)
        else:
            reason = outcome.get("error") or "without a reason"
            self._end(call, RunFailed(f"Child {record[2]} {outcome['state']}: {reason}"), is_error=True)

    def _on_cancel(self, record: Record) -> None:
        if self.cancel_reason is not None or self.is_ended:
            return
        self.cancel_reason = record[2]
        for call in list(self._pending.values()):
            if not isinstance(call, SentCall):  # What is sent was asked for before, and is sent.
                self.dropped.append(call)
                self.requested.pop(call.number, None)
            self._end(call, self._cancelled(record[2]), is_error=True)

    def _cancelled(self, reason: str) -> RunCancelled:
        return RunCancelled(f"Run {self.run_id} was cancelled{f': {reason}' if reason else ''}")

    def _ignore(self, record: Record) -> None:
        """The record changes nothing for the code."""

    def timer_of(self, number: int) -> str:
        """The id of the timer of a call."""
        return f"{self.generation}.{number}"

    # Calls and strands.

    def _recorded(self, record: Record) -> Call[Any] | None:
        """The call that a record belongs to; None if it has ended meanwhile.

        Raises:
            WorkflowChanged: the code makes another call, or none, at that number.
        """
        word, _, number, name = record[:4]
        call = self._pending.get(number)
        if call is None:
            if number < self._calls:
                return None
            raise self._changed(record, self._why_missing())
        kind = words.STEP if word in words.OF_STEPS else word
        if call.name != name or (word != words.FAILED and call.kind != kind):
            raise self._changed(record, f"the code makes the call {_named(call.kind, call.name)} there")
        return call

    def _why_missing(self) -> str:
        """Why the code does not make a call that is recorded."""
        if self.main is None or self.main.error is None:
            return "the code makes no such call any more"
        kind, message = type(self.main.error).__name__, str(self.main.error)
        return f"the code fails before it makes that call ({kind}: {message})"

    def _dropped_work(self) -> WorkflowMisuse | None:
        """Why the code must not end here: a step would never begin, or be stopped, without a word."""
        if self.cancel_reason is not None:
            return None
        what = None
        for call in self._pending.values():
            if isinstance(call, StepCall) and not call.is_awaited and call.made_by not in self._strands:
                what = f"{_named(call.kind, call.name)} (call {call.number})"
        for strand in self._strands:
            if not strand.is_awaited and strand.made_by not in self._strands:
                what = "a coroutine that was given to run.gather"
        if what is None:
            return None
        return WorkflowMisuse(
            f"Run {self.run_id} ends without {what}, which the code does not await: it would be stopped, or never "
            "begin. Await it before the end; for work that may go on after this run, use run.child or run.put"
        )

    def _changed(self, record: Record, what: str) -> WorkflowChanged:
        word, _, number, name = record[:4]
        kind = words.STEP if word in words.OF_STEPS else word
        return WorkflowChanged(
            f"Run {self.run_id} has recorded {_named(kind, name)} as call {number}, and {what}. Deploy code that makes "
            'the recorded calls first (put the change behind run.patched("name")), then resume the run'
        )

    def _misfit(self, call: Call[Any], error: FastnessError) -> WorkflowChanged:
        return WorkflowChanged(
            f"Run {self.run_id} has recorded {_named(call.kind, call.name)} as call {call.number}, and its result does "
            f"not fit the code any more ({error}). Deploy code that takes it, then resume the run"
        )

    def _consume_signal(self, call: WaitCall) -> bool:
        for index, (name, value) in enumerate(self.signals):
            if name == call.name:
                del self.signals[index]
                call.resolve(value)
                return True
        self._waits.setdefault(call.name, deque()).append(call)
        return False

    def _end(self, call: Call[Any], value: Any, *, is_error: bool = False) -> None:
        number = call.number
        self._pending.pop(number, None)
        if not isinstance(call, SentCall):
            self.requested.pop(number, None)
        if self.timers and (timer := self.timer_of(number)) in self.timers:
            del self.timers[timer]
            self.stale_timers.append(timer)
        if is_error:
            call.fail(value)
        else:
            call.resolve(value)

    def _run_strands(self) -> None:
        ready = self._ready
        self.is_running = True
        loop = asyncio._get_running_loop()
        asyncio._set_running_loop(self._no_loop)
        try:
            while ready and not self.is_ended:
                self._run_strand(ready.popleft())
        finally:
            asyncio._set_running_loop(loop)
            self.is_running = False
        if self.is_ended:
            self.close()

    def _run_strand(self, strand: Strand[Any]) -> None:
        coroutine = strand.coroutine
        self._current = strand
        try:
            awaited = coroutine.send(None)
            while not isinstance(awaited, Operation):
                # Raised where the code awaits it, so that its traceback shows the line.
                awaited = coroutine.throw(
                    WorkflowMisuse(
                        f"Run {self.run_id} awaits {type(awaited).__name__}, which is not a call of run. The code of a "
                        "workflow is executed again from its records: put everything else that waits into a step, "
                        "await run.step(function, …)"
                    )
                )
            awaited.when_done(strand.wake)
        except StopIteration as end:
            del self._strands[strand]
            dropped = self._dropped_work() if strand is self.main else None
            if dropped is None:
                strand.resolve(end.value)
            else:
                strand.fail(dropped)
        except Continued as end:
            del self._strands[strand]
            dropped = self._dropped_work()
            if dropped is None or self.main is None:
                self.continued = end.arguments
            else:
                self.main.fail(dropped)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # Also a CancelledError, which must not end the task of the host.
            del self._strands[strand]
            strand.fail(error)


class _NoEventLoop:
    """Stands where asyncio looks for the running event loop, and refuses everything."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id

    def __getattr__(self, name: str) -> Any:
        raise self._refusal()

    def __hash__(self) -> int:  # asyncio looks for the current task of the loop.
        raise self._refusal()

    def _refusal(self) -> WorkflowMisuse:
        return WorkflowMisuse(
            f"Run {self._run_id} uses the event loop, as asyncio.timeout, asyncio.sleep and asyncio.gather do. The "
            "code of a workflow is executed again from its records, and has none. Give a step its limit, "
            "run.step(function, …, timeout=5); wait with run.sleep(5) or run.wait_for(signal, timeout=5); run "
            "coroutines side by side with run.gather(…); and put everything else that waits into a step"
        )


def _named(kind: str, name: str) -> str:
    return f"{kind} {name}" if name else kind


async def _raise(error: Exception) -> None:
    raise error


def _close(coroutine: Coroutine[Any, Any, Any]) -> None:
    with suppress(BaseException):  # The code of a dropped run has nothing to say.
        coroutine.close()
