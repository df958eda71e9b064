"""Hot records on their way to executors, where the lake is in an object store.

A plane has thousands of worlds with a few new records each, and a request to an object store takes as long as reading
hundreds of them. So what is small travels with its task, and only what is large is put into the store.
"""

from pathlib import Path
from typing import Final

import msgspec
from obstore.store import MemoryStore

from holdfast.backends.objects import ObjectStore
from holdfast.limits import INGEST_CARRIED_BYTES, INGEST_CARRIED_BYTES_MAX
from holdfast.pipeline.journal_chunks import Piece, Stores

CARRIED: Final = "carried:"  # The store of what comes with a task.


class Load(msgspec.Struct):
    """What travels with the tasks of a batch, by its path."""

    bodies: dict[str, bytes] = {}
    size: int = 0


class Courier:
    """Takes what a view has staged in a folder of this machine to where executors find it."""

    def __init__(self, stores: Stores, folder: Path) -> None:
        self.staging = f"dir:{folder}"
        self._stores = stores
        self._folder = folder

    def carry(self, pieces: list[Piece], staging: str, load: Load) -> list[Piece]:
        """The same pieces, with small ones in the load, as long as there is room, and others in `staging`."""
        carried = [self._place(piece, staging, load) if piece.staged else piece for piece in pieces]
        for piece in pieces:
            if piece.staged:
                (self._folder / piece.path).unlink(missing_ok=True)
        return carried

    def _place(self, piece: Piece, staging: str, load: Load) -> Piece:
        if piece.path not in load.bodies:
            data = (self._folder / piece.path).read_bytes()
            if len(data) > min(INGEST_CARRIED_BYTES, INGEST_CARRIED_BYTES_MAX - load.size):
                self._stores.staging(staging).put(piece.path, data)
                return msgspec.structs.replace(piece, store=staging)
            load.bodies[piece.path] = data
            load.size += len(data)
        return msgspec.structs.replace(piece, store=CARRIED)


def unpacked(bodies: dict[str, bytes]) -> ObjectStore:
    """The store of what came with a task."""
    store = ObjectStore(MemoryStore())
    for path, data in bodies.items():
        store.put(path, data)
    return store
