"""The folded state of a run: its history, in the order in which the code saw it.

    {"generation": 0, "now": 1700000000000, "history": [["start", …], ["begin", …], ["step", …], …]}

A coroutine cannot be stored, so a restored run executes its code again, and every call gets the recorded answer. The
history has the run's own records (`fastness.wire.run_records`), failed attempts without their tracebacks and inputs,
and what arrived for it:

    [START, at_ms, arguments, blob]          the arguments are [args, kwargs]; a large value is in a blob instead
    [RECEIVED, at_ms, name, value, blob]     a signal
    [FIRED, at_ms, timer_id]                 a timer is due
    [ENDED, at_ms, id, outcome]              a child has ended: {"state", "result", "result_blob", "error", …}
    [CANCEL, at_ms, reason]                  the run is asked to end
"""

from typing import Any, Final

import cbor2

from fastness.wire import runs
from fastness.wire.restores import Entry
from fastness.wire.run_records import BEGIN, CONTINUE, END, FAILED, RETRY, STARTED, STEP

START: Final = "start"
RECEIVED: Final = "received"
FIRED: Final = "fired"
ENDED: Final = "ended"
CANCEL: Final = "cancel"

Record = list[Any]
RunState = dict[str, Any]


def fold(state: RunState | None, entry: Entry) -> RunState:
    """The state with one more record of the journal.

    The list of the history is extended in place: copying it would make a restore quadratic.
    """
    if state is None:
        state = {"generation": 0, "now": 0, "history": []}
    value, history = entry.value, state["history"]
    if (record := record_of(state, entry)) is not None:
        state["now"] = max(state["now"], record[1])
        if record[0] == CONTINUE:
            return _continued(state, record)
        if record[0] in (RETRY, FAILED):
            record = [*record[:5], record[5][:2], record[6]]
        if record[0] in (STEP, FAILED) and history and history[-1][0] == STARTED and history[-1][2] == record[2]:
            history[-1] = record  # It says that the step was started, too: steps in a row are one record each.
        else:
            history.append(record)
    elif entry.kind == "entry" and "turn" in value and value["turn"] > state["now"]:
        state["now"] = value["turn"]
    return state


def record_of(state: RunState | None, entry: Entry) -> Record | None:
    """What an entry of the journal adds to the history; None if it adds nothing."""
    if entry.kind == "ingress":
        return _received(0 if state is None else state["now"], entry.value)
    return entry.value if entry.kind == "entry" and isinstance(entry.value, list) else None


def has_ended(state: RunState) -> bool:
    """Whether the run has ended."""
    history = state["history"]
    return bool(history) and history[-1][0] == END


def _continued(state: RunState, record: Record) -> RunState:
    _, at_ms, seed, arguments, signals = record
    history: list[Record] = [[START, at_ms, arguments, None]]
    history += [[RECEIVED, at_ms, name, value, None] for name, value in signals]
    history.append([BEGIN, at_ms, seed])
    return {"generation": state["generation"] + 1, "now": state["now"], "history": history}


def _received(now_ms: int, item: dict[str, Any]) -> Record | None:
    """The record of an inbox item; None if it means nothing to a run."""
    try:
        return _understood(now_ms, item)
    except (cbor2.CBORDecodeError, UnicodeDecodeError):  # Written into the inbox by another way than `workflows`.
        return None


def _understood(now_ms: int, item: dict[str, Any]) -> Record | None:
    kind = item["type"]
    if kind == "timer_fired":
        return [FIRED, now_ms, item["timer_id"]]
    if kind == "control" and item["command"] == runs.CANCEL:
        return [CANCEL, now_ms, item.get("payload", b"").decode()]
    if kind != "domain_event":
        return None
    schema, key, blob = item["schema"], (item.get("key") or b"").decode(), item.get("payload_blob")
    value = cbor2.loads(item["payload"]) if blob is None and item.get("payload") else None
    if schema == runs.START:
        return [START, now_ms, value, blob]
    if schema == runs.SIGNAL:
        return [RECEIVED, now_ms, key, value, blob]
    if schema == runs.CHILD and isinstance(value, dict):
        return [ENDED, now_ms, key, value]
    return None
