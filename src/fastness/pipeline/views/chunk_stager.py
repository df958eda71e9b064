"""Stages data that executors cannot read directly: writes it to a store they can reach."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

import msgspec

from fastness.backends.objects import ObjectStore
from fastness.errors import MissingObject
from fastness.layers import segments
from fastness.limits import CHUNK_BYTES, CHUNK_ENTRIES, VIEW_OBJECTS_IN_FLIGHT
from fastness.pipeline.journal_chunks import JournalChunk, WorldView

# Copies may run this far ahead of the consumer; hot chunks, which need no copy, count too.
_PREFETCH_MAX: Final = 4 * VIEW_OBJECTS_IN_FLIGHT


class ChunkStager:
    """Writes chunks to a staging store."""

    def __init__(self, store: ObjectStore, url: str) -> None:
        self._store = store
        self._url = url
        self._bodies: list[bytes] = []
        self._start = 0
        self._bytes = 0

    def add(self, world: WorldView, height: int, records: list[bytes]) -> Iterator[JournalChunk]:
        """Add hot records that follow the previous ones; yields a chunk when it is full."""
        if not self._bodies:
            self._start = height
        self._bodies += segments.body(records)
        self._bytes += sum(map(len, records))
        if len(self._bodies) >= CHUNK_ENTRIES or self._bytes >= CHUNK_BYTES:
            yield from self.flush(world)

    def flush(self, world: WorldView) -> Iterator[JournalChunk]:
        """The chunk of the remaining records, if there are any."""
        if not self._bodies:
            return
        end = self._start + len(self._bodies) - 1
        data = b"".join(self._bodies)
        checksum = segments.checksum(data)
        path = _staged_path("hot", checksum)
        self._store.put(path, data)
        yield JournalChunk(
            world.universe,
            world.name,
            self._start,
            end,
            self._url,
            path,
            checksum,
            len(data),
            hot=True,
            first=self._start,
            staged=True,
        )
        self._bodies, self._bytes = [], 0

    def copy_cold(self, chunks: Iterable[JournalChunk], read: Callable[[str], bytes]) -> Iterator[JournalChunk]:
        """The same chunks in order, with cold ones copied to the staging store, several at a time."""
        with ThreadPoolExecutor(VIEW_OBJECTS_IN_FLIGHT) as pool:
            pending: deque[Future[JournalChunk]] = deque()
            try:
                for chunk in chunks:
                    pending.append(pool.submit(self._copy, chunk, read))
                    if len(pending) > _PREFETCH_MAX:
                        yield pending.popleft().result()
                while pending:
                    yield pending.popleft().result()
            finally:
                for each in pending:  # The consumer has stopped.
                    each.cancel()

    def _copy(self, chunk: JournalChunk, read: Callable[[str], bytes]) -> JournalChunk:
        """Copy a cold chunk. If its object is missing, the chunk is returned as it is."""
        if chunk.hot:
            return chunk
        try:
            data = read(chunk.path)
        except MissingObject:
            return chunk
        self._store.put(chunk.path, data)
        return msgspec.structs.replace(chunk, store=self._url, staged=True)


def _staged_path(folder: str, checksum: str) -> str:
    return f"{folder}/{checksum.removeprefix('sha256:')}.log"
