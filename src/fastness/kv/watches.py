"""Watches: a commit wakes those that wait for keys below a prefix.

A wake-up is a hint and stays set until a wait consumes it. The safe loop is: open the watch, read, and if there is
nothing to do, wait. A write between the read and the wait has already set the hint.

Code that waits on behalf of thousands of callers subscribes to every commit instead, and receives the written keys.
"""

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Final, Self

from fastness import limits
from fastness.errors import Busy, Closed, InvalidKey

_log = logging.getLogger("fastness.watches")

Range = tuple[bytes, bytes]
OnCommit = Callable[[Collection[bytes], Collection[Range]], None]  # Receives the keys and ranges that may have changed.

_EVERYTHING: Final = (b"", b"\xff" * (limits.KEY_BYTES_MAX + 1))


class Watch:
    """A watch on one or more prefixes. Wait on it from a thread or from an event loop."""

    def __init__(self, watches: "Watches", prefixes: tuple[bytes, ...], *, additions: bool = False) -> None:
        self.prefixes = prefixes
        self.additions = additions  # Whether it ignores deletions.
        self._watches = watches
        self._fired = threading.Event()
        self._lock = threading.Lock()
        self._waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []
        self._closed = False
        self.on_fire: Callable[[], None] | None = None  # Called once it has fired, for a waiter that has no thread.

    def wait(self, timeout_seconds: float) -> bool:
        """Whether something may have changed since the last wait. Waits up to `timeout_seconds` for a change."""
        woken = self._fired.wait(timeout_seconds)
        return self._consume(woken)

    async def wait_async(self, timeout_seconds: float) -> bool:
        """`wait` for an event loop."""
        loop = asyncio.get_running_loop()
        waiter = (loop, loop.create_future())
        with self._lock:
            is_set = self._fired.is_set()
            if not is_set:
                self._waiters.append(waiter)
        if is_set:
            await asyncio.sleep(0)  # Lets other tasks run even if every wait finds a hint.
            return self._consume(woken=True)
        try:
            if asyncio.current_task() is None:  # An eager coroutine has no task yet, which timeouts need.
                await asyncio.sleep(0)
            async with asyncio.timeout(timeout_seconds):
                await waiter[1]
        except TimeoutError:
            return False
        finally:
            with self._lock:
                if waiter in self._waiters:
                    self._waiters.remove(waiter)
        return self._consume(woken=True)

    def close(self) -> None:
        """Stop watching. Current waits raise Closed."""
        self._watches.remove(self)
        self._closed = True
        self.fire()

    def fire(self) -> bool:
        """Set the hint and wake every waiter. Returns whether one of them is on the event loop of this thread."""
        if self._fired.is_set():
            return False
        with self._lock:
            self._fired.set()
            waiters, self._waiters = self._waiters, []
        if self.on_fire is not None:
            self.on_fire()
        if not waiters:
            return False
        running_loop = asyncio._get_running_loop()
        woke_on_this_loop = False
        for loop, future in waiters:
            if loop is running_loop:
                _wake(future)
                woke_on_this_loop = True
                continue
            with suppress(RuntimeError):  # The loop is closed, and its waiters with it.
                loop.call_soon_threadsafe(_wake, future)
        return woke_on_this_loop

    def _consume(self, woken: bool) -> bool:
        if woken:
            self._fired.clear()
        if self._closed:
            self._fired.set()  # Other waiters raise Closed too.
            raise Closed("The watch was closed, or its database was; open a new one")
        return woken

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Watches:
    """All open watches and subscriptions of a database. A commit costs nothing here while there are none."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Ordered, so that waiters wake in the order in which they came, also in a simulation.
        self._by_prefix: dict[bytes, dict[Watch, None]] = {}
        self._lengths: Counter[int] = Counter()
        self._listeners: tuple[OnCommit, ...] = ()
        self.count = 0  # Open watches and subscriptions. While it is 0, `notify` need not be called.

    def open(self, *prefixes: bytes, additions: bool = False) -> Watch:
        for prefix in prefixes:
            if prefix.__class__ is not bytes:
                raise InvalidKey(f"A watched prefix must be bytes, not {type(prefix).__name__}; encode it with kv.pack")
        watch = Watch(self, prefixes, additions=additions)
        with self._lock:
            if self.count >= limits.WATCHES_MAX:
                raise Busy(f"{limits.WATCHES_MAX} watches are open; close those that are no longer used")
            self.count += 1
            for prefix in prefixes:
                self._by_prefix.setdefault(prefix, {})[watch] = None
                self._lengths[len(prefix)] += 1
        return watch

    def remove(self, watch: Watch) -> None:
        with self._lock:
            if watch not in self._by_prefix.get(watch.prefixes[0], ()):
                return
            self.count -= 1
            for prefix in watch.prefixes:
                watches = self._by_prefix[prefix]
                watches.pop(watch, None)
                if not watches:
                    del self._by_prefix[prefix]
                self._lengths[len(prefix)] -= 1
                if not self._lengths[len(prefix)]:
                    del self._lengths[len(prefix)]

    def subscribe(self, on_commit: OnCommit) -> Callable[[], None]:
        """Call `on_commit` with what each commit may have changed. Returns a function that ends the subscription."""
        with self._lock:
            self._listeners += (on_commit,)
            self.count += 1

        def stop() -> None:
            with self._lock:
                if on_commit in self._listeners:
                    self._listeners = tuple(each for each in self._listeners if each is not on_commit)
                    self.count -= 1

        return stop

    def notify(self, keys: Collection[bytes], cleared: Collection[Range] = (), changed: Collection[Range] = ()) -> bool:
        """Fire the watches that these written keys, deleted ranges and otherwise changed ranges may affect.

        Where `keys` is a mapping, as the writes of a transaction, keys without a value are deleted.

        Returns whether it woke a coroutine on the event loop of this thread, which will most likely commit soon.
        """
        if not self.count:
            return False
        if self._listeners:
            self._notify_listeners(keys, (*cleared, *changed))
        if not self._lengths:
            return False
        with self._lock:
            # There are few distinct prefix lengths, so each key costs a few lookups, however many watches there are.
            hit = {
                prefix: None for key in keys for length in self._lengths if (prefix := key[:length]) in self._by_prefix
            }
            for begin, end in (*cleared, *changed):
                hit |= {prefix: None for prefix in self._by_prefix if _range_meets_prefix(prefix, begin, end)}
            fired = [
                watch
                for prefix in hit
                for watch in self._by_prefix[prefix]
                if not watch.additions or _is_added_to(watch.prefixes, keys, changed)
            ]
        woke_on_this_loop = [watch.fire() for watch in fired]
        return True in woke_on_this_loop

    def fire_all(self) -> None:
        """Fire every watch, for changes whose keys are unknown."""
        self._notify_listeners((), (_EVERYTHING,))
        with self._lock:
            fired = [watch for watches in self._by_prefix.values() for watch in watches]
        for watch in fired:
            watch.fire()

    def _notify_listeners(self, keys: Collection[bytes], cleared: Collection[Range]) -> None:
        for on_commit in self._listeners:
            try:
                on_commit(keys, cleared)
            except Exception:  # The commit has succeeded; a listener's error must not fail its caller.
                _log.exception("unexpected error in a commit listener; other listeners were notified")

    def close(self) -> None:
        """Close every watch."""
        with self._lock:
            opened = [watch for watches in self._by_prefix.values() for watch in watches]
        for watch in opened:
            watch.close()


def _range_meets_prefix(prefix: bytes, begin: bytes, end: bytes) -> bool:
    """Whether begin..end can contain a key that starts with `prefix`."""
    return begin[: len(prefix)] <= prefix < end


def _is_added_to(prefixes: tuple[bytes, ...], keys: Collection[bytes], changed: Collection[Range]) -> bool:
    """Whether a key that starts with one of `prefixes` is or may be written, and not only deleted."""
    values = keys if isinstance(keys, Mapping) else dict.fromkeys(keys, b"")
    return any(key.startswith(prefixes) and value is not None for key, value in values.items()) or any(
        _range_meets_prefix(prefix, begin, end) for begin, end in changed for prefix in prefixes
    )


def _wake(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)
