"""What is stored: bytes at once, or a stream of them that may fail on its own account."""

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

from holdfast.errors import InvalidValue
from holdfast.limits import OBJECT_PART_BYTES


class Body:
    """A stream on its way to a store: its first part, its size, and its own failure, which is not the store's."""

    def __init__(self) -> None:
        self.first = bytearray()
        self.size = 0
        self._failure: Exception | None = None

    def fills_a_part(self, chunk: bytes) -> bool:
        """Add to the first part, and tell whether it is full."""
        self.first += check_bytes(chunk)
        return len(self.first) >= OBJECT_PART_BYTES

    def read(self, rest: Iterator[bytes]) -> Iterator[bytes]:
        """The first part, then the rest."""
        yield self._take_first()
        with self._noting_failure():
            for chunk in rest:
                yield self._count(chunk)

    async def read_async(self, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        yield self._take_first()
        with self._noting_failure():
            async for chunk in rest:
                yield self._count(chunk)

    @contextmanager
    def failing_as_itself(self) -> Iterator[None]:
        """Raise the stream's own failure where there was one, whatever the store made of it."""
        try:
            yield
        except Exception:
            if self._failure is None:
                raise
            raise self._failure from self._failure.__cause__

    @contextmanager
    def _noting_failure(self) -> Iterator[None]:
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
    """The data itself. Without this check, obstore would take a string for the name of a file to upload."""
    if not isinstance(data, bytes | bytearray | memoryview):
        raise InvalidValue(f"An object's data must be bytes, not {type(data).__name__}; encode it first")
    return data
