"""Runs of workflows: their records, an index by state, and the items that start, signal and cancel them.

    (u, universe, "w", "run:<id>", "run")        ->  a RunRecord
    (u, universe, "runs", state, "run:<id>")     ->  the name of the workflow

    start ──► running ──► completed, failed or cancelled ──► deleted
               │    ▲              ▲
               ▼    └─ resumed     │
             stopped ──────────────┘ cancelled with force

A run is a world whose program is the workflow. Everything that reaches it is an item of its inbox: what it was started
with, signals, a cancellation, and the ends of its children. The host that has claimed the world commits how far the run
is, under the fence of its claim. In the commit that ends a run, its parent gets an item, its timers are removed, and
its world has no program any more: no host claims it again. A run whose world is stopped by an error says so in its
state, and in the index.

Until then a run has a claim, is ready for one, or waits: for items that are in its inbox, a timer, a signal or a child.
One that has none of these is *stuck*: no host would ever continue it. `find_stuck` and `revive` are for that fault.
"""

import hashlib
from collections.abc import Sequence
from typing import Final

import cbor2
import msgspec

from fastness.errors import InvalidArgument, PayloadTooLarge, RunEnded, RunExists, RunNotEnded, RunNotFound
from fastness.kv import Subspace, Transaction
from fastness.layers import blobs, hosting, inboxes, journals, snapshots, timers, turns, worlds
from fastness.layers.worlds import World, WorldState, subspace
from fastness.limits import (
    RUN_ERROR_BYTES_MAX,
    RUN_TIMERS_MAX,
    RUN_VALUE_BYTES_MAX,
    RUNS_SCANNED_MAX,
)
from fastness.wire.canonical import canonical
from fastness.wire.hosting import summary_of
from fastness.wire.inboxes import Control, DomainEvent
from fastness.wire.runs import (
    CANCEL,
    CANCELLED,
    CHILD,
    RUN_PREFIX,
    RUNNING,
    SIGNAL,
    START,
    STATES,
    STOPPED,
    WORKFLOW_PREFIX,
    CancelRun,
    ChildEnd,
    ListRuns,
    RunInfo,
    Runs,
    SignalRun,
    StartRun,
    UpdateRun,
)


class RunRecord(RunInfo, frozen=True, omit_defaults=True):
    """The record of a run: what is shown of it, and what only this module needs."""

    arguments_sha256: bytes = b""
    parent_incarnation: int = 0


_NOT_ENDED: Final = (RUNNING, STOPPED)
_CHILD_BYTES_MAX: Final = RUN_VALUE_BYTES_MAX + RUN_ERROR_BYTES_MAX + 512  # The names of its fields.
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(RunRecord).decode


def start(tx: Transaction, request: StartRun) -> RunInfo:
    """Start a run, once: a run of this id with the same workflow, arguments and parent is returned as a duplicate.

    Raises:
        RunExists: another run, or a world, has this id.
        RunNotFound, RunEnded: the parent does not exist, or has ended.
        PayloadTooLarge: the arguments are too large; store them as a blob.
    """
    universe, workflow, id, parent = request.universe, request.workflow, request.id, request.parent
    arguments, arguments_blob = request.arguments, request.arguments_blob
    program = WORKFLOW_PREFIX + workflow
    world = world_of(universe, tx.new_id().hex if id is None else id)
    if arguments_blob is None:
        _check_size("The arguments", arguments)
        digest = hashlib.sha256(arguments).digest()
    else:
        digest = blobs.digest_of(arguments_blob)  # Of the same bytes, so both forms of a call are equal.
    known = _find(tx, world)
    if known is not None:
        if (known.workflow, known.arguments_sha256, known.parent) != (workflow, digest, parent):
            raise RunExists(
                f"Run {id} exists: it is a run of workflow {known.workflow}, with other arguments or another parent; "
                "choose another id"
            )
        return msgspec.structs.replace(_described(known), is_duplicate=True)
    parent_incarnation = 0 if parent is None else _require_not_ended(tx, world_of(universe, parent)).incarnation
    if (incarnation := _new_incarnation(tx, world)) is None:
        raise RunExists(f"A world {world.name} exists, or is being deleted; choose another id, or delete that world")
    snapshots.create_world(tx, world)
    turns.set_program(tx, world, program)
    record = RunRecord(
        world.name.removeprefix(RUN_PREFIX),
        workflow,
        RUNNING,
        tx.now_ms,
        parent=parent,
        incarnation=incarnation,
        arguments_sha256=digest,
        parent_incarnation=parent_incarnation,
    )
    tx.put(_key(world), _encode(record))
    tx.put(_index(world, RUNNING), workflow.encode())
    inline = arguments if arguments_blob is None else b""
    item = DomainEvent(schema=START, payload=inline, payload_blob=arguments_blob)
    inboxes.enqueue(tx, world, item, payload_bytes_max=RUN_VALUE_BYTES_MAX)
    return _described(record)


def get(tx: Transaction, universe: str, id: str) -> RunInfo:
    """A run.

    Raises:
        RunNotFound: there is no run with this id.
    """
    return _described(_require(tx, world_of(universe, id)))


def page(tx: Transaction, request: ListRuns) -> Runs:
    """At most `limit` runs in the order of their ids, starting after `after`: all, or those of a state or workflow.

    A page of a workflow's runs reads a bounded number of others, so it may be short, or empty, and have a next one.
    """
    universe, state, workflow, limit = request.universe, request.state, request.workflow, request.limit
    last = world_of(universe, request.after).name if request.after else RUN_PREFIX
    scanned = limit + 1 if workflow is None else max(limit + 1, RUNS_SCANNED_MAX)
    indexed: list[tuple[str, str]] = []
    complete_until: str | None = None  # Later names may be missing: the scan of some state ended there.
    for each in STATES if state is None else (state,):
        index = Subspace("u", universe, "runs", each)
        pairs = tx.scan(index.key(last) + b"\x00", index.range()[1], limit=scanned)
        names = [(index.unpack(key)[0], value.decode()) for key, value in pairs]
        indexed += names
        if len(names) == scanned and (complete_until is None or names[-1][0] < complete_until):
            complete_until = names[-1][0]
    found: list[RunInfo] = []
    for name, of_workflow in sorted(indexed):
        if complete_until is not None and name > complete_until:
            break
        if workflow in (None, of_workflow):
            if len(found) == limit:
                return Runs(found, last.removeprefix(RUN_PREFIX))
            described = _described(_require(tx, World(universe, name)))
            found.append(msgspec.structs.replace(described, result=None, published=None))
        last = name
    return Runs(found, None if complete_until is None else complete_until.removeprefix(RUN_PREFIX))


def signal(tx: Transaction, request: SignalRun) -> None:
    """Send a signal to a run that has not ended.

    Raises:
        RunNotFound, RunEnded: there is no such run, or it has ended.
        PayloadTooLarge: the value is too large; store it as a blob.
    """
    blob = request.value_blob
    if blob is None:
        _check_size("The value of the signal", request.value)
    world = world_of(request.universe, request.id)
    _require_not_ended(tx, world)
    payload = request.value if blob is None else b""
    item = DomainEvent(schema=SIGNAL, key=request.name.encode(), payload=payload, payload_blob=blob)
    inboxes.enqueue(tx, world, item, payload_bytes_max=RUN_VALUE_BYTES_MAX)


def cancel(tx: Transaction, request: CancelRun) -> RunInfo:
    """Ask a run to end, once; with `force` it ends now. A run that has ended is not changed.

    Raises:
        RunNotFound: there is no such run.
    """
    reason, force = request.reason, request.force
    world = world_of(request.universe, request.id)
    record = _require(tx, world)
    if record.state not in _NOT_ENDED or (record.is_cancelling and not force):
        return _described(record)
    if force:
        ended = msgspec.structs.replace(record, state=CANCELLED, is_cancelling=True, error=reason or None)
        return _end(tx, world, ended)
    record = msgspec.structs.replace(record, is_cancelling=True)
    tx.put(_key(world), _encode(record))
    inboxes.enqueue(tx, world, Control(command=CANCEL, payload=reason.encode()))
    return _described(record)


def update(tx: Transaction, request: UpdateRun) -> RunInfo:
    """Record how far a run is, under the fence of the claim on its world.

    Raises:
        Fenced: the claim is lost.
        RunNotFound, RunEnded: there is no such run, or it has ended.
        PayloadTooLarge: the result is too large, or what is published; store a large result as a blob.
    """
    state, result, result_blob, published = request.state, request.result, request.result_blob, request.published
    if state == RUNNING and (result, result_blob, request.error, request.error_code) != (None, None, None, None):
        raise InvalidArgument("A run that has not ended has neither a result nor an error; give its end state as well")
    for kind, value in (("The result", result), ("What is published", published)):
        if value is not None:
            _check_size(kind, value)
    world = world_of(request.universe, request.id)
    record = _require_not_ended(tx, world)
    claim = hosting.find(tx, world)
    hosting.require_claim(tx, world, owner=(claim and claim.owner) or "", fence=request.fence)
    if result_blob is not None:
        blobs.use(tx, request.universe, result_blob)
    record = msgspec.structs.replace(
        record,
        state=state,
        result=result if result_blob is None else None,
        result_blob=result_blob,
        error=_cut(request.error),
        error_code=request.error_code,
        published=record.published if published is None else published,
    )
    if state not in _NOT_ENDED:
        return _end(tx, world, record)
    tx.put(_key(world), _encode(record))
    return _described(record)


def follow_world(tx: Transaction, world: World) -> None:
    """Let the state of a run say whether its world is stopped by an error. Does nothing for other worlds."""
    record = _find(tx, world) if world.name.startswith(RUN_PREFIX) else None
    if record is None or record.state not in _NOT_ENDED:
        return
    hosted = hosting.find(tx, world)
    is_stopped = hosted is not None and hosted.is_stopped
    if is_stopped == (record.state == STOPPED):
        return
    tx.delete(_index(world, record.state))
    error = _cut(summary_of(hosted.error)) if is_stopped and hosted is not None and hosted.error else None
    record = msgspec.structs.replace(record, state=STOPPED if is_stopped else RUNNING, error=error)
    tx.put(_key(world), _encode(record))
    tx.put(_index(world, record.state), record.workflow.encode())


def begin_delete(tx: Transaction, universe: str, id: str) -> int:
    """Remove a run that has ended from the index, and mark its world as being deleted; its incarnation.

    Doing so again continues a deletion that was interrupted, and changes nothing after it.

    Raises:
        RunNotFound: there was never a run with this id.
        RunNotEnded: it is running, or stopped.
    """
    world = world_of(universe, id)
    record = _find(tx, world)
    if record is None:
        meta = worlds.find(tx, world)
        if meta is None or meta.state not in (WorldState.DELETING, WorldState.DELETED):
            raise _not_found(world)
        return meta.incarnation
    if record.state in _NOT_ENDED:
        raise RunNotEnded(f"Run {id} is {record.state}; cancel it and wait until it has ended, or cancel it with force")
    tx.delete(_index(world, record.state))
    tx.delete(_key(world))
    worlds.change_state(tx, world, WorldState.ARCHIVED)
    return worlds.change_state(tx, world, WorldState.DELETING).incarnation


def is_stuck(tx: Transaction, world: World) -> bool:
    """Whether a run is running, and neither a host nor anything that it could wait for would continue it.

    A run that is stopped, paused or without a program is not stuck: an operator has it continued.
    """
    record = hosting.find(tx, world)
    if record is None or record.program is None or record.is_stopped:
        return False
    if record.owner is not None or record.ready_ms is not None or tx.get(_index(world, RUNNING)) is None:
        return False
    if worlds.describe(tx, world).state is not WorldState.ACTIVE:
        return False
    idle = record.idle
    if idle is None or idle.head != journals.head(tx, world) or inboxes.has_undrained(tx, world):
        return True  # No host has seen everything, and still given it back as idle.
    return not idle.waits and not timers.has_any(tx, world)


def find_stuck(tx: Transaction, universe: str, *, after: str, limit: int) -> tuple[list[str], str]:
    """The worlds of stuck runs among the next `limit` that are running, after the world `after`; where to go on.

    That is "" at the end.
    """
    index = Subspace("u", universe, "runs", RUNNING)
    begin, end = index.range()
    pairs = tx.scan(index.key(after) + b"\x00" if after else begin, end, limit=limit)
    names = [index.unpack(key)[0] for key, _ in pairs]
    return [each for each in names if is_stuck(tx, World(universe, each))], names[-1] if len(names) == limit else ""


def revive(tx: Transaction, universe: str, names: Sequence[str]) -> list[str]:
    """Have hosts claim the worlds of stuck runs; those that still were stuck."""
    stuck = [each for each in names if is_stuck(tx, World(universe, each))]
    for name in stuck:
        hosting.note_ready(tx, World(universe, name))
    return stuck


def world_of(universe: str, id: str) -> World:
    """The world of a run."""
    return World(universe, RUN_PREFIX + id)


def watch_key(universe: str, id: str) -> bytes:
    """The key that every change of a run writes."""
    return _key(world_of(universe, id))


def _end(tx: Transaction, world: World, record: RunRecord) -> RunInfo:
    """Commit the end of a run, and tell its parent."""
    record = msgspec.structs.replace(record, ended_ms=tx.now_ms)
    tx.put(_key(world), _encode(record))
    for state in _NOT_ENDED:
        tx.delete(_index(world, state))
    tx.put(_index(world, record.state), record.workflow.encode())
    timers.cancel_all(tx, world, limit=RUN_TIMERS_MAX)
    turns.set_program(tx, world, None)
    if record.parent is not None:
        _tell_parent(tx, world_of(world.universe, record.parent), record)
    return _described(record)


def _tell_parent(tx: Transaction, parent: World, child: RunRecord) -> None:
    """Put the end of a child into the inbox of its parent, if that still runs."""
    known, meta = _find(tx, parent), worlds.find(tx, parent)
    if known is None or known.state not in _NOT_ENDED or known.incarnation != child.parent_incarnation:
        return
    if meta is None or meta.state in (WorldState.DELETING, WorldState.DELETED):
        return
    value = None if child.result is None else cbor2.loads(child.result)
    end = ChildEnd(child.state, value, child.result_blob, child.error, child.error_code)
    payload = canonical(msgspec.structs.asdict(end))
    item = DomainEvent(schema=CHILD, key=child.id.encode(), payload=payload)
    inboxes.enqueue(tx, parent, item, requested=True, payload_bytes_max=_CHILD_BYTES_MAX)


def _new_incarnation(tx: Transaction, world: World) -> int | None:
    """The incarnation of a world that can be created; None if one of this name exists."""
    before = worlds.find(tx, world)
    if before is None:
        return 1
    return before.incarnation + 1 if before.state is WorldState.DELETED else None


def _find(tx: Transaction, world: World) -> RunRecord | None:
    stored = tx.get(_key(world))
    return None if stored is None else _decode(stored)


def _require(tx: Transaction, world: World) -> RunRecord:
    record = _find(tx, world)
    if record is None:
        raise _not_found(world)
    return record


def _require_not_ended(tx: Transaction, world: World) -> RunRecord:
    record = _require(tx, world)
    if record.state not in _NOT_ENDED:
        raise RunEnded(f"Run {world.name.removeprefix(RUN_PREFIX)} is {record.state}; it takes nothing any more")
    return record


def _not_found(world: World) -> RunNotFound:
    return RunNotFound(f"There is no run {world.name.removeprefix(RUN_PREFIX)} in {world.universe}; start it first")


def _described(record: RunRecord) -> RunInfo:
    return msgspec.convert(record, RunInfo, from_attributes=True)


def _check_size(kind: str, value: bytes) -> None:
    if len(value) > RUN_VALUE_BYTES_MAX:
        raise PayloadTooLarge(
            f"{kind} has {len(value)} bytes and may have {RUN_VALUE_BYTES_MAX}; store it as a blob, and give its hash"
        )


def _cut(error: str | None) -> str | None:
    return None if error is None else error.encode()[:RUN_ERROR_BYTES_MAX].decode(errors="ignore")


def _key(world: World) -> bytes:
    return subspace(world).key("run")


def _index(world: World, state: str) -> bytes:
    return Subspace("u", world.universe, "runs", state).key(world.name)
