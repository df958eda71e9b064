"""The timeline of a run: what its journal says, for people.

    started ──► step, retry, failed, queued, sleep, wait, child, put, send, mail, state, patch ──► continued, ended
           ▲                                           │
           └── signal, timer, child_ended, cancel ◄────┘   items of its inbox

What lasts has a duration: a step from its start to its result, a sleep until its timer, a wait until its signal, a
child until its end. What has not ended is pending. Steps that may be running come last.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import cbor2
import msgspec

from fastness.wire import run_records, runs


class TimelineEvent(msgspec.Struct, frozen=True):
    """Something that happened in a run. `details` depends on the kind."""

    at_ms: int
    kind: str
    name: str = ""
    duration_ms: int | None = None  # None: it takes no time, or it is pending.
    is_pending: bool = False
    details: dict[str, Any] = {}


class JournalRecord(Protocol):
    """A record of a journal, as a read returns it."""

    @property
    def kind(self) -> str: ...

    @property
    def value(self) -> bytes: ...


class Timeline:
    """Collects the events of a run from its records, in order."""

    def __init__(self) -> None:
        self._events: list[TimelineEvent] = []
        self._pending: dict[tuple[str, str], list[int]] = {}  # By what ends them: the numbers of pending events.
        self._running: dict[int, TimelineEvent] = {}  # Steps that have started, by the numbers of their calls.
        self._signals: dict[str, list[int]] = {}  # When signals arrived that ended no wait so far, by their names.
        self._now_ms = 0  # The time of the turn.
        self._generation = 0

    @property
    def events(self) -> list[TimelineEvent]:
        """What happened so far."""
        return [*self._events, *self._running.values()]

    def add(self, records: Iterable[JournalRecord]) -> None:
        """Add the records that come next."""
        for record in records:
            if record.kind == "ingress":
                self._add_item(cbor2.loads(record.value))
            elif record.kind == "entry":
                self._add_entry(cbor2.loads(record.value))

    def _add_item(self, item: dict[str, Any]) -> None:
        schema, key = item.get("schema"), (item.get("key") or b"").decode(errors="replace")
        value = _value_of(item)
        if schema == runs.START:
            self._add("started", details=_arguments(value))
        elif schema == runs.SIGNAL:
            self._add("signal", key, details={"value": value})
            if not self._finish("signal", key):
                self._signals.setdefault(key, []).append(self._now_ms)
        elif schema == runs.CHILD:
            ended = value if isinstance(value, dict) else {}
            self._add("child_ended", key, details={name: each for name, each in ended.items() if each is not None})
            self._finish("child", key)
        elif item["type"] == "timer_fired":
            self._finish("timer", item["timer_id"])
        elif item.get("command") == runs.CANCEL:
            self._add("cancel", details={"reason": item.get("payload", b"").decode(errors="replace")})
            self._stop_running(self._now_ms)
            for end in [each for each in self._pending if each[0] != "child"]:
                while self._finish(*end):  # The code does not wait for it any more.
                    pass
        else:
            self._add(item["type"], schema or item.get("effect_kind") or item.get("inbox_name") or "")

    def _add_entry(self, entry: Any) -> None:
        match entry:
            case {"turn": now_ms}:
                self._now_ms = now_ms
            case {"aside": sequence}:
                self._add("set_aside", details={"sequence": sequence})
            case [run_records.BEGIN, *_]:
                pass  # The item that started the run has its own event.
            case [str() as word, *_] if word in run_records.OF_STEPS:
                self._add_step(entry)
            case [run_records.SLEEP, at_ms, number, name, due_ms, *_]:
                ends = [("timer", self._timer(number))]
                self._add("sleep", name or "", at_ms=at_ms, ends=ends, details={"due_ms": due_ms})
            case [run_records.WAIT, at_ms, number, name, due_ms, *_]:
                ends = [("signal", name), ("timer", self._timer(number))]
                self._add("wait", name, at_ms=at_ms, ends=ends, details={"due_ms": due_ms})
                # A wait is recorded only if no signal had arrived, but one may arrive before the record is committed.
                arrived = [each for each in self._signals.pop(name, []) if each >= at_ms]
                if arrived:
                    self._finish("signal", name, arrived.pop(0))
                self._signals[name] = arrived
            case [run_records.CHILD, at_ms, _, workflow, id, *_]:
                self._add("child", id, at_ms=at_ms, ends=[("child", id)], details={"workflow": workflow})
            case [run_records.PATCH, at_ms, name, *_]:
                self._add("patch", name, at_ms=at_ms)
            case [run_records.CONTINUE, at_ms, _, arguments, *_]:
                self._end_all(at_ms)
                self._generation += 1
                self._add("continued", at_ms=at_ms, details=_arguments(arguments))
            case [run_records.END, at_ms, state, result, error, *_]:
                self._end_all(at_ms)
                ended = {"result": result} if state == runs.COMPLETED else {"error": _error(error), **_causes(error)}
                self._add("ended", state, at_ms=at_ms, details=ended)
            case [str() as word, int() as at_ms, _, name, *_] if word in run_records.SENT:
                kind = "signal_sent" if word == run_records.SIGNAL else word
                self._add(kind, name or "", at_ms=at_ms)
            case _:
                self._add("entry", details={"entry": entry})

    def _add_step(self, entry: Any) -> None:
        match entry:
            case [run_records.STARTED, at_ms, int() as number, name, *_]:
                self._running[number] = TimelineEvent(at_ms, "step", name, is_pending=True)
            case [run_records.STEP, at_ms, number, name, started_ms, result, *blob]:
                self._finish_step(number, at_ms)
                duration_ms = max(at_ms - started_ms, 0)
                details = {"result_blob": blob[0]} if blob else {"result": result}
                self._add("step", name, at_ms=started_ms, duration_ms=duration_ms, details=details)
            case [run_records.RETRY, at_ms, _, name, started_ms, error, due_ms, *inputs]:
                details = {"error": _error(error), "due_ms": due_ms, **_causes(error, inputs)}
                self._add("retry", name, at_ms=started_ms, duration_ms=max(at_ms - started_ms, 0), details=details)
            case [run_records.FAILED, at_ms, number, name, started_ms, error, attempts, *inputs]:
                self._finish_step(number, at_ms)
                details = {"error": _error(error), "attempts": attempts, **_causes(error, inputs)}
                started_ms = at_ms if started_ms is None else started_ms
                self._add("failed", name, at_ms=started_ms, duration_ms=max(at_ms - started_ms, 0), details=details)
            case [run_records.QUEUED, at_ms, number, name, queue, message_id, *_]:
                self._running.pop(number, None)
                details = {"queue": queue, "message_id": message_id}
                self._add("queued", name, at_ms=at_ms, ends=[("queued", str(number))], details=details)
            case _:
                self._add("entry", details={"entry": entry})

    def _timer(self, number: int) -> str:
        return f"{self._generation}.{number}"

    def _add(
        self,
        kind: str,
        name: str = "",
        *,
        at_ms: int | None = None,
        duration_ms: int | None = None,
        ends: Iterable[tuple[str, str]] = (),
        details: dict[str, Any] | None = None,
    ) -> None:
        for end in ends:
            self._pending.setdefault(end, []).append(len(self._events))
        at_ms = self._now_ms if at_ms is None else at_ms
        self._events.append(TimelineEvent(at_ms, kind, name, duration_ms, bool(ends), details or {}))

    def _finish(self, kind: str, name: str, at_ms: int | None = None) -> bool:
        """End the pending event that has waited longest for this; whether there was one."""
        waiting = self._pending.get((kind, name), [])
        while waiting:
            number = waiting.pop(0)
            event = self._events[number]
            if event.is_pending:
                duration_ms = max((self._now_ms if at_ms is None else at_ms) - event.at_ms, 0)
                self._events[number] = msgspec.structs.replace(event, duration_ms=duration_ms, is_pending=False)
                return True
        return False

    def _finish_step(self, number: int, at_ms: int) -> None:
        self._running.pop(number, None)
        self._finish("queued", str(number), at_ms)

    def _stop_running(self, at_ms: int) -> None:
        """The code does not wait for running steps any more."""
        for event in self._running.values():
            self._add("step", event.name, at_ms=event.at_ms, duration_ms=max(at_ms - event.at_ms, 0))
        self._running.clear()

    def _end_all(self, at_ms: int) -> None:
        """The code that waited for pending events has ended."""
        self._stop_running(at_ms)
        self._pending.clear()
        self._events = [
            msgspec.structs.replace(event, is_pending=False) if event.is_pending else event for event in self._events
        ]


def timeline(records: Iterable[JournalRecord]) -> list[TimelineEvent]:
    """The events of a run, from all records of its journal."""
    found = Timeline()
    found.add(records)
    return found.events


def _value_of(item: dict[str, Any]) -> Any:
    """The value in an item's payload; None if it is in a blob."""
    try:
        return cbor2.loads(item["payload"]) if item.get("payload") else None
    except (cbor2.CBORDecodeError, ValueError):
        return None


def _arguments(value: Any) -> dict[str, Any]:
    match value:
        case [list() as args, dict() as kwargs]:
            return {"args": args, "kwargs": kwargs}
    return {}


def _causes(error: Any, inputs: Sequence[Any] = ()) -> dict[str, Any]:
    """What tells why something has failed: a traceback, and what a step was called with."""
    causes: dict[str, Any] = {}
    match error:
        case [_, _, traceback]:
            causes["traceback"] = traceback
    match inputs:
        case [[list() as args, dict() as kwargs]]:
            causes["inputs"] = {"args": args, "kwargs": kwargs}
        case [None, blob]:
            causes["inputs_blob"] = blob
    return causes


def _error(error: Any) -> str | None:
    match error:
        case None:
            return None
        case [kind, message, *_]:
            return f"{kind}: {message}"
    return str(error)
