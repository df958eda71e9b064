"""Replays: the state of a world as the fold of its records. No Spark here.

A reducer is what a world's `restore` takes, `(state, entry) -> state`, named as `module:function` so that it can be
sent to executors. A program and an app of a host can be named in the same way: an app has the reducers of its programs
and of the runs of workflows. The default, `chain`, hashes all records in order.
"""

import hashlib
import importlib
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import cbor2

from fastness.errors import InvalidArgument
from fastness.hosts.apps import HostApp
from fastness.hosts.programs import Program
from fastness.hosts.workflows.records import fold
from fastness.layers import journal_records
from fastness.layers.journal_records import Kind
from fastness.wire.canonical import canonical
from fastness.wire.restores import Entry
from fastness.wire.runs import RUN_PREFIX

Reducer: TypeAlias = Callable[[Any, Entry], Any]


def chain(state: bytes | None, entry: Entry) -> bytes:
    """The SHA-256 of the state so far and the record: equal only for equal histories."""
    record = journal_records.of(Kind[entry.kind.upper()], entry.value)
    return hashlib.sha256((state or b"") + record).digest()


def reducer_of(name: str | None, world: str = "", program: str | None = None) -> Reducer | None:
    """The reducer named `module:function`; `chain` for None.

    If the name is that of an app, the reducer for a world of the given name and program; None if the app has none.

    Raises:
        InvalidArgument: the function does not exist.
    """
    if name is None:
        return chain
    module, colon, function = name.partition(":")
    try:
        if not colon:
            raise ImportError("the colon is missing")
        found = getattr(importlib.import_module(module), function)
    except Exception as error:  # Importing a module may raise anything.
        raise InvalidArgument(
            f"Cannot load the reducer {name!r} ({error}); use module:function, importable on all executors"
        ) from error
    if isinstance(found, HostApp):
        if world.startswith(RUN_PREFIX):
            return fold
        known = found.programs.get(program or "")
        return None if known is None else known.reducer
    if isinstance(found, Program):
        return found.reducer
    if not callable(found):
        raise InvalidArgument(f"{name!r} is not callable; a reducer is called with a state and an entry")
    return found  # type: ignore[no-any-return]


def replay(journal: Iterable[bytes], reducer: Reducer, state: Any = None, *, height: int = 0) -> Any:
    """Fold the records into `state`; the first of them is at `height`."""
    if reducer is chain:  # It needs only the bytes, which are canonical already.
        sha256, link = hashlib.sha256, state or b""
        for record in journal:
            link = sha256(link + record).digest()
        return link or None
    for at, record in enumerate(journal, height):
        kind, value = journal_records.split(record)
        state = reducer(state, Entry(at, kind, cbor2.loads(value)))
    return state


def digest(state: Any) -> str:
    """The SHA-256 of a state's canonical CBOR, which is what snapshots store."""
    return hashlib.sha256(canonical(state)).hexdigest()


def state_of(data: bytes) -> Any:
    """Decode the state that a snapshot stores."""
    return cbor2.loads(data)
