"""The table of operations, and the one way to carry any of them out.

    request ──► its operation ──► answer

An operation is a function over a transaction (`run`), or one that needs more than that: bodies, object stores, waiting
(`serve`). Every door (a handle, an HTTP endpoint, a stream frame, an atomic list) comes through here, so whatever must
hold for every operation is said once.
"""

from collections.abc import Callable
from typing import Any, Final

import msgspec

from holdfast.errors import InvalidArgument
from holdfast.kv import Transaction
from holdfast.plane import blobs, pairs, worlds
from holdfast.wire.blobs import FindBlob, GetBlob, OpenBlob, PutBlob, WriteBlob
from holdfast.wire.pairs import DeletePair, GetPair, PutPair, ScanPairs
from holdfast.wire.requests import Answer, Request
from holdfast.wire.worlds import (
    AppendEntries,
    ChangeWorld,
    CommitSnapshot,
    CompactWorld,
    CreateWorld,
    DeleteWorld,
    DescribeWorld,
    DrainInbox,
    ForkWorld,
    GetBaseline,
    GetCursor,
    ListSegments,
    ListSnapshots,
    ListWorlds,
    PutItem,
    ReadInbox,
    ReadJournal,
    SetManifest,
)


class Operation(msgspec.Struct, frozen=True):
    """How a request type is carried out: exactly one of `run` and `serve`."""

    run: Callable[[Transaction, Any], Any] | None = None
    reads_only: bool = False  # A snapshot serves it, so it never waits for a writer.
    serve: Callable[..., Any] | None = None  # Called with the plane's running parts; a coroutine on an event loop.


OPERATIONS: Final[dict[type[Request[Any]], Operation]] = {
    GetPair: Operation(pairs.get, reads_only=True),
    ScanPairs: Operation(pairs.scan, reads_only=True),
    PutPair: Operation(pairs.put),
    DeletePair: Operation(pairs.delete),
    PutBlob: Operation(serve=blobs.put),
    GetBlob: Operation(serve=blobs.get),
    FindBlob: Operation(blobs.find, reads_only=True),
    WriteBlob: Operation(serve=blobs.write),
    OpenBlob: Operation(serve=blobs.open),
    CreateWorld: Operation(worlds.create),
    ChangeWorld: Operation(worlds.change),
    DeleteWorld: Operation(serve=worlds.delete),
    ForkWorld: Operation(serve=worlds.fork),
    DescribeWorld: Operation(worlds.describe, reads_only=True),
    ListWorlds: Operation(worlds.names, reads_only=True),
    AppendEntries: Operation(worlds.append),
    ReadJournal: Operation(serve=worlds.read),
    SetManifest: Operation(worlds.set_manifest),
    CommitSnapshot: Operation(serve=worlds.commit_snapshot),
    GetBaseline: Operation(worlds.baseline, reads_only=True),
    ListSnapshots: Operation(worlds.list_snapshots, reads_only=True),
    CompactWorld: Operation(serve=worlds.compact),
    ListSegments: Operation(worlds.list_segments, reads_only=True),
    DrainInbox: Operation(worlds.drain),
    PutItem: Operation(worlds.put_item),
    ReadInbox: Operation(worlds.read_inbox, reads_only=True),
    GetCursor: Operation(worlds.cursor, reads_only=True),
}


def operation_of(request: Request[Answer]) -> Operation:
    """The operation behind a request.

    Raises:
        InvalidArgument: it is no request, or one that this plane does not know.
    """
    operation = OPERATIONS.get(type(request))
    if operation is None:
        raise InvalidArgument(f"{type(request).__name__} is no operation of this plane; send one of holdfast.wire")
    return operation


def execute(tx: Transaction, request: Request[Answer]) -> Answer:
    """Carry `request` out inside a transaction that somebody else commits.

    Raises:
        InvalidArgument: it needs more than a transaction.
    """
    run = operation_of(request).run
    if run is None:
        raise InvalidArgument(f"{type(request).__name__} does more than one commit can; send it by itself")
    answer: Answer = run(tx, request)
    return answer
