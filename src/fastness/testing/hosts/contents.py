"""What a plane holds after a scenario, so that two runs of it can be compared.

Compared is what users see: states, results, and what arrived how often. Heights, times and ids may differ: after a
crash there are other turns, and they are later.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import cbor2
import msgspec

from fastness.errors import FastnessError, InvalidValue
from fastness.handles.sync.plane import Plane
from fastness.hosts.apps import HostApp
from fastness.hosts.programs import Program
from fastness.hosts.workflows.records import fold
from fastness.limits import READ_ENTRIES_MAX
from fastness.wire import run_records
from fastness.wire.canonical import canonical
from fastness.wire.json_values import decode_json
from fastness.wire.runs import RUN_PREFIX

Normalize = Callable[[Any], Any]

_PAGE: Final = 100
_NAMES: Final = ("schema", "effect_kind", "inbox_name", "timer_id", "command")  # One of these names an item.


class Contents:
    """What is compared: a map from what it is, as text, to its value or how often it is there."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}  # States and results.
        self.counts: Counter[str] = Counter()  # What arrived, and what is still to be done.
        self.faults: list[str] = []  # What is wrong in any case.


def unchanged(value: Any) -> Any:
    """Normalizes nothing."""
    return value


def read_contents(plane: Plane, app: HostApp, normalize: Normalize) -> Contents:
    """The contents of a plane, and what is wrong with them in any case: journals that do not give the state again."""
    found = Contents()
    for name in _pages(plane.worlds):
        _read_world(found, plane, app, name, normalize)
    for name in _pages(plane.queues):
        stats = plane.queue(name).stats()
        for state in ("ready", "delayed", "leased", "dead"):
            if number := getattr(stats, state, 0):
                found.counts[f"{state} messages in queue {name}"] = number
        for delivery in plane.queue(name).peek(READ_ENTRIES_MAX):
            found.counts[f"message {_text(delivery.payload or b'', normalize)} in queue {name}"] += 1
    for box in plane.mailboxes():
        for mail in plane.mailbox(box.agent).read(limit=_PAGE):
            found.counts[f"mail {_text(mail.body, normalize)} from {mail.sender} to {box.agent}"] += 1
    return found


def differences(expected: Contents, actual: Contents) -> list[str]:
    """What differs between two contents, a sentence each."""
    found = list(actual.faults)
    for key in sorted({*expected.counts, *actual.counts}):
        wanted, got = expected.counts[key], actual.counts[key]
        if wanted != got:
            what = "was done twice or more" if got > wanted else "was lost"
            found.append(f"{key} {what}: it is there {_times(got)}, and {_times(wanted)} without a crash")
    for key in sorted({*expected.values, *actual.values}):
        before, after = expected.values.get(key), actual.values.get(key)
        if before != after:
            found.append(f"{key} differs: it is {after!r}, and {before!r} without a crash")
    return found


def _read_world(found: Contents, plane: Plane, app: HostApp, name: str, normalize: Normalize) -> None:
    receipts: set[bytes] = set()
    fired: Counter[str] = Counter()
    for value in _values(plane, name, "ingress"):
        if value["type"] == "timer_fired" and name.startswith(RUN_PREFIX):
            fired[value["timer_id"]] += 1
            continue  # A step that is tried less often sets fewer.
        item = f"{value['type']} {next((value[field] for field in _NAMES if field in value), '')}"
        text = _text(value.get("payload", b""), normalize)
        key = value.get("key")
        error = value.get("error")
        found.counts[
            f"item {item}{f' {key!r}' if key else ''} {text}{f' ({error})' if error else ''} in world {name}"
        ] += 1
        if value["type"] == "receipt":
            if value["intent_hash"] in receipts:
                found.faults.append(f"effect {value['effect_kind']} of world {name} has two receipts in its journal")
            receipts.add(value["intent_hash"])
    if fired:
        more = fired - _timers_set(_values(plane, name, "entry"))
        found.faults += [f"timer {id} of world {name} fired more often than it was set" for id in more]
    world, hosted = plane.world(name), plane.world(name).hosting()
    program = app.programs.get(hosted.program or "")
    if hosted.set_aside:
        found.counts[f"items set aside in world {name}"] = hosted.set_aside
    found.values[f"whether world {name} is stopped"] = hosted.is_stopped
    if isinstance(program, Program):
        state = world.restore(program.reducer).state
        found.values[f"the state of world {name}"] = normalize(None if state is None else state["state"])
        _verify(found, plane, name, program.reducer)
    elif name.startswith(RUN_PREFIX):
        run = plane.workflows.get(name.removeprefix(RUN_PREFIX))
        described = run.describe()
        found.values[f"the state of run {run.id}"] = described.state
        found.values[f"the error of run {run.id}"] = described.error
        result = None if described.result is None else cbor2.loads(described.result)
        found.values[f"the result of run {run.id}"] = normalize(result)
        found.values[f"what run {run.id} has published"] = normalize(run.query())
        _verify(found, plane, name, fold)
    document = plane.state(f"worlds/{name}").get()
    if document is not None:
        found.values[f"what world {name} has published"] = normalize(document.value)
    for effect in plane.effects.list(world=name).effects:
        found.counts[f"effect {effect.kind} {_text(effect.params, normalize)} of world {name} that is not done"] += 1
    for timer in plane.timers.list(world=name).timers:
        found.counts[f"timer {timer.timer_id} of world {name} that has not fired"] += 1


def _verify(found: Contents, plane: Plane, name: str, reducer: Callable[[Any, Any], Any]) -> None:
    """Replay the journal: it gives every snapshot, which is the state that a host had in memory, byte for byte."""
    try:
        verdict = plane.world(name).verify(reducer)
    except FastnessError as error:
        found.faults.append(f"the journal of world {name} cannot be replayed: {error}")
        return
    if not verdict.agrees:
        found.faults.append(f"the journal of world {name} does not give the state of its host at {verdict.differs_at}")


def _values(plane: Plane, name: str, kind: str) -> Iterator[Any]:
    """The values of a journal's records of a kind."""
    height = 0
    while records := plane.world(name).read(height, limit=READ_ENTRIES_MAX):
        for record in records:
            if record.kind == kind:
                yield cbor2.loads(record.value)
        height = records[-1].height + 1


def _timers_set(entries: Iterable[Any]) -> Counter[str]:
    """How often each timer of a run was set, by its id."""
    found: Counter[str] = Counter()
    generation = 0
    for entry in entries:
        match entry:
            case [run_records.CONTINUE, *_]:
                generation += 1
            case [run_records.SLEEP | run_records.WAIT, _, number, _, int(), *_]:
                found[f"{generation}.{number}"] += 1
            case [run_records.RETRY, _, number, *_]:
                found[f"{generation}.{number}"] += 1
    return found


def _pages(list_names: Callable[..., list[str]]) -> Iterator[str]:
    after = ""
    while names := list_names(after=after, limit=_PAGE):
        yield from names
        after = names[-1]


def _text(payload: bytes, normalize: Normalize) -> str:
    """A payload as text: the value that it encodes, if it encodes one."""
    if not payload:
        return ""
    try:
        value = decode_json(payload)
    except InvalidValue:
        try:
            value = cbor2.loads(payload)
        except (cbor2.CBORDecodeError, ValueError):
            return repr(payload)
    try:
        return msgspec.json.encode(normalize(value), order="sorted").decode()
    except TypeError:
        return repr(canonical(value))


def _times(number: int) -> str:
    return {0: "not", 1: "once"}.get(number, f"{number} times")
