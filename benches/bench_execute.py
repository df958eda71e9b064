"""What the path costs: a request struct executed through a port, over the same layer function called bare."""

import asyncio

from benches.bench_rocksdb import on_loop, repeat
from benches.contest import race, say
from holdfast.backends.memory import MemoryDatabase
from holdfast.handles import AsyncPlane, Plane
from holdfast.kv import Transaction
from holdfast.plane.embedded import AsyncEmbeddedTransport, EmbeddedTransport
from holdfast.plane.services import Services


def put(tx: Transaction, key: bytes, value: bytes) -> None:
    tx.put(key, value)


def main() -> None:
    database = MemoryDatabase()
    plane = Plane(EmbeddedTransport(Services(database)))
    async_plane = AsyncPlane(AsyncEmbeddedTransport(Services(database)))

    async def bare_async() -> None:
        await database.transact_async(put, b"key", b"value")

    async def handle_async() -> None:
        await async_plane.pairs.put(b"key", b"value")

    rates = race(
        "A put on the key space in memory",
        {
            "transact(layer function)": lambda: repeat(lambda: database.transact(put, b"key", b"value"), 20_000),
            "handle, struct, port, execute": lambda: repeat(lambda: plane.pairs.put(b"key", b"value"), 20_000),
            "transact_async(layer function)": lambda: on_loop(bare_async, 1, 20_000),
            "async handle, struct, port, execute": lambda: on_loop(handle_async, 1, 20_000),
        },
    )
    each = [1e6 / rate for rate in rates.values()]
    say(f"The path costs {each[1] - each[0]:.2f} µs, on an event loop {each[3] - each[2]:.2f} µs (goal: under 5 µs).")
    asyncio.run(async_plane.close())


if __name__ == "__main__":
    main()
