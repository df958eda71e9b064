"""Replays: the state of a world as the fold of its records. No Spark in it.

A reducer is the one that a world's `restore` takes, `(state, entry) -> state`, named as `module:function` so that it
can travel. Where none is named, `chain` gives every world a state that has all of its records in it and nothing else.
"""

import hashlib
import importlib
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import cbor2

from holdfast.errors import InvalidArgument
from holdfast.layers import journal_records
from holdfast.layers.journal_records import Kind
from holdfast.wire.canonical import canonical
from holdfast.wire.restores import Entry

Reducer: TypeAlias = Callable[[Any, Entry], Any]


def chain(state: bytes | None, entry: Entry) -> bytes:
    """The SHA-256 of the state so far and the record: two worlds have the same one only if their histories are."""
    record = journal_records.of(Kind[entry.kind.upper()], entry.value)
    return hashlib.sha256((state or b"") + record).digest()


def reducer_of(name: str | None) -> Reducer:
    """The reducer that `module:function` names; None names `chain`.

    Raises:
        InvalidArgument: there is no such function.
    """
    if name is None:
        return chain
    module, colon, function = name.partition(":")
    try:
        if not colon:
            raise ImportError("there is no colon")
        found = getattr(importlib.import_module(module), function)
    except Exception as error:  # A module that is imported may raise anything.
        raise InvalidArgument(
            f"{name!r} names no reducer ({error}); write module:function, and put the module where executors find it"
        ) from error
    if not callable(found):
        raise InvalidArgument(f"{name!r} is no function; a reducer is called with a state and an entry")
    return found  # type: ignore[no-any-return]


def replay(journal: Iterable[bytes], reducer: Reducer, state: Any = None, *, height: int = 0) -> Any:
    """The state that the records lead to, from `state` on; the first of them is at `height`."""
    if reducer is chain:  # It needs nothing but the bytes, which are canonical already.
        sha256, link = hashlib.sha256, state or b""
        for record in journal:
            link = sha256(link + record).digest()
        return link or None
    for at, record in enumerate(journal, height):
        kind, value = journal_records.split(record)
        state = reducer(state, Entry(at, kind, cbor2.loads(value)))
    return state


def digest(state: Any) -> str:
    """Names a state: the SHA-256 of its canonical CBOR, which is what snapshots store."""
    return hashlib.sha256(canonical(state)).hexdigest()


def state_of(data: bytes) -> Any:
    """The state that a snapshot stores."""
    return cbor2.loads(data)
