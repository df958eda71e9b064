"""Runs a workflow in a claimed world: carries out what its code asks for, and commits the records.

    items arrive, or steps end ──► the code runs on, until it waits ──► one commit ──► its next steps are started
                                                                         the items, the results, and what the code
                                                                         has asked for: timers, messages, its end

A step is started when its start is committed, with everything that it follows from, and what is sent is part of the
commit of its record. So code that was changed cannot give the id of a step that may have run to another one. The start
shares the commit of the result or the item before it: steps in a row cost one commit each, and what is ready while a
commit is under way shares the next one. Only after what may be refused, a message or a child that the code has waited
for, a start needs a commit of its own. If the host ends, a step without a result is run again. A commit that fails ends
the runner, and the run is restored from its journal.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from typing import Any, Final, NamedTuple

import cbor2
import msgspec

from fastness.errors import (
    Backend,
    Busy,
    Closed,
    FastnessError,
    Fenced,
    HeadAdvanced,
    NotFound,
    PayloadTooLarge,
    RunCancelled,
    RunExists,
    RunNotFound,
    WorkflowChanged,
)
from fastness.handles.queues import stored_messages
from fastness.handles.workers.consumers import is_final
from fastness.hosts.failures import text_of
from fastness.hosts.hosted_world import HostedWorld
from fastness.hosts.step_context import StepContext, set_current_step
from fastness.hosts.workflows.operations import Call, ChildCall, SentCall, SleepCall, StepCall, WaitCall
from fastness.hosts.workflows.records import ENDED, RECEIVED, START, Record, RunState, fold, has_ended, record_of
from fastness.hosts.workflows.run import WorkflowRun
from fastness.hosts.workflows.scheduler import Scheduler
from fastness.hosts.workflows.step_records import step_outcome
from fastness.hosts.workflows.steps import error_of, run_here, run_on_queue
from fastness.hosts.workflows.values import canonical_flat, plain
from fastness.hosts.workflows.workflow import Workflow
from fastness.limits import BATCH_BYTES_MAX, INBOX_INLINE_BYTES_MAX, RUN_VALUE_BYTES_MAX
from fastness.wire import run_records as words
from fastness.wire.atomic import Step
from fastness.wire.blobs import GetBlob, PutBlob
from fastness.wire.canonical import canonical
from fastness.wire.inboxes import DomainEvent, InboxItem, Timer
from fastness.wire.queues import CancelMessage, PutMessages
from fastness.wire.restores import Entry
from fastness.wire.runs import (
    CANCELLED,
    COMPLETED,
    FAILED,
    RUN_PREFIX,
    CancelRun,
    GetRun,
    StartRun,
    UpdateRun,
)
from fastness.wire.worlds import PutItem

_log = logging.getLogger("fastness.host")
_encode_item = msgspec.msgpack.Encoder().encode
_RECORDS_MAX: Final = 120  # Items, and also entries, of one commit: with the opening one they fit a batch.
_BYTES_MAX: Final = BATCH_BYTES_MAX * 47 // 100  # The same for their bytes.
_RECORD_BYTES: Final = 64  # What the record of an item may be longer than the item itself.
_STORE_PAUSE_SECONDS: Final = 1.0  # Before a blob is stored again.
_CLOSE_SECONDS: Final = 5.0  # How long steps may take to end when they are cancelled.
_NOT_OF_CALLS: Final = (Fenced, HeadAdvanced, Backend, Busy, Closed)  # Errors of the claim or of the plane.


class _Pending(NamedTuple):
    """A record to commit, with what belongs into the same commit."""

    number: int
    entry: bytes
    due_ms: int | None = None  # Of its timer.
    call: Call[Any] | None = None  # Sends something, or starts a child.
    is_kept: bool = False  # It is committed even if the code has ended.
    blob: str | None = None  # The hash of one that it names.


class WorkflowRunner:
    """Runs one claimed run, until it ends or the claim does."""

    def __init__(self, workflow: Workflow[..., Any], world: HostedWorld) -> None:
        self._workflow = workflow
        self._world = world
        self._run_id = world.name.removeprefix(RUN_PREFIX)
        self._state: RunState | None = None
        self._scheduler: Scheduler | None = None
        self._snapshot_height = 0
        self._pending: deque[_Pending] = deque()
        self._applied = 0  # How many of them the code has seen: they are committed next, before anything else.
        self._taken: list[tuple[int, InboxItem]] = []  # Items that the code has seen, until they are committed,
        self._opening: list[bytes] = []  # with the records before
        self._beginning: list[bytes] = []  # and after them.
        self._steps: dict[int, asyncio.Task[None] | asyncio.TimerHandle] = {}  # Running, or soon to run, by number.
        self._on_queues: set[int] = set()  # The numbers of steps that were started as tasks of a queue.
        self._cancelled_children: set[str] = set()
        self._sends_singly = False  # A commit was refused: find out which call is to blame.
        self._has_ended = False
        self._is_draining = False
        self._is_held_back = False  # A step was not started, because the host stops.
        self._is_closed = False
        self._lock = asyncio.Lock()  # One commit at a time.
        self._committing: asyncio.Task[None] | None = None
        self._context = copy_context()  # Of steps: what one sets does not reach the next one.
        self._failure: Exception | None = None  # Of a turn, or of a commit between turns.

    @property
    def is_active(self) -> bool:
        """Whether steps are running, or records are to be committed."""
        return bool(self._steps or self._pending) or self._committing is not None or self._is_held_back

    @property
    def waits(self) -> bool:
        """Whether the code waits for a signal, or for the end of a child."""
        return self._scheduler is None or self._scheduler.waits_for_others

    async def run_turn(self) -> None:
        """Take the items that arrived, run the code, and commit once; what follows is committed between turns.

        Raises:
            WorkflowChanged: the code was changed in a way that does not fit the history.
        """
        async with self._lock:
            if self._failure is not None:
                raise self._failure
            try:
                await self._commit_next()
            except Exception as error:
                self._failure = error  # Nothing is committed any more; the host closes this runner.
                raise
        self._commit_soon()

    async def drain(self) -> None:
        """Start no further step, wait for those that run, and commit their results."""
        self._is_draining = True
        for number, step in list(self._steps.items()):
            # What is to be tried again soon, and tasks of a queue, are left to the next host.
            if not isinstance(step, asyncio.Task) or number in self._on_queues:
                del self._steps[number]
                step.cancel()
                self._is_held_back = True
        while running := [step for step in self._steps.values() if isinstance(step, asyncio.Task)]:
            await asyncio.wait(running)
        if self._committing is not None:
            await asyncio.wait([self._committing])

    async def close(self) -> None:
        """Stop everything, without a commit."""
        self._is_closed = True
        running = [step for step in self._steps.values() if isinstance(step, asyncio.Task)]
        for step in self._steps.values():
            step.cancel()
        self._steps.clear()
        if self._committing is not None:
            self._committing.cancel()
            running.append(self._committing)
        if running:
            await asyncio.wait(running, timeout=_CLOSE_SECONDS)
        if self._scheduler is not None:
            self._scheduler.close()

    # Commits.

    @property
    def _has_work(self) -> bool:
        if self._is_closed or self._has_ended or self._failure is not None or self._world.is_lost:
            return False
        scheduler = self._scheduler
        return bool(scheduler is None or self._pending or self._taken or self._world.items or scheduler.is_ended)

    def _commit_soon(self) -> None:
        """Commit what is ready, between turns."""
        if self._committing is None and self._has_work:
            self._committing = asyncio.create_task(self._commit_while_ready())

    async def _commit_while_ready(self) -> None:
        try:
            while self._has_work:
                async with self._lock:
                    await self._commit_next()
        except Exception as error:
            self._failure = error
        finally:
            self._committing = None
            if not self._is_closed and (self._failure is not None or not self.is_active):
                self._world.request_turn()  # The host handles the failure, or gives the world back in time.

    async def _commit_next(self) -> None:
        if self._scheduler is None and self._has_work:
            await self._restore()
        if self._has_work:
            await self._commit()

    async def _commit(self) -> None:
        """Let the code run on with what is ready, and commit that with what the code asks for."""
        scheduler, world = self._scheduler, self._world
        assert scheduler is not None
        if not self._applied and not self._taken and not scheduler.is_ended:
            await self._take_items(scheduler)
        await self._apply_pending(scheduler)
        is_last = scheduler.is_ended and not self._is_unsent()
        chosen = self._next_pending()
        stale = [*scheduler.stale_timers, *(scheduler.timers if is_last else ())]
        entries = [*self._beginning, *(each.entry for each in chosen)]
        first = len(self._opening) + len(self._taken) + len(self._beginning)
        ending: Step | None = None
        try:
            operations = await self._operations(chosen)
            if is_last:
                entry, ending = await self._ending(scheduler, self._now_ms(scheduler))
                entries.append(entry)
                if ending is not None:
                    operations.append(ending)
            await world.commit(
                take=self._taken[-1][0] if self._taken else None,
                opening=self._opening,
                entries=entries,
                timers=[
                    (first + offset, Timer(each.due_ms * 1_000_000, scheduler.timer_of(each.number).encode()))
                    for offset, each in enumerate(chosen)
                    if each.due_ms is not None
                ],
                cancelled_timers=[timer.encode() for timer in stale],
                blobs=[each.blob for each in chosen if each.blob is not None],
                operations=operations,
            )
        except FastnessError as error:
            self._pending.extendleft(reversed(chosen))
            if isinstance(error, _NOT_OF_CALLS) or not any(each.call for each in chosen):
                raise
            self._blame(chosen, error)
            return
        scheduler.stale_timers.clear()
        if ending is not None:
            self._end()
        elif is_last:
            await self._continue(scheduler, entries[-1])
        else:
            await self._finish_commit(scheduler, chosen)

    async def _take_items(self, scheduler: Scheduler) -> None:
        """Let the code see the items that arrived; they are taken by the next commit."""
        items = self._next_items()
        if not items:
            return
        now_ms = self._now_ms(scheduler)
        self._taken = items
        self._opening = [canonical({"turn": now_ms})]
        if not self._history:
            self._beginning = [canonical([words.BEGIN, now_ms, self._world.new_seed()])]
        await self._apply(scheduler, [Entry(0, "entry", cbor2.loads(each)) for each in self._opening])
        await self._apply(scheduler, [Entry(0, "ingress", _ingress(sequence, item)) for sequence, item in items])
        await self._apply(scheduler, [Entry(0, "entry", cbor2.loads(each)) for each in self._beginning])
        self._collect(scheduler)

    async def _apply_pending(self, scheduler: Scheduler) -> None:
        """Let the code see the next records, up to one that may be refused; what it asks for joins their commit."""
        size = 0
        while self._applied < min(len(self._pending), _RECORDS_MAX) and not scheduler.is_ended:
            each = self._pending[self._applied]
            size += len(each.entry)
            may_be_refused = each.call is not None and each.call.kind != words.STATE
            if may_be_refused or size > _BYTES_MAX:
                return
            self._applied += 1
            await self._apply(scheduler, [Entry(0, "entry", cbor2.loads(each.entry))])
            self._collect(scheduler)

    async def _apply(self, scheduler: Scheduler, entries: list[Entry]) -> None:
        """Add records to the history, and let the code see them."""
        for entry in entries:
            record = record_of(self._state, entry)
            self._state = fold(self._state, entry)
            if record is not None:
                scheduler.feed(await self._loaded(record) if record[0] in _WITH_BLOBS else record)

    async def _finish_commit(self, scheduler: Scheduler, chosen: list[_Pending]) -> None:
        """Let the code see what could have been refused, and start the steps that follow from what is committed."""
        self._taken, self._opening, self._beginning = [], [], []
        seen = min(self._applied, len(chosen))
        self._applied -= seen
        if seen < len(chosen):
            await self._apply(scheduler, [Entry(0, "entry", cbor2.loads(each.entry)) for each in chosen[seen:]])
            self._collect(scheduler)
        if self._sends_singly and not any(each.call is not None for each in self._pending):
            self._sends_singly = False
        if not self._applied:  # What the code has asked for last follows from what is committed.
            await self._carry_out(scheduler)
            grown = self._world.head - self._snapshot_height
            if grown >= max(self._world.policy.snapshot_every, len(self._history) // 2):
                await self._take_snapshot()

    async def _continue(self, scheduler: Scheduler, entry: bytes) -> None:
        """Start the next generation of the run."""
        self._taken, self._opening, self._beginning, self._applied = [], [], [], 0
        self._state = fold(self._state, Entry(0, "entry", cbor2.loads(entry)))
        scheduler.close()
        self._drop_steps()
        self._pending.clear()
        self._on_queues.clear()
        self._cancelled_children.clear()
        await self._take_snapshot()
        await self._replay()

    def _next_items(self) -> list[tuple[int, InboxItem]]:
        items: list[tuple[int, InboxItem]] = []
        size = 0
        for sequence, item in self._world.items:
            size += len(_encode_item(item)) + _RECORD_BYTES
            if items and (size > _BYTES_MAX or len(items) == _RECORDS_MAX):
                break
            items.append((sequence, item))
        return items

    def _next_pending(self) -> list[_Pending]:
        """The records of the next commit."""
        chosen: list[_Pending] = []
        size, pending = 0, self._pending
        while pending:
            size += len(pending[0].entry)
            if chosen and (
                size > _BYTES_MAX
                or len(chosen) == _RECORDS_MAX
                or (self._sends_singly and (pending[0].call is not None or chosen[0].call is not None))
            ):
                break
            chosen.append(pending.popleft())
        return chosen

    def _is_unsent(self) -> bool:
        """Whether the code has ended, and so much is to be sent that it needs a commit of its own."""
        assert self._scheduler is not None
        self._forget_pending(None)
        size = sum(len(each.entry) for each in self._pending)
        return (self._sends_singly and bool(self._pending)) or len(self._pending) > _RECORDS_MAX or size > _BYTES_MAX

    def _forget_pending(self, numbers: set[int] | None) -> None:
        """Drop records of these calls, or of all, that need not be committed. What the code has seen is committed."""
        self._pending = deque(
            each
            for index, each in enumerate(self._pending)
            if index < self._applied or (each.is_kept if numbers is None else each.number not in numbers)
        )

    def _blame(self, chosen: list[_Pending], error: FastnessError) -> None:
        """A commit was refused because of a call: find it by single commits, and let it fail."""
        if len(chosen) > 1:
            self._sends_singly = True
            return
        call = chosen[0].call
        assert call is not None
        self._pending.popleft()
        now_ms = self._world.now_ms()
        record = [words.FAILED, now_ms, call.number, call.name, now_ms, error_of(error), 1]
        self._pending.appendleft(_Pending(call.number, canonical(record), is_kept=True))
        _log.warning("run %s: %s %s is refused: %s", self._run_id, call.kind, call.name, error)

    async def _operations(self, chosen: list[_Pending]) -> list[Step]:
        """The operations of calls, with large payloads stored as blobs."""
        transport, universe = self._world.transport, self._world.universe
        found: list[Step] = []
        for call in (each.call for each in chosen):
            if isinstance(call, ChildCall):
                if call.has_own_id:
                    await self._check_new_run(call.id)
                found.append(StartRun(call.name, call.id, call.arguments, self._run_id, universe))
            elif isinstance(call, SentCall):
                request = call.request
                if request is None:
                    request = UpdateRun(self._run_id, self._world.fence, published=call.published, universe=universe)
                elif isinstance(request, PutMessages):
                    messages = await stored_messages(transport, universe, request.messages)
                    request = msgspec.structs.replace(request, messages=messages)
                elif isinstance(request, PutItem) and request.universe != universe:
                    assert isinstance(request.item, DomainEvent), "run.send makes no other items"
                    request = self._world.send_request(request.world, request.universe, request.item)
                elif isinstance(request, PutItem) and len(request.item.payload) > INBOX_INLINE_BYTES_MAX:
                    stored = await transport.call(PutBlob(request.item.payload, universe, pinned=False))
                    item = msgspec.structs.replace(request.item, payload=b"", payload_blob=stored.hash)
                    request = msgspec.structs.replace(request, item=item)
                found.append(request)
        return found

    async def _check_new_run(self, id: str) -> None:
        """Refuse the id of a run that exists: it was not started by this call, and may have ended already."""
        try:
            known = await self._world.transport.call(GetRun(id, universe=self._world.universe))
        except RunNotFound:
            return
        raise RunExists(f"Run {id} exists: it is a run of workflow {known.workflow}; choose another id")

    async def _ending(self, scheduler: Scheduler, now_ms: int) -> tuple[bytes, Step | None]:
        """The last record of this execution, and what ends the run."""
        main = scheduler.main
        assert main is not None
        if scheduler.continued is not None and scheduler.cancel_reason is None:
            signals = [list(each) for each in scheduler.signals]
            entry = canonical([words.CONTINUE, now_ms, self._world.new_seed(), scheduler.continued, signals])
            if len(entry) <= _BYTES_MAX:
                return entry, None
            error: BaseException | None = PayloadTooLarge(
                f"The arguments and signals for continue_as_new have {len(entry)} bytes; {_BYTES_MAX} are possible"
            )
        else:
            error = main.error
        if error is None and scheduler.cancel_reason is None:
            try:
                result = canonical(plain(main.value))
                return await self._completed(result, now_ms)
            except FastnessError as unusable:
                error = unusable
        if scheduler.cancel_reason is not None and (error is None or isinstance(error, RunCancelled)):
            reason = scheduler.cancel_reason
            return self._ended(CANCELLED, now_ms, ["RunCancelled", reason], reason or None, RunCancelled.code)
        assert error is not None
        _log.warning("run %s of workflow %s failed", self._run_id, self._workflow.name, exc_info=error)
        code = error.code if isinstance(error, FastnessError) else type(error).__name__
        recorded = [*error_of(error), text_of(error)]
        return self._ended(FAILED, now_ms, recorded, ": ".join(error_of(error)), code)

    async def _completed(self, result: bytes, now_ms: int) -> tuple[bytes, Step]:
        world, blob = self._world, None
        if len(result) > RUN_VALUE_BYTES_MAX:
            blob = (await world.transport.call(PutBlob(result, world.universe, pinned=False))).hash
            result = canonical(None)
        entry = canonical([words.END, now_ms, COMPLETED, cbor2.loads(result), None])
        update = UpdateRun(
            self._run_id,
            world.fence,
            COMPLETED,
            result=result if blob is None else None,
            result_blob=blob,
            universe=world.universe,
        )
        return entry, update

    def _ended(self, state: str, now_ms: int, recorded: list[str], error: str | None, code: str) -> tuple[bytes, Step]:
        entry = canonical([words.END, now_ms, state, None, recorded])
        update = UpdateRun(
            self._run_id, self._world.fence, state, error=error, error_code=code, universe=self._world.universe
        )
        return entry, update

    def _end(self) -> None:
        """The run has ended, and its world has no program any more."""
        self._has_ended = True
        self._drop_steps()
        self._pending.clear()
        self._world.request_turn()
        self._world.is_lost = True  # The host drops it.

    # The history, and the code that follows it.

    @property
    def _history(self) -> list[Record]:
        history: list[Record] = [] if self._state is None else self._state["history"]
        return history

    async def _restore(self) -> None:
        if self._world.head:
            restored = await self._world.restore(fold)
            self._state = restored.state
            self._snapshot_height = restored.baseline_height
        if self._state is not None and has_ended(self._state):
            self._end()
        else:
            await self._replay()

    async def _replay(self) -> None:
        """Execute the code from the first record of its history."""
        history = self._history
        scheduler = Scheduler(
            self._run_id,
            self._begin,
            generation=0 if self._state is None else self._state["generation"],
            patches=frozenset(record[2] for record in history if record[0] == words.PATCH),
        )
        self._scheduler = scheduler
        last = len(history) - 1
        for index, record in enumerate(history):
            scheduler.is_replaying = index < last
            scheduler.feed(await self._loaded(record) if record[0] in _WITH_BLOBS else record)
        self._collect(scheduler)
        await self._carry_out(scheduler)

    async def _begin(self, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """The main coroutine of the run."""
        assert self._scheduler is not None
        world = self._world
        run = WorkflowRun(self._run_id, self._workflow, world.universe, self._scheduler, incarnation=world.incarnation)
        args, kwargs = self._workflow.arguments.decode(args, kwargs)
        return await self._workflow.function(run, *args, **kwargs)

    @property
    def _generation(self) -> int:
        return 0 if self._state is None else self._state["generation"]

    async def _loaded(self, record: Record) -> Record:
        """A record with the value that is in a blob."""
        if record[0] == ENDED:
            blob = record[3].get("result_blob")
            return record if blob is None else [*record[:3], {**record[3], "result": await self._blob(blob)}]
        position = _WITH_BLOBS[record[0]]
        if len(record) <= position or record[position] is None:
            return record
        return [*record[: position - 1], await self._blob(record[position]), None]

    async def _blob(self, hash: str) -> Any:
        return cbor2.loads((await self._world.transport.call(GetBlob(hash, self._world.universe))).data)

    def _now_ms(self, scheduler: Scheduler) -> int:
        """The time, which never goes back in a history."""
        return max(self._world.now_ms(), scheduler.now_ms)

    async def _take_snapshot(self) -> None:
        """Store the history, so that the next restore is short. A failure is logged: the journal has everything."""
        self._snapshot_height = self._world.head
        try:
            await self._world.snapshot(self._state)
        except Fenced:
            raise
        except FastnessError as error:  # For example, a large blob where the plane has no object store.
            _log.warning("run %s: the snapshot failed: %s", self._run_id, error)

    # What the code has asked for.

    def _collect(self, scheduler: Scheduler) -> None:
        """Make records of what the code has asked for, also of the starts of steps; they start after the commit."""
        if scheduler.new_patches:
            for name in scheduler.new_patches:
                entry = canonical([words.PATCH, self._now_ms(scheduler), name])
                self._pending.append(_Pending(-1, entry, is_kept=True))
            scheduler.new_patches.clear()
        if scheduler.dropped:
            self._forget_pending({call.number for call in scheduler.dropped})
        for call in list(scheduler.requested.values()):
            if isinstance(call, StepCall) and call.is_started:
                continue
            del scheduler.requested[call.number]
            if isinstance(call, StepCall) and self._is_draining:
                self._is_held_back = True
            else:
                self._note_call(call, self._now_ms(scheduler))

    async def _carry_out(self, scheduler: Scheduler) -> None:
        """Stop what was cancelled, and run the steps whose start is committed."""
        if scheduler.dropped:
            await self._drop(scheduler.dropped)
            scheduler.dropped.clear()
        if scheduler.cancel_reason is not None and scheduler.children:
            await self._cancel_children(scheduler)
        if scheduler.requested and not scheduler.is_ended:
            calls = [call for call in scheduler.requested.values() if isinstance(call, StepCall)]
            scheduler.requested.clear()
            now_ms = self._now_ms(scheduler)
            for call in calls:
                self._start_step(call, now_ms)

    def _note_call(self, call: Call[Any], now_ms: int) -> None:
        number, name = call.number, call.name
        if isinstance(call, StepCall):
            self._pending.append(_Pending(number, canonical_flat([words.STARTED, now_ms, number, name])))
        elif isinstance(call, SleepCall):
            due_ms = now_ms + round(call.seconds * 1_000)
            self._pending.append(_Pending(number, canonical([words.SLEEP, now_ms, number, name, due_ms]), due_ms))
        elif isinstance(call, WaitCall):
            due = None if call.seconds is None else now_ms + round(call.seconds * 1_000)
            self._pending.append(_Pending(number, canonical([words.WAIT, now_ms, number, name, due]), due))
        elif isinstance(call, ChildCall):
            entry = canonical([words.CHILD, now_ms, number, name, call.id])
            self._pending.append(_Pending(number, entry, call=call, is_kept=True))
        else:
            entry = canonical([call.kind, now_ms, number, name])
            self._pending.append(_Pending(number, entry, call=call, is_kept=True))

    def _start_step(self, call: StepCall[Any], now_ms: int) -> None:
        """Run a step, now or when its next attempt is due."""
        if self._is_draining:
            self._is_held_back = True
            return
        loop = asyncio.get_running_loop()
        if call.due_ms is not None and call.due_ms > now_ms:
            delay = (call.due_ms - now_ms) / 1_000
            call.due_ms = None
            self._steps[call.number] = loop.call_later(delay, self._start_delayed, call)
            return
        self._steps[call.number] = loop.create_task(self._run_step(call, now_ms), context=self._context.copy())

    def _start_delayed(self, call: StepCall[Any]) -> None:
        self._start_step(call, self._world.now_ms())

    async def _run_step(self, call: StepCall[Any], started_ms: int) -> None:
        """Run an attempt of a step, record how it ended, and commit that: another task would cost a step in a row
        time.
        """
        task = asyncio.current_task()
        result: Any = None
        error: BaseException | None = None
        try:
            result = await self._work_of(call)
        except asyncio.CancelledError as cancelled:
            if self._steps.get(call.number) is not task:
                raise  # Nothing is recorded: the call was cancelled, or the claim has ended.
            error = cancelled
        except WorkflowChanged as changed:  # What the step has recorded itself does not fit its code any more.
            self._fail_step(call, task, changed)
            return
        except Exception as failed:
            error = failed
        if self._steps.get(call.number) is not task:
            return
        now_ms = max(self._world.now_ms(), started_ms)
        try:
            outcome = await step_outcome(call, result, error, now_ms=now_ms, started_ms=started_ms, store=self._store)
        except FastnessError as unstored:
            self._fail_step(call, task, unstored)
            return
        if self._steps.get(call.number) is not task:
            return
        del self._steps[call.number]
        self._pending.append(_Pending(call.number, outcome.entry, outcome.due_ms, blob=outcome.blob))
        if self._steps:  # Others may end at the same time, and share the commit.
            self._commit_soon()
        elif self._committing is None and self._has_work:
            self._committing = task
            await self._commit_while_ready()

    def _fail_step(self, call: StepCall[Any], task: asyncio.Task[Any] | None, error: Exception) -> None:
        """End the turn because of a step that can record nothing, unless it was dropped."""
        if self._steps.get(call.number) is task:
            del self._steps[call.number]
            self._failure = error
            self._world.request_turn()

    async def _store(self, data: bytes) -> str:
        """Store a blob for a record. A step that has run is not run again because the plane does not answer now.

        Raises:
            FastnessError: it cannot be stored, now or later.
        """
        while True:
            try:
                return (await self._world.transport.call(PutBlob(data, self._world.universe, pinned=False))).hash
            except (Backend, Busy) as error:
                if is_final(error):
                    raise
                _log.warning("run %s: a blob of %d bytes is not stored yet: %s", self._run_id, len(data), error)
                await asyncio.sleep(_STORE_PAUSE_SECONDS)  # Until it is stored, or the claim is lost.

    def _work_of(self, call: StepCall[Any]) -> Coroutine[Any, Any, Any]:
        world = self._world
        if world.runs_tasks_here:
            call.queue = None
        if call.queue is None:
            set_current_step(
                StepContext(
                    world.planes,
                    run_id=self._run_id,
                    id=f"{self._run_id}.{world.incarnation}.{self._generation}.{call.number}",
                    name=call.name,
                    attempt=call.attempts + 1,
                    fence=world.fence,
                )
            )
            return world.around_step(f"{self._generation}.{call.number}", call.name, partial(run_here, call))
        self._on_queues.add(call.number)
        key = f"{world.name}.{world.incarnation}.{self._generation}.{call.number}"
        return run_on_queue(
            call, world.transport, world.universe, key, lambda message_id: self._note_queued(call, message_id)
        )

    def _note_queued(self, call: StepCall[Any], message_id: str) -> None:
        entry = canonical([words.QUEUED, self._world.now_ms(), call.number, call.name, call.queue, message_id])
        self._pending.append(_Pending(call.number, entry))
        self._commit_soon()

    async def _drop(self, calls: list[Call[Any]]) -> None:
        """Stop what was begun for calls that were cancelled."""
        for call in calls:
            step = self._steps.pop(call.number, None)
            if step is not None:
                step.cancel()
            if isinstance(call, StepCall) and call.queue is not None and call.message_id is not None:
                with suppress(NotFound):
                    await self._world.transport.call(CancelMessage(call.queue, call.message_id, self._world.universe))

    def _drop_steps(self) -> None:
        for step in self._steps.values():
            step.cancel()
        self._steps.clear()

    async def _cancel_children(self, scheduler: Scheduler) -> None:
        """Cancel the children of a cancelled run. Cancelling one again, after a restore, changes nothing."""
        for id in list(scheduler.children):
            if id not in self._cancelled_children:
                request = CancelRun(id, f"parent {self._run_id} was cancelled", universe=self._world.universe)
                with suppress(RunNotFound):
                    await self._world.transport.call(request)
                self._cancelled_children.add(id)


_WITH_BLOBS: Final = {START: 3, RECEIVED: 4, ENDED: 0, words.STEP: 6}


def workflow_runner(workflow: Workflow[..., Any]) -> Callable[[HostedWorld], WorkflowRunner]:
    """Makes the runners of a workflow's runs."""
    return lambda world: WorkflowRunner(workflow, world)


def _ingress(sequence: int, item: InboxItem) -> dict[str, Any]:
    """An item as the journal has it."""
    return {"seq": sequence, **msgspec.to_builtins(item, builtin_types=(bytes,))}
