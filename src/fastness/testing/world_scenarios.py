"""A world in the simulator: clients enqueue items, drain them and append entries, with faults."""

from collections import Counter
from collections.abc import Callable
from typing import Final

import cbor2

from fastness.kv import Transaction
from fastness.layers import inboxes, journal_records, journals, snapshots
from fastness.layers.worlds import World
from fastness.testing.histories import Outcome, Violation
from fastness.testing.simulation import Client, Simulation
from fastness.wire.canonical import canonical
from fastness.wire.inboxes import DomainEvent

_ADA: Final = World("main", "ada")


def worlds(simulation: Simulation) -> Callable[[], None]:
    """Each item is in the journal once, in order; each append is at the height it returned, or nowhere."""
    simulation.database.transact(snapshots.create_world, _ADA)

    async def put(client: Client) -> None:
        for step in range(12):
            name = f"{client.name}.{client.crashes}.{step}"
            await client.operate("put", "ada", name, _put, name)

    async def drain(client: Client) -> None:
        for _ in range(12):
            await client.operate("drain", "ada", None, _drain, client.random.randrange(1, 5))
            await client.pause(client.random.randrange(500))

    async def append(client: Client) -> None:
        for step in range(12):
            name = f"{client.name}.{client.crashes}.{step}"
            head = await client.operate("head", "ada", None, _head)
            if head is not None:
                await client.operate("append", "ada", name, _append, name, head)

    for number in range(2):
        simulation.add(f"putter-{number}", put)
        simulation.add(f"drainer-{number}", drain)
        simulation.add(f"appender-{number}", append)
    return lambda: _check(simulation)


def _check(simulation: Simulation) -> None:
    while simulation.database.transact(_drain, 256):
        pass
    journal = simulation.database.read(journals.read_hot, _ADA, 0, 10_000)
    ingressed: list[tuple[int, str]] = []
    appended: dict[str, int] = {}
    for height, record in journal:
        kind, value = journal_records.split(record)
        if kind == "ingress":
            item = cbor2.loads(value)
            ingressed.append((item["seq"], item["schema"]))
        else:
            appended[cbor2.loads(value)] = height
    if [sequence for sequence, _ in ingressed] != list(range(len(ingressed))):
        raise Violation(f"Items are lost, duplicated or out of order: {[sequence for sequence, _ in ingressed]}", [])
    times = Counter(name for _, name in ingressed)
    for operation in simulation.history.operations:
        if operation.kind == "put":
            least = 1 if operation.outcome is Outcome.OK else 0
            most = 0 if operation.outcome is Outcome.FAILED else 1
            if not least <= times[operation.argument] <= most:
                raise Violation(
                    f"Item {operation.argument} is in the journal {times[operation.argument]} times", [operation]
                )
        elif operation.kind == "append":
            found = appended.get(operation.argument)
            if operation.outcome is Outcome.OK and found != operation.result:
                raise Violation(f"The entry is at {found}", [operation])
            if operation.outcome is Outcome.FAILED and found is not None:
                raise Violation(f"A failed append is at {found}", [operation])


def _put(tx: Transaction, name: str) -> int:
    return inboxes.enqueue(tx, _ADA, DomainEvent(schema=name))


def _drain(tx: Transaction, limit: int) -> list[int]:
    return inboxes.drain(tx, _ADA, limit=limit)


def _head(tx: Transaction) -> int:
    return journals.head(tx, _ADA)


def _append(tx: Transaction, name: str, expected_head: int) -> int:
    return journals.append(tx, _ADA, [journal_records.entry(canonical(name))], expected_head=expected_head)
