"""One way to the rows and blobs of a plane, for code that is written once for threads and for event loops.

Stores for agent frameworks are coroutines over `PlaneAccess`. With an `AsyncPlane` they are awaited as usual. With a
`Plane` their awaited calls return without waiting, so a coroutine runs to its end in the calling thread.

A value that is too large for a row is a blob. Its hash is in the row, as text, which keeps it from being collected.
"""

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import aclosing, suppress
from typing import Any, TypeAlias, TypeVar

from fastness import AsyncPlane, PartitionPage, Plane, Row, RowChange, RowKey, RowPage, Tier
from fastness.errors import Busy, FastnessError, InvalidArgument, UnreadableValue, Unsupported
from fastness.limits import ADAPTER_PAGE_ROWS
from fastness.threads import run_in_thread

Result = TypeVar("Result")
Change: TypeAlias = RowChange
Key: TypeAlias = RowKey


class PlaneAccess(ABC):
    """The rows of one collection and the blobs of a plane, and how coroutines that use them run."""

    can_wait: bool  # Whether coroutines over it may await anything else.

    def __init__(self, plane: Plane | AsyncPlane, collection: str) -> None:
        self._rows = plane.collection(collection)
        self._blobs = plane.blobs

    async def commit(self, changes: Sequence[Change], *, tier: Tier = Tier.CRITICAL) -> None:
        await _answer(self._rows.commit(changes, tier=tier))

    async def get_many(self, partition: str, keys: Sequence[Key]) -> list[Row | None]:
        return await _answer(self._rows.get_many(partition, keys))

    async def scan(
        self,
        partition: str,
        prefix: Key = (),
        *,
        after: Key | None = None,
        before: Key | None = None,
        limit: int,
        reverse: bool = False,
    ) -> RowPage:
        return await _answer(
            self._rows.scan(partition, prefix, after=after, before=before, limit=limit, reverse=reverse)
        )

    async def partitions(self, prefix: str, *, after: str, limit: int) -> PartitionPage:
        return await _answer(self._rows.partitions(prefix, after=after, limit=limit))

    async def put_blob(self, data: bytes) -> str:
        """Store bytes, which are kept as long as a row names their hash; the hash."""
        return await _answer(self._blobs.put(data, pinned=False))

    async def get_blob(self, hash: str) -> bytes:
        return await _answer(self._blobs.get(hash))

    async def pages(
        self,
        partition: str,
        prefix: Key = (),
        *,
        before: Key | None = None,
        limit: int | None = None,
        reverse: bool = False,
    ) -> AsyncGenerator[list[Row]]:
        """All rows whose keys begin with `prefix`, or the first `limit` of them, in pages."""
        after, left = None, limit
        while left is None or left > 0:
            count = ADAPTER_PAGE_ROWS if left is None else min(left, ADAPTER_PAGE_ROWS)
            page = await self.scan(partition, prefix, after=after, before=before, limit=count, reverse=reverse)
            yield page.rows
            if page.next is None:
                return
            if reverse:
                before = page.next
            else:
                after = page.next
            left = None if left is None else left - len(page.rows)

    async def all_partitions(self, prefix: str) -> AsyncGenerator[str]:
        """The names of all partitions that begin with `prefix`, in order."""
        after: str | None = ""
        while after is not None:
            page = await self.partitions(prefix, after=after, limit=ADAPTER_PAGE_ROWS)
            for partition in page.partitions:
                yield partition
            after = page.next

    async def put_value(self, data: bytes, *, inline_max: int, row_max: int) -> tuple[bytes, str]:
        """What a row contains of a value: its bytes and no hash, or no bytes and the hash of a blob.

        Args:
            data: the value.
            inline_max: a value with more bytes is a blob, if the plane can store it.
            row_max: a value with more bytes has to be a blob.

        Raises:
            Unsupported: the value needs an object store, and the plane has none.
        """
        if len(data) <= inline_max:
            return data, ""
        try:
            return b"", await self.put_blob(data)
        except Unsupported:
            if len(data) > row_max:
                raise
            return data, ""

    async def get_value(self, data: bytes, hash: str) -> bytes:
        """The value of which a row contains this."""
        return await self.get_blob(hash) if hash else data

    @abstractmethod
    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """The result of a coroutine, for a synchronous caller."""

    @abstractmethod
    async def run_async(self, work: Coroutine[Any, Any, Result]) -> Result:
        """The result of a coroutine, for an asynchronous caller."""

    def iterate(self, pages: AsyncIterator[list[Result]]) -> Iterator[Result]:
        """The items of pages, for a synchronous caller."""
        while (page := self.run(_next(pages))) is not None:
            yield from page

    async def iterate_async(self, pages: AsyncGenerator[list[Result]]) -> AsyncGenerator[Result]:
        """The items of pages, for an asynchronous caller."""
        async with aclosing(pages):
            while (page := await self.run_async(_next(pages))) is not None:
                for item in page:
                    yield item


def decoded(what: str, decode: Callable[[bytes], Result], data: bytes) -> Result:
    """`decode(data)`, for data that another program may have written.

    Raises:
        UnreadableValue: it is not what `decode` reads.
    """
    try:
        return decode(data)
    except FastnessError:
        raise
    except Exception as error:  # Decoders of different libraries.
        raise UnreadableValue(
            f"{what} cannot be read ({type(error).__name__}: {error}): another program wrote it, or it is damaged. "
            "Nothing of it was run; delete it, or restore a backup"
        ) from error


def json_object(data: bytes) -> dict[str, Any]:
    """The JSON object in `data`; for `decoded`."""
    found = json.loads(data)
    if not isinstance(found, dict):
        raise ValueError(f"it is JSON of a {type(found).__name__}, and not an object")
    return found


def access_to(plane: Plane | AsyncPlane, collection: str) -> PlaneAccess:
    """The access to a collection of `plane`."""
    if isinstance(plane, AsyncPlane):
        return _AsyncAccess(plane, collection)
    if isinstance(plane, Plane):
        return _SyncAccess(plane, collection)
    raise InvalidArgument(
        f"A Plane or an AsyncPlane is needed, not {type(plane).__name__}; open one with fastness.open, or connect to a "
        "server with fastness.connect"
    )


async def _next(pages: AsyncIterator[list[Result]]) -> list[Result] | None:
    return await anext(pages, None)


async def _answer(call: Result | Coroutine[Any, Any, Result]) -> Result:
    """The answer to a call of a handle: that of a Plane is there, that of an AsyncPlane is awaited."""
    return await call if isinstance(call, Coroutine) else call


class _AsyncAccess(PlaneAccess):
    """Over an `AsyncPlane`, which belongs to the event loop that opened it."""

    can_wait = True

    def __init__(self, plane: AsyncPlane, collection: str) -> None:
        super().__init__(plane, collection)
        self._loop = asyncio._get_running_loop()

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        here = asyncio._get_running_loop()
        loop = self._loop
        if loop is None or here is loop:
            work.close()
            if loop is None:
                raise asyncio.InvalidStateError(
                    "The event loop of the AsyncPlane is not known. Create the saver or store inside the loop, call an "
                    "asynchronous method such as `aget_tuple` first, or give it a Plane of `fastness.open`"
                )
            raise asyncio.InvalidStateError(
                "A synchronous method would block the event loop of its AsyncPlane for ever. Await the asynchronous "
                "one (`aget_tuple`, `graph.ainvoke`, …), call it from another thread, or give it a Plane of "
                "`fastness.open`"
            )
        return asyncio.run_coroutine_threadsafe(work, loop).result()

    async def run_async(self, work: Coroutine[Any, Any, Result]) -> Result:
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        return await work


class _SyncAccess(PlaneAccess):
    """Over a `Plane`: the coroutines never wait, and asynchronous callers run them in a thread."""

    can_wait = False

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        try:
            work.send(None)
        except StopIteration as end:
            result: Result = end.value
            return result
        work.close()
        raise AssertionError("A coroutine over a Plane has waited")

    async def run_async(self, work: Coroutine[Any, Any, Result]) -> Result:
        try:
            return await run_in_thread(self.run, work)
        except (Busy, asyncio.CancelledError):
            with suppress(ValueError):  # It runs already; otherwise it never will.
                work.close()
            raise
