"""What executors could not reach otherwise, written to a store that they can."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

import msgspec

from holdfast.backends.objects import ObjectStore
from holdfast.errors import MissingObject
from holdfast.layers import segments
from holdfast.limits import PIECE_BYTES, PIECE_ENTRIES, VIEW_OBJECTS_AT_ONCE
from holdfast.pipeline.journal_chunks import Piece, WorldView

_AHEAD: Final = 4 * VIEW_OBJECTS_AT_ONCE  # Pieces behind one that is on its way; most may be hot, and wait for nothing.


class Stage:
    """Writes what executors could not reach otherwise to a store that they can."""

    def __init__(self, store: ObjectStore, url: str) -> None:
        self._store = store
        self._url = url
        self._bodies: list[bytes] = []
        self._start = 0
        self._bytes = 0

    def add(self, world: WorldView, height: int, records: list[bytes]) -> Iterator[Piece]:
        """Take hot records that follow those before; the piece that is full by them."""
        if not self._bodies:
            self._start = height
        self._bodies += segments.body(records)
        self._bytes += sum(map(len, records))
        if len(self._bodies) >= PIECE_ENTRIES or self._bytes >= PIECE_BYTES:
            yield from self.rest(world)

    def rest(self, world: WorldView) -> Iterator[Piece]:
        """The piece of what was taken, if there is something."""
        if not self._bodies:
            return
        end = self._start + len(self._bodies) - 1
        data = b"".join(self._bodies)
        checksum = segments.checksum(data)
        path = _staged("hot", checksum)
        self._store.put(path, data)
        yield Piece(
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

    def copies(self, pieces: Iterable[Piece], read: Callable[[str], bytes]) -> Iterator[Piece]:
        """The same pieces in order, the cold ones as they are read from here on. Several are on their way at a time."""
        with ThreadPoolExecutor(VIEW_OBJECTS_AT_ONCE) as pool:
            going: deque[Future[Piece]] = deque()
            try:
                for piece in pieces:
                    going.append(pool.submit(self._copy, piece, read))
                    if len(going) > _AHEAD:
                        yield going.popleft().result()
                while going:
                    yield going.popleft().result()
            finally:
                for each in going:  # Nobody waits for them any more.
                    each.cancel()

    def _copy(self, piece: Piece, read: Callable[[str], bytes]) -> Piece:
        """A cold piece, copied. One whose object is missing stays missing, in no store."""
        if piece.hot:
            return piece
        try:
            data = read(piece.path)
        except MissingObject:
            return piece
        self._store.put(piece.path, data)
        return msgspec.structs.replace(piece, store=self._url, staged=True)


def _staged(folder: str, checksum: str) -> str:
    return f"{folder}/{checksum.removeprefix('sha256:')}.log"
