"""Workloads of the checks: an empty subspace, small transaction functions, and threads."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from fastness.kv import Database, Pair, Subspace, Transaction


def clear_subspace(database: Database) -> Subspace:
    """An empty subspace for a check."""
    subspace = Subspace("conformance")
    database.transact(lambda tx: tx.delete_range(subspace.prefix, subspace.prefix + b"\xff" * 8))
    return subspace


def contents(database: Database, subspace: Subspace) -> dict[tuple[Any, ...], bytes]:
    return {
        subspace.unpack(key): value for key, value in database.read(lambda tx: tx.scan(*subspace.range(), limit=10_000))
    }


def get(tx: Transaction, key: bytes) -> bytes | None:
    return tx.get(key)


def put(tx: Transaction, key: bytes, value: bytes) -> None:
    tx.put(key, value)


def put_all(tx: Transaction, pairs: list[Pair]) -> None:
    for key, value in pairs:
        tx.put(key, value)


def increment(tx: Transaction, key: bytes) -> int:
    number = int(tx.get(key) or b"0") + 1
    tx.put(key, b"%d" % number)
    return number


def run_async(call: Callable[..., Coroutine[Any, Any, Any]], *args: Any) -> None:
    async def calling() -> None:
        await call(*args)

    asyncio.run(calling())


def raises(error: type[BaseException], call: Callable[[], Any]) -> None:
    try:
        call()
    except error:
        return
    raise AssertionError(f"{error.__name__} was not raised")


def in_thread(call: Callable[[], Any]) -> None:
    in_threads(1, lambda _: call())


def in_threads(count: int, call: Callable[[int], Any]) -> None:
    """Run `call(number)` on `count` threads at once and raise what any of them raised."""
    failures: list[BaseException] = []

    def run(number: int) -> None:
        try:
            call(number)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
