"""Request bodies: bytes, or a stream that may raise its own error."""

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

from fastness.errors import InvalidValue
from fastness.limits import OBJECT_PART_BYTES


class Body:
    """A stream that is being stored: its first part, its size, and its own error, apart from the store's."""

    def __init__(self) -> None:
        self.first = bytearray()
        self.size = 0
        self._failure: Exception | None = None

    def fill_first_part(self, chunk: bytes) -> bool:
        """Add `chunk` to the first part. Returns whether the part is full."""
        self.first += check_bytes(chunk)
        return len(self.first) >= OBJECT_PART_BYTES

    def read(self, rest: Iterator[bytes]) -> Iterator[bytes]:
        """The first part, then the rest."""
        yield self._take_first()
        with self._record_failure():
            for chunk in rest:
                yield self._count(chunk)

    async def read_async(self, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        yield self._take_first()
        with self._record_failure():
            async for chunk in rest:
                yield self._count(chunk)

    @contextmanager
    def raise_stream_error(self) -> Iterator[None]:
        """Raise the stream's own error instead of the store's error that it caused."""
        try:
            yield
        except Exception:
            if self._failure is None:
                raise
            raise self._failure from self._failure.__cause__

    @contextmanager
    def _record_failure(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._failure = error
            raise

    def _take_first(self) -> bytes:
        first, self.first = bytes(self.first), bytearray()
        return self._count(first)

    def _count(self, chunk: bytes) -> bytes:
        self.size += len(check_bytes(chunk))
        return chunk


def check_bytes(data: bytes) -> bytes:
    """Return `data` if it is bytes. Without this check, obstore would take a string for a path to upload."""
    if not isinstance(data, bytes | bytearray | memoryview):
        raise InvalidValue(f"An object's data must be bytes, not {type(data).__name__}; encode it first")
    return data
