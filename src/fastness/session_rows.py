"""The rows of a session store, awaited in the same way on a Plane and on an AsyncPlane.

=<value>    a row that has the value itself
#<hash>     a row with the hash of the blob that has the value
"""

import asyncio
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from typing import Any, Final, TypeVar

from fastness import AsyncPlane, Plane, Row
from fastness.errors import Conflict
from fastness.limits import (
    COLLECTION_VALUE_BYTES_MAX,
    SESSION_ATTEMPTS_MAX,
    SESSION_BACK_OFF_SECONDS_MAX,
    SESSION_COMMIT_BYTES_MAX,
    SESSION_INLINE_BYTES_MAX,
)
from fastness.plane_access import Change, Key, access_to

Result = TypeVar("Result")

_INLINE: Final = b"="
_BLOB: Final = b"#"


class SessionRows:
    """A collection of a plane, for an event loop. A Plane is called in a thread."""

    def __init__(self, plane: Plane | AsyncPlane, name: str) -> None:
        self._access = access_to(plane, name)

    async def commit(self, changes: Sequence[Change]) -> None:
        """Make all changes, or none.

        Raises:
            Conflict: a row does not have the version that a change expects.
        """
        await self._access.run_async(self._access.commit(changes))

    async def get_many(self, partition: str, keys: Sequence[Key]) -> list[Row | None]:
        """The rows with these keys, at one moment; None for each that does not exist."""
        return await self._access.run_async(self._access.get_many(partition, keys))

    def scan(
        self, partition: str, prefix: Key, *, before: Key | None = None, limit: int | None = None, reverse: bool = False
    ) -> AsyncGenerator[Row]:
        """The rows whose keys begin with `prefix`, read in pages."""
        pages = self._access.pages(partition, prefix, before=before, limit=limit, reverse=reverse)
        return self._access.iterate_async(pages)

    async def partitions(self, prefix: str) -> list[str]:
        """The names of all partitions that begin with `prefix`."""

        async def read() -> list[str]:
            return [partition async for partition in self._access.all_partitions(prefix)]

        return await self._access.run_async(read())

    async def store(self, values: Sequence[bytes]) -> list[bytes]:
        """What the rows with these values contain; stores the large values as blobs, so that one commit has space.

        A plane without an object store keeps large values in their rows, as long as they fit.

        Raises:
            Unsupported: the values need an object store, and the plane has none.
        """
        inline_max = min(SESSION_INLINE_BYTES_MAX, SESSION_COMMIT_BYTES_MAX // max(1, len(values)))
        if all(len(value) <= inline_max for value in values):
            return [_INLINE + value for value in values]  # Without a thread.
        fits = sum(map(len, values)) <= SESSION_COMMIT_BYTES_MAX
        row_max = COLLECTION_VALUE_BYTES_MAX - len(_INLINE) if fits else inline_max

        async def put() -> list[bytes]:
            found = [await self._access.put_value(value, inline_max=inline_max, row_max=row_max) for value in values]
            return [_BLOB + hash.encode() if hash else _INLINE + data for data, hash in found]

        return await self._access.run_async(put())

    async def load(self, row: Row) -> bytes:
        """The value of a row that was stored by `store`."""
        if row.value.startswith(_INLINE):
            return row.value.removeprefix(_INLINE)
        return await self._access.run_async(self._access.get_blob(row.value.removeprefix(_BLOB).decode()))


async def write(attempt: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
    """The result of a write, which is attempted again when another writer was faster.

    A caller that is cancelled meanwhile gets CancelledError after the write has ended, so that what it does next is not
    overtaken by it.

    Raises:
        Conflict: another writer was faster every time.
    """
    writing = asyncio.ensure_future(_retried(attempt))
    try:
        return await asyncio.shield(writing)
    except asyncio.CancelledError:
        await asyncio.wait({writing})
        if not writing.cancelled():
            writing.exception()  # Marks it as seen: the caller learns of its own cancellation instead.
        raise


async def _retried(attempt: Callable[[], Awaitable[Result]]) -> Result:
    for number in range(1, SESSION_ATTEMPTS_MAX):
        try:
            return await attempt()
        except Conflict:
            longest = min(SESSION_BACK_OFF_SECONDS_MAX, 0.001 * 2**number)
            await asyncio.sleep(random.uniform(0, longest))
    return await attempt()
