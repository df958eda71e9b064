"""Finds out what has changed, for clients that subscribed to it.

    hint (a watch of the key space, or the time to poll) ──► read a fingerprint ──► it differs ──► call the listeners

A fingerprint is small and cheap to read. Listeners that watch the same thing share one. Changes between two reads are
one change.
"""

import asyncio
import hashlib
import logging
from collections.abc import Callable
from contextvars import Context
from typing import NamedTuple, Protocol

import msgspec

from fastness import AsyncPlane
from fastness.errors import Busy, Closed, FastnessError, NotFound
from fastness.limits import MCP_LISTED_NAMES_MAX, MCP_PAGE, MCP_WATCHED_MAX
from fastness.mcp.exposed_tools import COLLECTION, PARTITION
from fastness.names import REPORTS

_log = logging.getLogger("fastness.mcp")


class Target(NamedTuple):
    """Something that can change: a queue, the dead letters of one, a world, a mailbox, a report, or a list of names."""

    universe: str
    kind: str  # queue, dead_letters, world, mail, report, or the lists: tools, queues, worlds, reports.
    name: str = ""  # Of the queue, the world, the mailbox's agent or the report.


class Hint(Protocol):
    """Says when to read a fingerprint."""

    def has_fired(self) -> bool:
        """Whether the target may have changed since the last call."""
        ...

    def close(self) -> None: ...


class PollHint:
    """Reads every time, for planes that cannot be watched."""

    def __init__(self, target: Target) -> None:
        del target

    def has_fired(self) -> bool:
        return True

    def close(self) -> None:
        """Nothing is open."""


class _Watched:
    """A target with its fingerprint and listeners."""

    def __init__(self, plane: AsyncPlane, hint: Hint) -> None:
        self.plane = plane
        self.hint = hint
        self.listeners: dict[object, Callable[[], None]] = {}
        self.fingerprint: bytes | None = None
        self.reading = asyncio.Lock()


class Changes:
    """The targets that clients watch, and one task that looks for changes while there are any."""

    def __init__(self, open_hint: Callable[[Target], Hint], *, seconds: float) -> None:
        """`seconds` pass between two looks at the hints."""
        self._open_hint = open_hint
        self._seconds = seconds
        self._watched: dict[Target, _Watched] = {}
        self._task: asyncio.Task[None] | None = None

    async def watch(self, plane: AsyncPlane, target: Target, on_change: Callable[[], None]) -> Callable[[], None]:
        """Call `on_change` after each change from now on, until the returned function is called.

        Raises:
            Busy: too many targets are watched.
        """
        watched = self._watched.get(target)
        if watched is None:
            if len(self._watched) >= MCP_WATCHED_MAX:
                raise Busy(f"Clients watch {MCP_WATCHED_MAX} resources, the most that this server allows; retry later")
            watched = self._watched[target] = _Watched(plane, self._open_hint(target))
        listener = object()
        watched.listeners[listener] = on_change

        def stop() -> None:
            watched.listeners.pop(listener, None)
            if not watched.listeners and self._watched.get(target) is watched:
                del self._watched[target]
                watched.hint.close()

        try:
            async with watched.reading:  # What is written from here on is a change.
                if watched.fingerprint is None:
                    watched.fingerprint = await _fingerprint(plane, target)
        except BaseException:
            stop()
            raise
        if self._task is None or self._task.done():
            # Not in the context of this request, which ends earlier.
            self._task = asyncio.get_running_loop().create_task(self._run(), context=Context())
        return stop

    def close(self) -> None:
        """Stop looking for changes."""
        if self._task is not None:
            self._task.cancel()
        for watched in self._watched.values():
            watched.hint.close()
        self._watched.clear()

    async def look(self) -> None:
        """Look at all hints once."""
        for target, watched in list(self._watched.items()):
            try:
                if watched.hint.has_fired():
                    await self._check(target, watched)
            except Closed:  # The plane is being closed, or the watch was meanwhile.
                continue
            except Exception:  # Other targets are still watched.
                _log.exception("unexpected error while %s was read for its subscribers", target.kind)

    async def _run(self) -> None:
        while self._watched:
            await asyncio.sleep(self._seconds)
            await self.look()

    async def _check(self, target: Target, watched: _Watched) -> None:
        async with watched.reading:
            found = await _fingerprint(watched.plane, target)
            if found is None or found == watched.fingerprint:
                return
            watched.fingerprint = found
        for listener in list(watched.listeners.values()):
            listener()


async def _fingerprint(plane: AsyncPlane, target: Target) -> bytes | None:
    """What is compared to find changes; None if it cannot be read now."""
    try:
        return msgspec.msgpack.encode(await _read(plane, target))
    except NotFound as error:
        return error.code.encode()
    except Closed:
        raise
    except FastnessError as error:
        _log.debug("%s cannot be read for its subscribers: %s", target.kind, error)
        return None


async def _read(plane: AsyncPlane, target: Target) -> object:
    if target.kind in ("queue", "dead_letters"):
        stats = await plane.queue(target.name).stats()
        if target.kind == "dead_letters":
            return [stats.dead, stats.dead_total]
        # Without the age of the next message and the number of consumers, which change by themselves.
        return msgspec.structs.replace(stats, head_age_seconds=0.0, waiting_consumers=0)
    if target.kind == "world":
        world = await plane.world(target.name).describe()
        return [world.incarnation, world.state, world.head]
    if target.kind == "mail":
        mail = await plane.mailbox(target.name).stats()
        return [mail.pending, mail.oldest_ms]
    if target.kind == "report":
        row = await plane.collection(REPORTS).get(REPORTS, (target.name,))
        # A report that was removed and published again can have the same version.
        return row and [row.version, hashlib.sha256(row.value).digest()]
    if target.kind == "reports":
        return [row.key for row in (await plane.collection(REPORTS).scan(REPORTS, limit=MCP_LISTED_NAMES_MAX)).rows]
    if target.kind == "tools":
        rows = (await plane.collection(COLLECTION).scan(PARTITION, limit=MCP_LISTED_NAMES_MAX)).rows
        return [[row.key, row.version, row.value] for row in rows]
    if target.kind == "worlds":
        return await plane.worlds(limit=MCP_LISTED_NAMES_MAX)
    page = await plane.survey_queues(limit=MCP_PAGE)  # Queues with dead letters are listed twice.
    return [[each.queue for each in page.queues if each.dead], await plane.queues(limit=MCP_LISTED_NAMES_MAX)]
