"""Sends hot records to executors, where the lake is in an object store.

A plane may have thousands of worlds with a few new records each, and an object store request takes as long as reading
hundreds of records. So small chunks are sent inside the task, and only large ones are written to the store.
"""

from pathlib import Path
from typing import Final

import msgspec
from obstore.store import MemoryStore

from fastness.backends.objects import ObjectStore
from fastness.limits import INGEST_CARRIED_BYTES, INGEST_CARRIED_BYTES_MAX
from fastness.pipeline.journal_chunks import JournalChunk, Stores

INLINE_STORE: Final = "carried:"  # The store URL of chunks inside a task.


class TaskPayload(msgspec.Struct):
    """The chunks that are sent inside a batch's tasks, by path."""

    bodies: dict[str, bytes] = {}
    size: int = 0


class PayloadPacker:
    """Moves chunks that a view staged in a local folder to where executors can read them."""

    def __init__(self, stores: Stores, folder: Path) -> None:
        self.staging = f"dir:{folder}"
        self._stores = stores
        self._folder = folder

    def pack(self, chunks: list[JournalChunk], staging: str, load: TaskPayload) -> list[JournalChunk]:
        """The same chunks: small ones in the payload while it has space, others in `staging`."""
        packed = [self._pack_chunk(chunk, staging, load) if chunk.staged else chunk for chunk in chunks]
        for chunk in chunks:
            if chunk.staged:
                (self._folder / chunk.path).unlink(missing_ok=True)
        return packed

    def _pack_chunk(self, chunk: JournalChunk, staging: str, load: TaskPayload) -> JournalChunk:
        if chunk.path not in load.bodies:
            data = (self._folder / chunk.path).read_bytes()
            if len(data) > min(INGEST_CARRIED_BYTES, INGEST_CARRIED_BYTES_MAX - load.size):
                self._stores.staging(staging).put(chunk.path, data)
                return msgspec.structs.replace(chunk, store=staging)
            load.bodies[chunk.path] = data
            load.size += len(data)
        return msgspec.structs.replace(chunk, store=INLINE_STORE)


def inline_store(bodies: dict[str, bytes]) -> ObjectStore:
    """A store with the chunks that were sent inside a task."""
    store = ObjectStore(MemoryStore())
    for path, data in bodies.items():
        store.put(path, data)
    return store
