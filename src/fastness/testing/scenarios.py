"""The simulator's scenarios, and the command that runs them.

    python -m fastness.testing.scenarios --seeds 1000         every scenario with a thousand seeds
    python -m fastness.testing.scenarios --seed 17 --show     one seed (that failed, for example), and its history

Each scenario adds clients to a Simulation and returns a check of the resulting history.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

from rich.progress import Progress

from fastness.backends.memory import MemoryDatabase
from fastness.backends.rocksdb import RocksDatabase
from fastness.errors import Busy
from fastness.kv import Database, Subspace, Transaction
from fastness.testing.collection_scenarios import collections
from fastness.testing.effect_scenarios import effects
from fastness.testing.histories import Outcome, Violation, check_all_fences, check_counter
from fastness.testing.host_scenarios import hosts, releases
from fastness.testing.job_scenarios import jobs
from fastness.testing.lease_scenarios import entities, leases
from fastness.testing.lock_scenarios import locks
from fastness.testing.mail_scenarios import mail
from fastness.testing.queue_scenarios import queues
from fastness.testing.register_clients import KEYS, add_register_clients
from fastness.testing.simulation import Client, Rates, Simulation
from fastness.testing.world_scenarios import worlds
from fastness.tiers import Tier

Check = Callable[[], None]
Scenario = Callable[[Simulation], Check]

_SUBSPACE: Final = Subspace("scenario")


def registers(simulation: Simulation) -> Check:
    """Clients read, write and compare-and-swap a few keys: the history must be strictly serializable."""
    return add_register_clients(simulation, read=_read, write=_write, swap=_swap, steps=25)


def counters(simulation: Simulation) -> Check:
    """Clients increment shared counters: every acknowledged increment counts exactly once."""

    async def run_client(client: Client) -> None:
        for _ in range(25):
            key = client.random.choice(KEYS)
            await client.operate("increment", key, 1, _increment, key)

    for number in range(6):
        simulation.add(f"client-{number}", run_client)

    def check() -> None:
        for key in KEYS:
            final = simulation.database.read(_read, key)
            check_counter(simulation.history, key, final=int(final or 0))

    return check


def transfers(simulation: Simulation) -> Check:
    """Clients move money between accounts in one commit: every reader sees the same total."""
    accounts = [f"account-{number}" for number in range(8)]
    simulation.database.transact(_open_accounts, accounts)

    async def run_client(client: Client) -> None:
        for _ in range(15):
            if client.random.random() < 0.6:
                source, target = client.random.sample(accounts, 2)
                amount = client.random.randrange(1, 50)
                await client.operate("transfer", "bank", [source, target, amount], _transfer, source, target, amount)
            else:
                await client.operate("total", "bank", None, _total, accounts)

    for number in range(5):
        simulation.add(f"client-{number}", run_client)

    def check() -> None:
        for operation in simulation.history.operations:
            if operation.kind == "total" and operation.outcome is Outcome.OK and operation.result != 800:
                raise Violation(f"The total is 800, and a client read {operation.result}", [operation])
        assert simulation.database.read(_total, accounts) == 800

    return check


def fences(simulation: Simulation) -> Check:
    """Clients share a lock that expires. A client that slept past its expiry must not write with its old fence."""

    async def run_client(client: Client) -> None:
        for step in range(8):
            key = client.random.choice(KEYS)
            fence = await client.operate("acquire", key, None, _acquire, key, client.name)
            if fence:
                await client.pause(client.random.choice((10, 500, 4_000)))
                value = f"{client.name}.{client.crashes}.{step}"
                await client.operate("guarded write", key, [fence, value], _guarded_write, key, fence, value)
            else:
                await client.pause(700)

    for number in range(5):
        simulation.add(f"client-{number}", run_client)

    def check() -> None:
        check_all_fences(simulation.history)
        for key in KEYS:
            log = simulation.database.read(_read_all, ("log", key))
            written = [int(value.split(b":")[0]) for value in log]
            if written != sorted(written):
                raise Violation(f"A stale holder of {key!r} wrote after its successor: fences {written}", [])

    return check


def tiers(simulation: Simulation) -> Check:
    """A power loss may revert IMPORTANT writes, but never after a CRITICAL read has returned them."""

    async def writer(client: Client) -> None:
        for _ in range(40):
            key = client.random.choice(KEYS)
            await client.operate("increment", key, None, _increment, key, tier=Tier.IMPORTANT)

    async def reader(client: Client) -> None:
        for _ in range(40):
            key = client.random.choice(KEYS)
            await client.operate("read", key, None, _read_number, key)

    for number in range(3):
        simulation.add(f"writer-{number}", writer)
        simulation.add(f"reader-{number}", reader)

    def check() -> None:
        for key in KEYS:
            reads = [
                each
                for each in simulation.history.operations
                if each.kind == "read" and each.key == key and each.outcome is Outcome.OK
            ]
            for earlier in reads:
                for later in reads:
                    if earlier.returned < later.invoked and later.result < earlier.result:
                        raise Violation(f"{key!r} went back after it was read", [earlier, later])

    return check


SCENARIOS: Final[dict[str, Scenario]] = {
    scenario.__name__: scenario
    for scenario in (
        registers,
        counters,
        transfers,
        fences,
        tiers,
        worlds,
        effects,
        leases,
        entities,
        collections,
        locks,
        queues,
        jobs,
        mail,
        hosts,
        releases,
    )
}


def play(
    scenario: Scenario, seed: int, open_database: Callable[..., Database] = MemoryDatabase, rates: Rates | None = None
) -> Simulation:
    """Run one scenario with one seed, check it, and return the simulation.

    Raises:
        Violation: the history is not possible in a correct system. A note names the seed.
    """
    simulation = Simulation(seed, open_database, rates=rates)
    try:
        check = scenario(simulation)
        simulation.run()
        simulation.rates = Rates(0, 0, 0, 0, 0)
        check()
    except Violation as violation:
        command = f"python -m fastness.testing.scenarios --scenario {scenario.__name__} --seed {seed} --show"
        violation.add_note(f"seed {seed}; to repeat it: {command}")
        raise
    finally:
        simulation.close()
    return simulation


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="fastness.testing.scenarios", description="Run simulation scenarios with random seeds."
    )
    parser.add_argument("--seeds", type=int, default=100, help="the number of seeds (default 100)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default 0)")
    parser.add_argument("--seed", type=int, help="run only this seed")
    parser.add_argument("--scenario", choices=sorted(SCENARIOS), help="run only this scenario (default: all)")
    parser.add_argument("--backend", choices=("memory", "rocksdb"), default="memory")
    parser.add_argument("--show", action="store_true", help="print the history of each run")
    options = parser.parse_args(arguments)
    seeds = range(options.first, options.first + options.seeds) if options.seed is None else [options.seed]
    chosen = [SCENARIOS[options.scenario]] if options.scenario else list(SCENARIOS.values())
    steps = 0
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
                steps += simulation.steps
                progress.advance(task)
                if options.show:
                    progress.console.print(simulation.history.render(10_000), highlight=False, markup=False)
    names = ", ".join(scenario.__name__ for scenario in chosen)
    sys.stdout.write(f"{len(seeds)} seeds of {names} on {options.backend}: {steps:,} steps, no violation\n")
    return 0


def _play_on(backend: str, scenario: Scenario, seed: int) -> Simulation:
    if backend == "memory":
        return play(scenario, seed)
    with tempfile.TemporaryDirectory() as folder:
        return play(scenario, seed, partial(RocksDatabase, Path(folder)))


# Transaction functions.


def _read(tx: Transaction, key: str) -> str | None:
    value = tx.get(_SUBSPACE.key(key))
    return None if value is None else value.decode()


def _read_number(tx: Transaction, key: str) -> int:
    return int(tx.get(_SUBSPACE.key(key)) or b"0")


def _read_all(tx: Transaction, path: tuple[Any, ...]) -> list[bytes]:
    return [value for _, value in tx.scan(*_SUBSPACE.range(*path), limit=1_000)]


def _write(tx: Transaction, key: str, value: str) -> None:
    tx.put(_SUBSPACE.key(key), value.encode())


def _swap(tx: Transaction, key: str, expected: str | None, value: str) -> bool:
    if _read(tx, key) != expected:
        return False
    _write(tx, key, value)
    return True


def _increment(tx: Transaction, key: str) -> int:
    number = _read_number(tx, key) + 1
    tx.put(_SUBSPACE.key(key), b"%d" % number)
    return number


def _open_accounts(tx: Transaction, accounts: list[str]) -> None:
    for account in accounts:
        tx.put(_SUBSPACE.key(account), b"100")


def _transfer(tx: Transaction, source: str, target: str, amount: int) -> None:
    tx.put(_SUBSPACE.key(source), b"%d" % (_read_number(tx, source) - amount))
    tx.put(_SUBSPACE.key(target), b"%d" % (_read_number(tx, target) + amount))


def _total(tx: Transaction, accounts: list[str]) -> int:
    return sum(_read_number(tx, account) for account in accounts)


def _acquire(tx: Transaction, key: str, owner: str) -> int:
    fence, expires_ms = _read_number(tx, f"fence {key}"), _read_number(tx, f"expiry {key}")
    if tx.now_ms < expires_ms:
        raise Busy(f"{key} is held; {owner} may try again at {expires_ms}")
    tx.put(_SUBSPACE.key(f"fence {key}"), b"%d" % (fence + 1))
    tx.put(_SUBSPACE.key(f"expiry {key}"), b"%d" % (tx.now_ms + 1_000))
    return fence + 1


def _guarded_write(tx: Transaction, key: str, fence: int, value: str) -> bool:
    if fence != _read_number(tx, f"fence {key}"):
        return False
    tx.put(_SUBSPACE.key("log", key, tx.new_id()), f"{fence}:{value}".encode())
    return True


if __name__ == "__main__":
    raise SystemExit(main())
