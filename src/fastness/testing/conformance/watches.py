"""Watches wake on changes, and subscribers receive every commit."""

import asyncio
import threading
from collections.abc import Callable, Collection

from fastness.errors import (
    Closed,
    InvalidKey,
)
from fastness.kv import Database, Transaction
from fastness.testing.conformance.workloads import clear_subspace, put, raises


def check_a_watch_wakes_on_writes_below_its_prefix(database: Database) -> None:
    subspace = clear_subspace(database)
    changes: list[Callable[[Transaction], None]] = [
        lambda tx: tx.put(subspace.key("a", 1), b""),
        lambda tx: tx.delete(subspace.key("a", 1)),
        lambda tx: tx.delete_range(*subspace.range("a")),
        lambda tx: tx.delete_range(*subspace.range()),
    ]
    with database.watch(subspace.key("a")) as watch:
        while watch.wait(0):  # Hints may be spurious; consume them.
            pass
        for change in changes:
            database.transact(change)
            assert watch.wait(60)


def check_a_watch_for_additions_wakes_on_written_keys(database: Database) -> None:
    subspace = clear_subspace(database)
    with database.watch(subspace.key("a"), subspace.key("b"), additions=True) as watch:
        for name in ("a", "b"):
            while watch.wait(0):
                pass
            database.transact(put, subspace.key(name, 1), b"")
            assert watch.wait(60)


def check_a_watch_keeps_a_hint_that_came_before_the_wait(database: Database) -> None:
    subspace = clear_subspace(database)
    with database.watch(subspace.key("a")) as watch:
        database.transact(put, subspace.key("a", 1), b"")
        assert watch.wait(60)


def check_a_watch_wakes_threads_and_event_loops(database: Database) -> None:
    subspace = clear_subspace(database)
    with database.watch(subspace.key("a")) as watch:
        while watch.wait(0):
            pass
        write = threading.Thread(target=database.transact, args=(put, subspace.key("a", 1), b""))
        write.start()
        assert watch.wait(60)
        write.join()

        async def on_a_loop() -> bool:
            writing = asyncio.ensure_future(database.transact_async(put, subspace.key("a", 2), b""))
            woken = await watch.wait_async(10)
            await writing
            return woken

        while watch.wait(0):
            pass
        assert asyncio.run(on_a_loop())
        while watch.wait(0):
            pass
        assert asyncio.run(watch.wait_async(0)) is False


def check_a_closed_watch_raises_closed(database: Database) -> None:
    watch = database.watch(b"a")
    watch.close()
    watch.close()
    raises(Closed, lambda: watch.wait(0))
    raises(Closed, lambda: asyncio.run(watch.wait_async(0)))
    raises(InvalidKey, lambda: database.watch("text"))  # type: ignore[arg-type]


def check_a_subscriber_receives_the_keys_of_every_commit(database: Database) -> None:
    subspace = clear_subspace(database)
    keys_seen: set[bytes] = set()
    cleared: list[tuple[bytes, bytes]] = []

    def on_commit(keys: Collection[bytes], ranges: Collection[tuple[bytes, bytes]]) -> None:
        keys_seen.update(keys)
        cleared.extend(ranges)

    stop = database.subscribe(on_commit)
    database.transact(put, subspace.key("a", 1), b"")
    database.transact(lambda tx: tx.delete(subspace.key("a", 2)))
    assert {subspace.key("a", 1), subspace.key("a", 2)} <= keys_seen
    begin, end = subspace.range("b")
    database.transact(lambda tx: tx.delete_range(begin, end))
    assert any(first <= begin and end <= past for first, past in cleared)
    stop()
    stop()
    database.transact(put, subspace.key("a", 3), b"")
    assert subspace.key("a", 3) not in keys_seen
