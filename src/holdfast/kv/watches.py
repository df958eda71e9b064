"""Watches: a commit wakes whoever waits for keys below a prefix.

A wake-up is a hint and is kept until somebody takes it, so the safe loop is: open the watch, read, and if
there was nothing to do, wait. A write between the read and the wait has already set the hint.

Whoever waits on behalf of thousands hears every commit instead, and learns which keys it wrote.
"""

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import suppress
from types import TracebackType
from typing import Final, Self

from holdfast import limits
from holdfast.errors import Busy, Closed, InvalidKey

_log = logging.getLogger("holdfast.watches")

Range = tuple[bytes, bytes]
OnCommit = Callable[[Collection[bytes], Collection[Range]], None]  # Of the keys and ranges that may have changed.

_EVERYTHING: Final = (b"", b"\xff" * (limits.KEY_BYTES_MAX + 1))


class Watch:
    """One prefix, watched. Wait on it from a thread or from an event loop."""

    def __init__(self, watches: "Watches", prefix: bytes) -> None:
        self.prefix = prefix
        self._watches = watches
        self._fired = threading.Event()
        self._lock = threading.Lock()
        self._sleepers: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []
        self._closed = False

    def wait(self, timeout_seconds: float) -> bool:
        """Whether something may have changed since the last wait; waits at most `timeout_seconds` for it."""
        woken = self._fired.wait(timeout_seconds)
        return self._take(woken)

    async def wait_async(self, timeout_seconds: float) -> bool:
        """`wait` for an event loop."""
        loop = asyncio.get_running_loop()
        sleeper = (loop, loop.create_future())
        with self._lock:
            is_there = self._fired.is_set()
            if not is_there:
                self._sleepers.append(sleeper)
        if is_there:
            await asyncio.sleep(0)  # Whoever finds its own hints here, again and again, does not stop the loop.
            return self._take(woken=True)
        try:
            if asyncio.current_task() is None:  # It was begun without one, which timeouts need.
                await asyncio.sleep(0)
            async with asyncio.timeout(timeout_seconds):
                await sleeper[1]
        except TimeoutError:
            return False
        finally:
            with self._lock:
                if sleeper in self._sleepers:
                    self._sleepers.remove(sleeper)
        return self._take(woken=True)

    def close(self) -> None:
        """Stop watching. Whoever still waits is woken and gets Closed."""
        self._watches.remove(self)
        self._closed = True
        self.fire()

    def fire(self) -> bool:
        """Leave the hint and wake every waiter; whether one of them is a coroutine of the loop that runs here."""
        if self._fired.is_set():
            return False
        with self._lock:
            self._fired.set()
            sleepers, self._sleepers = self._sleepers, []
        if not sleepers:
            return False
        here = asyncio._get_running_loop()
        woke_here = False
        for loop, future in sleepers:
            if loop is here:
                _wake(future)
                woke_here = True
                continue
            with suppress(RuntimeError):  # The loop was closed, and its sleeper is gone with it.
                loop.call_soon_threadsafe(_wake, future)
        return woke_here

    def _take(self, woken: bool) -> bool:
        if woken:
            self._fired.clear()
        if self._closed:
            self._fired.set()  # Whoever else waits is to learn it too.
            raise Closed("The watch was closed, or its database was; open a new one")
        return woken

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Watches:
    """Every open watch of a database. A commit costs nothing here while there are none."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_prefix: dict[bytes, set[Watch]] = {}
        self._lengths: Counter[int] = Counter()
        self._hearers: tuple[OnCommit, ...] = ()
        self.count = 0  # How many are open, with those who hear every commit. While there are none, none need be told.

    def open(self, prefix: bytes) -> Watch:
        if prefix.__class__ is not bytes:
            raise InvalidKey(f"A watched prefix must be bytes, not {type(prefix).__name__}; encode it with kv.pack")
        watch = Watch(self, prefix)
        with self._lock:
            if self.count >= limits.WATCHES_MAX:
                raise Busy(f"{limits.WATCHES_MAX} watches are open; close those that are done")
            self.count += 1
            self._by_prefix.setdefault(prefix, set()).add(watch)
            self._lengths[len(prefix)] += 1
        return watch

    def remove(self, watch: Watch) -> None:
        with self._lock:
            watches = self._by_prefix.get(watch.prefix)
            if watches is None or watch not in watches:
                return
            watches.discard(watch)
            if not watches:
                del self._by_prefix[watch.prefix]
            self.count -= 1
            self._lengths[len(watch.prefix)] -= 1
            if not self._lengths[len(watch.prefix)]:
                del self._lengths[len(watch.prefix)]

    def subscribe(self, told: OnCommit) -> Callable[[], None]:
        """Have `told` called with what each commit may have changed, until the function that this returns is called."""
        with self._lock:
            self._hearers += (told,)
            self.count += 1

        def stop() -> None:
            with self._lock:
                if told in self._hearers:
                    self._hearers = tuple(each for each in self._hearers if each is not told)
                    self.count -= 1

        return stop

    def notify(self, keys: Collection[bytes], cleared: Collection[Range] = ()) -> bool:
        """Fire the watches that these written keys and deleted ranges may concern.

        Whether a coroutine of the loop that runs here was woken, and will most likely commit something in a moment.
        """
        if not self.count:
            return False
        if self._hearers:
            self._tell(keys, cleared)
        if not self._lengths:
            return False
        with self._lock:
            # There are few distinct prefix lengths, so a key is looked up a few times however many watches there are.
            hit = {prefix for key in keys for length in self._lengths if (prefix := key[:length]) in self._by_prefix}
            for begin, end in cleared:
                hit |= {prefix for prefix in self._by_prefix if _touches(prefix, begin, end)}
            fired = [watch for prefix in hit for watch in self._by_prefix[prefix]]
        woke_here = [watch.fire() for watch in fired]
        return True in woke_here

    def fire_all(self) -> None:
        """Fire every watch: something changed, nobody knows what."""
        self._tell((), (_EVERYTHING,))
        with self._lock:
            fired = [watch for watches in self._by_prefix.values() for watch in watches]
        for watch in fired:
            watch.fire()

    def _tell(self, keys: Collection[bytes], cleared: Collection[Range]) -> None:
        for told in self._hearers:
            try:
                told(keys, cleared)
            except Exception:  # What it would hear is committed: that is no failure of whoever did.
                _log.exception("a commit could not be told to somebody who hears of all; others were told")

    def close(self) -> None:
        """Close every watch."""
        with self._lock:
            opened = [watch for watches in self._by_prefix.values() for watch in watches]
        for watch in opened:
            watch.close()


def _touches(prefix: bytes, begin: bytes, end: bytes) -> bool:
    """Whether some key that starts with `prefix` lies in begin..end."""
    return begin[: len(prefix)] <= prefix < end


def _wake(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)
