"""Clients that read, write and compare and swap a few keys, for every layer that has single values."""

from collections.abc import Callable
from functools import partial
from typing import Final

from fastness.kv import Transaction
from fastness.testing.histories import check_registers
from fastness.testing.simulation import Client, Simulation

KEYS: Final = ("x", "y", "z")


def add_register_clients(
    simulation: Simulation,
    *,
    read: Callable[[Transaction, str], str | None],
    write: Callable[[Transaction, str, str], None],
    swap: Callable[[Transaction, str, str | None, str], bool],
    steps: int,
) -> Callable[[], None]:
    """Add five clients with so many steps each; the check that their history is strictly serializable."""

    async def run_client(client: Client) -> None:
        for step in range(steps):
            key = client.random.choice(KEYS)
            value = f"{client.name}.{client.crashes}.{step}"
            choice = client.random.random()
            if choice < 0.4:
                await client.operate("read", key, None, read, key)
            elif choice < 0.7:
                await client.operate("write", key, value, write, key, value)
            else:
                seen = await client.operate("read", key, None, read, key)
                await client.operate("cas", key, (seen, value), swap, key, seen, value)

    for number in range(5):
        simulation.add(f"client-{number}", run_client)

    def check() -> None:
        for key in KEYS:  # The last acknowledged write must be visible at the end.
            simulation.history.record("auditor", "read", key, None, partial(simulation.database.read, read, key))
        check_registers(simulation.history)

    return check
