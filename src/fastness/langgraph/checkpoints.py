"""The checkpoints of threads: what a saver does, once for threads and for event loops.

A checkpoint is one commit: its row, and with a retention the deletion of older ones. `checkpoint_rows` draws the rows.
Deletions require that no other saver has changed the history of the namespace since it was read.
Large values are put as blobs before that commit. A crash in between leaves blobs that no row names, which the garbage
collector deletes.
"""

import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Container, Iterable, Mapping, Sequence
from contextlib import aclosing
from heapq import heapify, heappop, heapreplace
from threading import Lock
from typing import Any, NamedTuple, Self, TypeVar

import msgspec
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import (
    WRITES_IDX_MAP,
    ChannelVersions,
    Checkpoint,
    CheckpointMetadata,
    CheckpointTuple,
    PendingWrite,
    get_checkpoint_id,
    get_checkpoint_metadata,
    writes_sort_key,
)
from langgraph.checkpoint.serde.base import SerializerProtocol
from langgraph.checkpoint.serde.types import _DeltaSnapshot

from fastness import DeleteRow, DeleteRows, PutRow, Row
from fastness.errors import Unsupported, VersionConflict
from fastness.langgraph.checkpoint_rows import (
    HISTORY_END,
    RUNS,
    THREAD_PREFIX,
    VERSIONS,
    Ancestry,
    Serialized,
    StoredCheckpoint,
    StoredWrite,
    StoredWrites,
    decode_checkpoint,
    decode_write_list,
    decode_writes,
    encode,
    kept_ids,
    run_partition,
    thread_partition,
)
from fastness.langgraph.retention import Retention
from fastness.limits import (
    COLLECTION_CHANGES_MAX,
    COLLECTION_VALUE_BYTES_MAX,
    LANGGRAPH_BLOB_REUSE_SECONDS,
    LANGGRAPH_CONFLICTS_MAX,
    LANGGRAPH_COPY_BYTES,
    LANGGRAPH_INLINE_BYTES_MAX,
    LANGGRAPH_PAGE_ROWS_MAX,
    LANGGRAPH_PAGE_ROWS_MIN,
    LANGGRAPH_REMEMBERED_MAX,
    LANGGRAPH_ROW_BYTES_MAX,
    LANGGRAPH_WRITE_ROWS_MAX,
    LANGGRAPH_WRITES_BYTES_MAX,
)
from fastness.plane_access import Change, Key, PlaneAccess

_STRATEGIES = ("keep_latest", "delete")
_CHECKPOINT_LENGTH = 2  # Of the key of a checkpoint; those of its writes are longer.
Value = TypeVar("Value")


class Checkpoints:
    """The checkpoints in a collection.

    Args:
        access: the plane and the collection.
        keep: what is deleted by itself.
    """

    def __init__(self, access: PlaneAccess, keep: Retention) -> None:
        self._access = access
        self._keep = keep
        self._lock = Lock()
        # What is remembered of threads and namespaces: their histories, if a number of checkpoints is kept; the blobs
        # of the checkpoint that was put last; and that they have no delta channels.
        self._histories: OrderedDict[tuple[str, str], _KnownHistory] = OrderedDict()
        self._blobs: OrderedDict[tuple[str, str], tuple[str, dict[str, _Blob]]] = OrderedDict()
        self._plain: OrderedDict[tuple[str, str], None] = OrderedDict()

    async def get(self, serde: SerializerProtocol, config: RunnableConfig) -> CheckpointTuple | None:
        thread, ns = _place(config)
        checkpoint_id = get_checkpoint_id(config)
        prefix: Key = (ns, checkpoint_id) if checkpoint_id else (ns,)
        # Without writes, which is usual, the last row is the newest checkpoint: nothing more has to be read.
        first = LANGGRAPH_PAGE_ROWS_MAX if checkpoint_id else 1
        async for page in self._history(thread, prefix, first=first):
            for found in page:
                return await self._load(serde, thread, found, {})
        return None

    async def pages(
        self,
        serde: SerializerProtocol,
        config: RunnableConfig | None,
        filter: dict[str, Any] | None,
        before: RunnableConfig | None,
        limit: int | None,
    ) -> AsyncGenerator[list[CheckpointTuple]]:
        """The checkpoints that match, in pages."""
        if limit is not None and limit <= 0:
            return
        at = (config or {}).get("configurable", {})
        only = at.get("checkpoint_id")
        before_id = get_checkpoint_id(before) if before else None
        rows = LANGGRAPH_PAGE_ROWS_MAX if limit is None or filter else 2 * limit
        blobs: dict[str, bytes] = {}
        ns = at.get("checkpoint_ns")
        async with aclosing(self._threads(at)) as threads:
            async for thread in threads:

                def history(ns: str, thread: str = thread) -> _History:
                    end = (ns, before_id) if before_id else None
                    return self._history(thread, (ns, only) if only else (ns,), before=end, first=rows)

                found_pages = self._merged(thread, history) if ns is None else history(ns)
                async for page in found_pages:
                    loaded = []
                    for found in page:
                        checkpoint = await self._load(serde, thread, found, blobs, filter)
                        if checkpoint is not None:
                            loaded.append(checkpoint)
                            if len(loaded) == limit:
                                yield loaded
                                return
                    if loaded:
                        yield loaded
                        limit = limit if limit is None else limit - len(loaded)

    async def _merged(self, thread: str, history: Callable[[str], "_History"]) -> AsyncIterator[list["_Found"]]:
        """Pages of the checkpoints of all namespaces of a thread, newest first."""
        heads = []
        async for ns in self._namespaces(thread):
            head = _Head(history(ns))
            if await head.advance():
                heads.append(head)
        heapify(heads)
        page = []
        while heads:
            page.append(heads[0].found)
            if await heads[0].advance():
                heapreplace(heads, heads[0])
            else:
                heappop(heads)
            if len(page) == LANGGRAPH_PAGE_ROWS_MIN or not heads:
                yield page
                page = []

    async def _threads(self, at: Mapping[str, Any]) -> AsyncGenerator[str]:
        """The thread that a configuration names, or all."""
        if "thread_id" in at:
            yield str(at["thread_id"])
            return
        async with aclosing(self._access.all_partitions(THREAD_PREFIX)) as partitions:
            async for partition in partitions:
                yield partition.removeprefix(THREAD_PREFIX)

    async def _namespaces(self, thread: str) -> AsyncIterator[str]:
        partition = thread_partition(thread)
        after: Key | None = None
        while True:
            page = await self._access.scan(partition, after=after, before=HISTORY_END, limit=1)
            if page.rows:
                ns = str(page.rows[0].key[0])
                yield ns
                after = (ns, 0)  # Integers come after all texts, so after all checkpoints of the namespace.
            elif page.next is None:
                return
            else:
                after = page.next

    def _history(
        self, thread: str, prefix: Key, *, before: Key | None = None, first: int = LANGGRAPH_PAGE_ROWS_MAX
    ) -> "_History":
        return _History(self._access, thread_partition(thread), prefix, before, first)

    async def _load(
        self,
        serde: SerializerProtocol,
        thread: str,
        found: "_Found",
        blobs: dict[str, bytes],
        filter: dict[str, Any] | None = None,
    ) -> CheckpointTuple | None:
        """A checkpoint; None if its metadata does not match.

        Args:
            blobs: those of the checkpoint that was loaded before; replaced by those of this one.
        """
        stored = decode_checkpoint(found.row.value)
        used: dict[str, bytes] = {}

        async def fetch(hashes: Iterable[str]) -> None:
            for hash in hashes:
                if hash and hash not in used:
                    used[hash] = blobs[hash] if hash in blobs else await self._access.get_blob(hash)

        def value_of(part: Serialized) -> Any:
            return serde.loads_typed((part.kind, used[part.blob] if part.blob else part.data))

        if stored.metadata.blob:
            await fetch([stored.metadata.blob])
        metadata = value_of(stored.metadata)
        if filter and any(metadata.get(name) != value for name, value in filter.items()):
            return None

        writes = [(str(row.key[2]), decode_writes(row.value)) for row in found.writes]
        if stored.checkpoint.blob or stored.channels:
            await fetch([stored.checkpoint.blob, *(value.blob for value in stored.channels.values())])
        if writes:
            await fetch(part.blob for _, part in writes)
            await fetch(write.value.blob for _, part in writes for write in part.writes)
        checkpoint = value_of(stored.checkpoint)
        for name, value in stored.channels.items():
            checkpoint["channel_values"][name] = value_of(value)
        written = []
        for task, part in writes:
            for write in decode_write_list(used[part.blob]) if part.blob else part.writes:
                order = writes_sort_key(part.task_path, task, write.number)
                written.append((order, (task, write.channel, value_of(write.value))))
        written.sort(key=lambda item: item[0])

        blobs.clear()
        blobs.update(used)
        ns, checkpoint_id = str(found.row.key[0]), str(found.row.key[1])
        if self._keep.days is not None and not stored.has_delta_channels:
            self._remember(self._plain, (thread, ns), None)
        parent = None if stored.parent is None else _config(thread, ns, stored.parent)
        pending: list[PendingWrite] = [write for _, write in written]
        return CheckpointTuple(_config(thread, ns, checkpoint_id), checkpoint, metadata, parent, pending)

    async def put(
        self,
        serde: SerializerProtocol,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        thread, ns = _place(config)
        parent = get_checkpoint_id(config)
        described = get_checkpoint_metadata(config, metadata)
        run = described.get("run_id")
        counters = described.get("counters_since_delta_snapshot") or {}
        values, versions = checkpoint["channel_values"], checkpoint["channel_versions"]
        ancestry = Ancestry(
            checkpoint["id"],
            parent,
            needs=[name for name in counters if name not in values and name in versions],
            snapshots=[name for name, value in values.items() if isinstance(value, _DeltaSnapshot) or name in counters],
        )
        unchanged = self._unchanged((thread, ns), parent, checkpoint, new_versions)
        body, channels = await self._serialize(serde, checkpoint, unchanged)
        stored = StoredCheckpoint(
            parent,
            None if run is None else str(run),
            body,
            await self._stored(serde.dumps_typed(described), LANGGRAPH_INLINE_BYTES_MAX),
            {name: blob.stored for name, blob in channels.items()},
            list(ancestry.needs),
            list(ancestry.snapshots),
            bool(counters or ancestry.snapshots),
        )
        value = encode(stored)
        if len(value) > COLLECTION_VALUE_BYTES_MAX:
            raise Unsupported(
                f"The checkpoint has {len(value)} bytes, and the plane has no object store for large values; "
                "open it with objects=, for example objects='s3://bucket/fastness'"
            )

        partition = thread_partition(thread)
        ttl = None if stored.has_delta_channels else self._keep.ttl_seconds
        if ttl is not None:
            self._remember(self._plain, (thread, ns), None)
        else:
            self._plain.pop((thread, ns), None)
        changes: list[Change] = [PutRow(partition, (ns, checkpoint["id"]), value, ttl_seconds=ttl)]
        if stored.run is not None:
            changes += _run_rows(stored.run, thread, ttl)
        if self._keep.checkpoints is not None or stored.has_delta_channels:
            changed = PutRow(partition, (VERSIONS, ns), b"", ttl_seconds=ttl)
            await self._commit_version((thread, ns), changes, changed, ancestry)
        else:
            await self._access.commit(changes)
        if blobs := {name: blob for name, blob in channels.items() if blob.stored.blob}:
            self._remember(self._blobs, (thread, ns), (checkpoint["id"], blobs))
        return _config(thread, ns, checkpoint["id"])

    def _unchanged(
        self, place: tuple[str, str], parent: str | None, checkpoint: Checkpoint, new_versions: ChannelVersions
    ) -> dict[str, "_Blob"]:
        """The blobs of channels that are as they were in the parent.

        Only those that were put a short time ago: the garbage collector spares them, whatever happens to the parent.
        """
        last_id, blobs = self._blobs.get(place, ("", {}))
        if last_id != parent:
            return {}
        values, versions = checkpoint["channel_values"], checkpoint["channel_versions"]
        oldest = time.monotonic() - LANGGRAPH_BLOB_REUSE_SECONDS
        return {
            name: blob
            for name, blob in blobs.items()
            if name in values
            and name not in new_versions
            and blob.version == versions.get(name)
            and blob.put_at > oldest
        }

    async def _serialize(
        self, serde: SerializerProtocol, checkpoint: Checkpoint, unchanged: dict[str, "_Blob"]
    ) -> tuple[Serialized, dict[str, "_Blob"]]:
        """A checkpoint without its large channel values, and those."""
        large = dict(unchanged)
        whole = serde.dumps_typed(_without(checkpoint, large) if large else checkpoint)
        if len(whole[1]) > LANGGRAPH_INLINE_BYTES_MAX:
            for name, value in checkpoint["channel_values"].items():
                if name not in large:
                    serialized = serde.dumps_typed(value)
                    if len(serialized[1]) > LANGGRAPH_INLINE_BYTES_MAX:
                        put_at = time.monotonic()
                        stored = await self._stored(serialized, LANGGRAPH_INLINE_BYTES_MAX)
                        large[name] = _Blob(checkpoint["channel_versions"].get(name), stored, put_at)
            whole = serde.dumps_typed(_without(checkpoint, large))
        return await self._stored(whole, LANGGRAPH_ROW_BYTES_MAX), large

    async def _stored(self, serialized: tuple[str, bytes], inline_max: int) -> Serialized:
        kind, data = serialized
        return Serialized(
            kind, *await self._access.put_value(data, inline_max=inline_max, row_max=LANGGRAPH_ROW_BYTES_MAX)
        )

    async def _commit_version(
        self, place: tuple[str, str], changes: Sequence[Change], changed: PutRow, new: Ancestry
    ) -> None:
        """Commit changes that store a checkpoint and another version of the history, and delete old checkpoints."""
        if self._keep.checkpoints is None:
            await self._access.commit([*changes, changed])
            return
        known = self._histories.get(place)
        if known is not None and new.parent is not None and all(each.id != new.parent for each in known.checkpoints):
            known = None  # Another saver has stored the parent.
        for _ in range(LANGGRAPH_CONFLICTS_MAX):
            known = known or await self._read_history(*place)
            # The new one counts as the newest, although another saver may have stored one with a higher id meanwhile.
            history = [*(each for each in known.checkpoints if each.id != new.id), new]
            kept = kept_ids(history, self._keep.checkpoints)
            gone = [found.id for found in history if found.id not in kept][: COLLECTION_CHANGES_MAX - len(changes) - 1]
            deletions = [DeleteRows(changed.partition, (place[1], found)) for found in gone]
            required = msgspec.structs.replace(changed, if_version=known.version)
            try:
                await self._access.commit([*changes, required, *deletions])
            except VersionConflict:
                known = None
                continue
            left = [found for found in history if found.id not in set(gone)]
            left.sort(key=lambda found: found.id)
            self._remember(self._histories, place, _KnownHistory(known.version + 1, None, left))
            return
        await self._access.commit([*changes, changed])  # A checkpoint that is stored later deletes the old ones.

    async def _read_history(self, thread: str, ns: str) -> "_KnownHistory":
        # The version comes first: what another saver changes while the rest is read leaves a higher one.
        (version,) = await self._access.get_many(thread_partition(thread), [(VERSIONS, ns)])
        found: list[Ancestry] = []
        async for page in self._history(thread, (ns,)):
            found += [_ancestry(each) for each in page]
        found.reverse()
        return _KnownHistory(*((0, None) if version is None else (version.version, version.expires_ms)), found)

    async def put_writes(
        self,
        serde: SerializerProtocol,
        config: RunnableConfig,
        writes: Sequence[tuple[str, Any]],
        task: str,
        task_path: str,
    ) -> None:
        if not writes:
            return
        thread, ns = _place(config)
        checkpoint_id = config["configurable"]["checkpoint_id"]
        numbered = [
            (WRITES_IDX_MAP.get(channel, number), channel, value) for number, (channel, value) in enumerate(writes)
        ]
        # All writes of a task are stored in one commit: a part of them would count as a finished task.
        per_row = -(-len(numbered) // LANGGRAPH_WRITE_ROWS_MAX)
        inline_max = min(LANGGRAPH_INLINE_BYTES_MAX, LANGGRAPH_WRITES_BYTES_MAX * per_row // len(numbered))
        usual = [write for write in numbered if write[0] >= 0]
        parts = [[write] for write in numbered if write[0] < 0]
        parts += [usual[start : start + per_row] for start in range(0, len(usual), per_row)]
        ttl = self._keep.ttl_seconds if (thread, ns) in self._plain else None
        changes: list[Change] = []
        for part in parts:
            first = part[0][0]
            value_max = inline_max if per_row == 1 else LANGGRAPH_ROW_BYTES_MAX
            stored = [
                StoredWrite(number, channel, await self._stored(serde.dumps_typed(value), value_max))
                for number, channel, value in part
            ]
            blob = ""
            if per_row > 1:
                _, blob = await self._access.put_value(
                    encode(stored), inline_max=inline_max, row_max=LANGGRAPH_ROW_BYTES_MAX
                )
            value = encode(StoredWrites(task_path, [] if blob else stored, blob))
            key = (ns, checkpoint_id, task, first)
            changes.append(PutRow(thread_partition(thread), key, value, keep_existing=first >= 0, ttl_seconds=ttl))
        await self._access.commit(changes)

    async def delete_thread(self, thread: str) -> None:
        self._forget(thread)
        partition = thread_partition(thread)
        changes: list[Change] = [
            DeleteRow(run_partition(str(row.key[1])), (thread,))
            async for page in self._access.pages(partition, (RUNS,))
            for row in page
        ]
        await self._commit_all([*changes, DeleteRows(partition)])

    async def delete_for_runs(self, runs: Iterable[str]) -> None:
        for run in dict.fromkeys(runs):
            threads = [str(row.key[0]) async for page in self._access.pages(run_partition(run)) for row in page]
            changes: list[Change] = []
            for thread in threads:
                self._forget(thread)
                partition = thread_partition(thread)
                changed: set[str] = set()  # Namespaces that lose checkpoints,
                left: set[str] = set()  # and those that keep some.
                async for page in self._history(thread, (), before=HISTORY_END):
                    for found in page:
                        ns = str(found.row.key[0])
                        if decode_checkpoint(found.row.value).run == run:
                            changes.append(DeleteRows(partition, found.row.key))
                            changed.add(ns)
                        else:
                            left.add(ns)
                async for rows in self._access.pages(partition, (VERSIONS,)):
                    for row in rows:
                        ns = str(row.key[1])
                        if ns in changed:
                            is_kept = ns in left and row.expires_ms is None
                            changes.append(
                                PutRow(partition, row.key, b"") if is_kept else DeleteRow(partition, row.key)
                            )
                changes.append(DeleteRow(partition, (RUNS, run)))
            if threads:
                await self._commit_all([*changes, DeleteRows(run_partition(run))])

    async def copy_thread(self, source: str, target: str) -> None:
        if source == target:
            return
        self._forget(target)
        batch: list[Change] = []
        size = 0
        checkpoint: PutRow | None = None
        async for page in self._access.pages(thread_partition(source)):
            for row in page:
                ttl = None if row.expires_ms is None else self._keep.ttl_seconds
                copied = PutRow(thread_partition(target), row.key, row.value, ttl_seconds=ttl)
                if row.key[0] == RUNS:
                    batch += _run_rows(str(row.key[1]), target, ttl)
                elif row.key[0] == VERSIONS:
                    batch.append(copied)
                elif len(row.key) == _CHECKPOINT_LENGTH:
                    # A checkpoint is committed after its writes, so that a crash leaves none without them.
                    batch += [checkpoint] if checkpoint else []
                    checkpoint = copied
                else:
                    batch.append(copied)
                size += len(row.value)
                if len(batch) >= COLLECTION_CHANGES_MAX - 2 or size >= LANGGRAPH_COPY_BYTES:
                    await self._access.commit(batch)
                    batch, size = [], len(checkpoint.value) if checkpoint else 0
        batch += [checkpoint] if checkpoint else []
        await self._commit_all(batch)

    async def prune(self, threads: Sequence[str], strategy: str) -> None:
        if strategy not in _STRATEGIES:
            raise ValueError(f"Unknown strategy {strategy!r}; choose one of {', '.join(_STRATEGIES)}")
        for thread in threads:
            if strategy == "delete":
                await self.delete_thread(thread)
                continue
            self._forget(thread)
            async for ns in self._namespaces(thread):
                await self._prune(thread, ns)

    async def _prune(self, thread: str, ns: str) -> None:
        """Delete all checkpoints of a namespace but the newest, and what that one needs."""
        partition = thread_partition(thread)
        for conflicts in range(LANGGRAPH_CONFLICTS_MAX + 1):
            known = await self._read_history(thread, ns)
            kept = kept_ids(known.checkpoints, 1)
            gone = [found.id for found in known.checkpoints if found.id not in kept]
            version, step = known.version, COLLECTION_CHANGES_MAX - 1
            try:
                for start in range(0, len(gone), step):
                    changed, version = _change_of_version(partition, ns, version, known.expires_ms)
                    part = gone[start : start + step]
                    await self._access.commit([changed, *(DeleteRows(partition, (ns, found)) for found in part)])
                return
            except VersionConflict:  # Another saver has stored a checkpoint.
                if conflicts == LANGGRAPH_CONFLICTS_MAX:
                    raise

    async def _commit_all(self, changes: Sequence[Change]) -> None:
        for start in range(0, len(changes), COLLECTION_CHANGES_MAX):
            await self._access.commit(changes[start : start + COLLECTION_CHANGES_MAX])

    def _remember(self, known: OrderedDict[tuple[str, str], Value], place: tuple[str, str], value: Value) -> None:
        with self._lock:
            known[place] = value
            known.move_to_end(place)
            if len(known) > LANGGRAPH_REMEMBERED_MAX:
                known.popitem(last=False)

    def _forget(self, thread: str) -> None:
        with self._lock:
            for place in [place for place in self._histories if place[0] == thread]:
                del self._histories[place]


class _History:
    """Pages of checkpoints with their writes, newest first.

    A class, because an event loop starts a task to close each generator that is not read to its end.

    Args:
        before: the end of what is read.
        first: how many rows are read first; later pages are longer.
    """

    def __init__(self, access: PlaneAccess, partition: str, prefix: Key, before: Key | None, first: int) -> None:
        self._access = access
        self._partition = partition
        self._prefix = prefix
        self._before = before
        self._limit = min(first, LANGGRAPH_PAGE_ROWS_MAX)
        self._writes: list[Row] = []  # Those whose checkpoint comes next.
        self._is_read = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list["_Found"]:
        found: list[_Found] = []
        while not found:
            if self._is_read:
                raise StopAsyncIteration
            page = await self._access.scan(
                self._partition, self._prefix, before=self._before, limit=self._limit, reverse=True
            )
            for row in page.rows:
                if self._writes and self._writes[0].key[:2] != row.key[:2]:
                    self._writes = []  # Their checkpoint is not stored yet, or never was.
                if len(row.key) > _CHECKPOINT_LENGTH:
                    self._writes.append(row)
                else:
                    found.append(_Found(row, self._writes))
                    self._writes = []
            self._before = page.next
            self._is_read = page.next is None
            self._limit = min(max(4 * self._limit, LANGGRAPH_PAGE_ROWS_MIN), LANGGRAPH_PAGE_ROWS_MAX)
        return found


class _Head:
    """The newest checkpoint of a history that has not been listed. The smallest head is the newest."""

    def __init__(self, history: _History) -> None:
        self._history = history
        self._rest: list[_Found] = []
        self.found: _Found

    async def advance(self) -> bool:
        """Go to the next checkpoint, if there is one."""
        if not self._rest:
            self._rest = (await anext(self._history, []))[::-1]
            if not self._rest:
                return False
        self.found = self._rest.pop()
        return True

    def __lt__(self, other: Self) -> bool:
        return str(self.found.row.key[1]) > str(other.found.row.key[1])


class _KnownHistory(NamedTuple):
    """The checkpoints of a namespace at a version, in the order of their ids."""

    version: int
    expires_ms: int | None  # Of the row that has the version.
    checkpoints: list[Ancestry]


class _Blob(NamedTuple):
    """A large channel value."""

    version: object
    stored: Serialized
    put_at: float  # Monotonic.


class _Found(NamedTuple):
    """The row of a checkpoint, and those of its writes."""

    row: Row
    writes: list[Row]


def _change_of_version(partition: str, ns: str, version: int, expires_ms: int | None) -> tuple[Change, int]:
    """What requires the version of a history and makes it another one, and that one."""
    key: Key = (VERSIONS, ns)
    if version == 0 or expires_ms is not None:  # It is not made to last longer than the checkpoints.
        return DeleteRow(partition, key, if_version=version), 0
    return PutRow(partition, key, b"", if_version=version), version + 1


def _ancestry(found: _Found) -> Ancestry:
    stored = decode_checkpoint(found.row.value)
    return Ancestry(str(found.row.key[1]), stored.parent, stored.needs, stored.snapshots)


def _place(config: RunnableConfig) -> tuple[str, str]:
    """The thread and the namespace of a configuration."""
    at = config["configurable"]
    return str(at["thread_id"]), at.get("checkpoint_ns") or ""


def _without(checkpoint: Checkpoint, channels: Container[str]) -> dict[str, Any]:
    values = {name: value for name, value in checkpoint["channel_values"].items() if name not in channels}
    return {**checkpoint, "channel_values": values}


def _config(thread: str, ns: str, checkpoint_id: str) -> RunnableConfig:
    return {"configurable": {"thread_id": thread, "checkpoint_ns": ns, "checkpoint_id": checkpoint_id}}


def _run_rows(run: str, thread: str, ttl: float | None) -> list[Change]:
    """What finds the runs of a thread, and the threads of a run, for at least `ttl` seconds."""
    return [
        PutRow(partition, key, b"", keep_existing=ttl is None, ttl_seconds=ttl)
        for partition, key in ((thread_partition(thread), (RUNS, run)), (run_partition(run), (thread,)))
    ]
