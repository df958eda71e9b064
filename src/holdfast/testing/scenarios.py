"""What the simulator plays: small fleets whose histories have a verdict.

Each scenario fills a Simulation with clients and returns the check of what they saw. A layer adds its own here.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

from rich.progress import Progress

from holdfast.backends.memory import MemoryDatabase
from holdfast.backends.rocksdb import RocksDatabase
from holdfast.errors import Busy
from holdfast.kv import Database, Subspace, Transaction
from holdfast.testing.histories import Outcome, Violation, check_all_fences, check_counter, check_registers
from holdfast.testing.lease_scenarios import entities, leases
from holdfast.testing.mail_scenarios import mail
from holdfast.testing.queue_scenarios import queues
from holdfast.testing.simulation import Client, Rates, Simulation
from holdfast.testing.world_scenarios import worlds
from holdfast.tiers import Tier

Check = Callable[[], None]
Scenario = Callable[[Simulation], Check]

_ROOM: Final = Subspace("scenario")
_KEYS: Final = ("x", "y", "z")


def registers(simulation: Simulation) -> Check:
    """Clients read, write and compare-and-swap a few keys: the history must be strictly serializable."""

    async def life(client: Client) -> None:
        for step in range(25):
            key = client.random.choice(_KEYS)
            value = f"{client.name}.{client.crashes}.{step}"
            choice = client.random.random()
            if choice < 0.4:
                await client.operate("read", key, None, _read, key)
            elif choice < 0.7:
                await client.operate("write", key, value, _write, key, value)
            else:
                seen = await client.operate("read", key, None, _read, key)
                await client.operate("cas", key, (seen, value), _swap, key, seen, value)

    for number in range(5):
        simulation.add(f"client-{number}", life)

    def check() -> None:
        for key in _KEYS:  # Whatever was acknowledged last must be there at the end.
            simulation.history.record("auditor", "read", key, None, partial(simulation.database.read, _read, key))
        check_registers(simulation.history)

    return check


def counters(simulation: Simulation) -> Check:
    """Clients increment shared counters: every acknowledged increment counts once, and none twice."""

    async def life(client: Client) -> None:
        for _ in range(25):
            key = client.random.choice(_KEYS)
            await client.operate("increment", key, 1, _increment, key)

    for number in range(6):
        simulation.add(f"client-{number}", life)

    def check() -> None:
        for key in _KEYS:
            final = simulation.database.read(_read, key)
            check_counter(simulation.history, key, final=int(final or 0))

    return check


def transfers(simulation: Simulation) -> Check:
    """Clients move money between accounts in one commit: whoever looks, the total never changes."""
    accounts = [f"account-{number}" for number in range(8)]
    simulation.database.transact(_open_accounts, accounts)

    async def life(client: Client) -> None:
        for _ in range(15):
            if client.random.random() < 0.6:
                giver, taker = client.random.sample(accounts, 2)
                amount = client.random.randrange(1, 50)
                await client.operate("transfer", "bank", [giver, taker, amount], _transfer, giver, taker, amount)
            else:
                await client.operate("total", "bank", None, _total, accounts)

    for number in range(5):
        simulation.add(f"client-{number}", life)

    def check() -> None:
        for operation in simulation.history.operations:
            if operation.kind == "total" and operation.outcome is Outcome.OK and operation.result != 800:
                raise Violation(f"The total was 800 and somebody saw {operation.result}", [operation])
        assert simulation.database.read(_total, accounts) == 800

    return check


def fences(simulation: Simulation) -> Check:
    """Clients take turns with a lock that expires; one that slept past its turn must not write with its old fence."""

    async def life(client: Client) -> None:
        for step in range(8):
            key = client.random.choice(_KEYS)
            fence = await client.operate("acquire", key, None, _acquire, key, client.name)
            if fence:
                await client.pause(client.random.choice((10, 500, 4_000)))
                value = f"{client.name}.{client.crashes}.{step}"
                await client.operate("guarded write", key, [fence, value], _guarded_write, key, fence, value)
            else:
                await client.pause(700)

    for number in range(5):
        simulation.add(f"client-{number}", life)

    def check() -> None:
        check_all_fences(simulation.history)
        for key in _KEYS:
            log = simulation.database.read(_read_all, ("log", key))
            written = [int(value.split(b":")[0]) for value in log]
            if written != sorted(written):
                raise Violation(f"A stale holder of {key!r} wrote after its successor: fences {written}", [])

    return check


def tiers(simulation: Simulation) -> Check:
    """IMPORTANT writes may be lost with the power, but never after a CRITICAL reader has seen them."""

    async def writer(client: Client) -> None:
        for _ in range(40):
            key = client.random.choice(_KEYS)
            await client.operate("raise", key, None, _increment, key, tier=Tier.IMPORTANT)

    async def reader(client: Client) -> None:
        for _ in range(40):
            key = client.random.choice(_KEYS)
            await client.operate("look", key, None, _read_number, key)

    for number in range(3):
        simulation.add(f"writer-{number}", writer)
        simulation.add(f"reader-{number}", reader)

    def check() -> None:
        for key in _KEYS:
            looks = [
                each
                for each in simulation.history.operations
                if each.kind == "look" and each.key == key and each.outcome is Outcome.OK
            ]
            for earlier in looks:
                for later in looks:
                    if earlier.returned < later.invoked and later.result < earlier.result:
                        raise Violation(f"{key!r} went back after it was seen", [earlier, later])

    return check


SCENARIOS: Final[dict[str, Scenario]] = {
    scenario.__name__: scenario
    for scenario in (registers, counters, transfers, fences, tiers, worlds, leases, entities, queues, mail)
}


def play(
    scenario: Scenario, seed: int, open_database: Callable[..., Database] = MemoryDatabase, rates: Rates | None = None
) -> Simulation:
    """Run one scenario with one seed, check it, and return it for a look.

    Raises:
        Violation: the history cannot be true; its message names the seed.
    """
    simulation = Simulation(seed, open_database, rates=rates)
    try:
        check = scenario(simulation)
        simulation.run()
        simulation.rates = Rates(0, 0, 0, 0, 0)
        check()
    except Violation as violation:
        again = f"python -m holdfast.testing.simulation --scenario {scenario.__name__} --seed {seed} --show"
        violation.add_note(f"seed {seed}; to see it again: {again}")
        raise
    finally:
        simulation.close()
    return simulation


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="holdfast.testing.simulation", description="Play scenarios from seeds.")
    parser.add_argument("--seeds", type=int, default=100, help="how many seeds to play (default 100)")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--seed", type=int, help="play only this one")
    parser.add_argument("--scenario", choices=sorted(SCENARIOS), help="play only this one (default: all)")
    parser.add_argument("--backend", choices=("memory", "rocksdb"), default="memory")
    parser.add_argument("--show", action="store_true", help="print the history")
    options = parser.parse_args(arguments)
    seeds = range(options.first, options.first + options.seeds) if options.seed is None else [options.seed]
    chosen = [SCENARIOS[options.scenario]] if options.scenario else list(SCENARIOS.values())
    moves = 0
    with Progress(transient=True) as progress:
        task = progress.add_task("seeds", total=len(seeds) * len(chosen))
        for seed in seeds:
            for scenario in chosen:
                try:
                    simulation = _play_on(options.backend, scenario, seed)
                except Violation as violation:
                    progress.stop()
                    sys.stdout.write(f"{violation}\n" + "\n".join(violation.__notes__) + "\n")
                    return 1
                moves += simulation.moves
                progress.advance(task)
                if options.show:
                    progress.console.print(simulation.history.render(10_000), highlight=False, markup=False)
    names = ", ".join(scenario.__name__ for scenario in chosen)
    sys.stdout.write(f"{len(seeds)} seeds of {names} on {options.backend}: {moves:,} moves, no violation\n")
    return 0


def _play_on(backend: str, scenario: Scenario, seed: int) -> Simulation:
    if backend == "memory":
        return play(scenario, seed)
    with tempfile.TemporaryDirectory() as folder:
        return play(scenario, seed, partial(RocksDatabase, Path(folder)))


# The works that clients run.


def _read(tx: Transaction, key: str) -> str | None:
    value = tx.get(_ROOM.key(key))
    return None if value is None else value.decode()


def _read_number(tx: Transaction, key: str) -> int:
    return int(tx.get(_ROOM.key(key)) or b"0")


def _read_all(tx: Transaction, path: tuple[Any, ...]) -> list[bytes]:
    return [value for _, value in tx.scan(*_ROOM.range(*path), limit=1_000)]


def _write(tx: Transaction, key: str, value: str) -> None:
    tx.put(_ROOM.key(key), value.encode())


def _swap(tx: Transaction, key: str, expected: str | None, value: str) -> bool:
    if _read(tx, key) != expected:
        return False
    _write(tx, key, value)
    return True


def _increment(tx: Transaction, key: str) -> int:
    number = _read_number(tx, key) + 1
    tx.put(_ROOM.key(key), b"%d" % number)
    return number


def _open_accounts(tx: Transaction, accounts: list[str]) -> None:
    for account in accounts:
        tx.put(_ROOM.key(account), b"100")


def _transfer(tx: Transaction, giver: str, taker: str, amount: int) -> None:
    tx.put(_ROOM.key(giver), b"%d" % (_read_number(tx, giver) - amount))
    tx.put(_ROOM.key(taker), b"%d" % (_read_number(tx, taker) + amount))


def _total(tx: Transaction, accounts: list[str]) -> int:
    return sum(_read_number(tx, account) for account in accounts)


def _acquire(tx: Transaction, key: str, owner: str) -> int:
    fence, expires_ms = _read_number(tx, f"fence {key}"), _read_number(tx, f"expiry {key}")
    if tx.now_ms < expires_ms:
        raise Busy(f"{key} is held; {owner} may try again at {expires_ms}")
    tx.put(_ROOM.key(f"fence {key}"), b"%d" % (fence + 1))
    tx.put(_ROOM.key(f"expiry {key}"), b"%d" % (tx.now_ms + 1_000))
    return fence + 1


def _guarded_write(tx: Transaction, key: str, fence: int, value: str) -> bool:
    if fence != _read_number(tx, f"fence {key}"):
        return False
    tx.put(_ROOM.key("log", key, tx.new_id()), f"{fence}:{value}".encode())
    return True
