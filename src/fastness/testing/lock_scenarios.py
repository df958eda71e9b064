"""Ordered locks in the simulator: sessions wait in line, nest, pause, crash and are lost with their lease.

Holders count in two transactions, a read and a guarded write, which only the lock makes one. So besides the history,
the counts show whether two sessions held a row at once.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Final

from fastness.errors import FastnessError, LeaseExpired
from fastness.kv import Subspace, Transaction, Work
from fastness.layers import locks as lock_layer
from fastness.layers.lock_records import SessionKey, use_key
from fastness.layers.lock_transaction import Waiting
from fastness.testing.histories import Outcome, Violation
from fastness.testing.histories.locks import check_locks
from fastness.testing.simulation import Client, Simulation
from fastness.tiers import Tier
from fastness.wire.locks import GrantedLocks, LockProof, LockSession

Paths = list[tuple[str, str]]

_COUNTS: Final = Subspace("scenario", "locks")
_UNIVERSE: Final = "main"
_ROWS: Final = ("note/1", "note/2", "task/1")
_LEASE_MS: Final = 2_000
_ATTEMPTS_MAX: Final = 13  # With the last one, a claim that still waits ends.
_KINDS: Final = ("acquire", "guarded", "release")


def locks(simulation: Simulation) -> Callable[[], None]:
    """Modes exclude each other, lines are served, fences grow, and only a holder can write."""

    async def run_client(client: Client) -> None:
        for step in range(8):
            caller = _Caller(simulation, client, f"{client.name}-{client.crashes}-{step}")
            chance = client.random.random()
            if chance < 0.5:
                await caller.count_rows(client.random.sample(_ROWS, client.random.choice((1, 1, 2))))
            elif chance < 0.7:
                await caller.count_nested(*sorted(client.random.sample(_ROWS, 2)))
            else:
                path = client.random.choice((("entity_type", "note"), ("entity_type", "task"), ("database", "")))
                await caller.read_twice(path, client.random.choice(("S", "S", "X")))
            await client.pause(client.random.choice((0, 50, 400)))

    for number in range(6):
        simulation.add(f"client-{number}", run_client)
    return lambda: _check_locks(simulation)


class _Caller:
    """A session of a client."""

    def __init__(self, simulation: Simulation, client: Client, label: str) -> None:
        self.session = LockSession(f"session-{label}-0123456789", _UNIVERSE)
        self._label = label
        self._client = client
        self._random = client.random
        self._simulation = simulation
        self._history = simulation.history

    async def count_rows(self, rows: list[str]) -> None:
        """Count rows that were acquired together."""
        held = await self._acquire(self._label, [("record_id", row) for row in rows])
        if held is not None:
            for row in rows:
                await self._count(self._label, held, row)
            await self._release(self._label)

    async def count_nested(self, first: str, second: str) -> None:
        """Count a row while another one is held."""
        outer, inner = f"{self._label}-outer", f"{self._label}-inner"
        held = await self._acquire(outer, [("record_id", first)])
        if held is None:
            return
        await self._count(outer, held, first)
        also_held = await self._acquire(inner, [("record_id", second)], continues=True)
        if also_held is not None:
            await self._count(inner, also_held, second)
            await self._release(inner)
        await self._release(outer)

    async def read_twice(self, path: tuple[str, str], mode: str) -> None:
        """Read many rows in two transactions: while they are locked, nothing changes."""
        held = await self._acquire(self._label, [path], mode=mode)
        if held is None:
            return
        proof = self._proof(held, path)
        argument = [*path, proof.fence]
        first = await self._operate("guarded", self._label, argument, _read_guarded, proof)
        await self._linger()
        second = await self._operate("guarded", self._label, argument, _read_guarded, proof)
        if first is not None and second is not None and first != second:
            raise Violation(f"Rows changed from {first} to {second} while {self._label} held {path} in {mode}", [])
        await self._release(self._label)

    async def _acquire(
        self, claim: str, paths: Paths, *, mode: str = "X", continues: bool = False
    ) -> GrantedLocks | None:
        """The locks, after a wait if need be. The claim is released if it is not known whether it was granted."""
        argument = {"paths": [list(path) for path in paths], "mode": mode}
        operation = self._history.invoke(self.session.id, "acquire", claim, argument)
        for attempt in range(_ATTEMPTS_MAX):
            steps, continues = lock_layer.steps_of(paths, mode), continues or attempt > 0
            call = lock_layer.AcquireCall(self.session, claim, steps, claim, _LEASE_MS, continues)
            work = partial(lock_layer.acquire, call=call, may_wait=attempt < _ATTEMPTS_MAX - 1)
            try:
                outcome: GrantedLocks | Waiting = await self._client.transact(work)
            except FastnessError as error:
                self._history.unknown(operation)
                if not isinstance(error, LeaseExpired):
                    await self._operate("release", claim, None, lock_layer.release, self.session, claim)
                return None
            if isinstance(outcome, GrantedLocks):
                self._history.ok(operation, [[lock.level, lock.name, lock.fence] for lock in outcome.locks])
                return outcome
            if attempt and not outcome.holders and outcome.in_line == 1:
                raise Violation(f"{claim} waits for {outcome.key} behind nothing", [operation])
            wake_ms = outcome.wake_ms - self._simulation.clock.now_ms()
            await self._client.pause(max(0, min(wake_ms, self._random.choice((20, 200, 900)))))
        self._history.failed(operation)
        return None

    async def _count(self, claim: str, held: GrantedLocks, row: str) -> None:
        """Count a row in two transactions. Its holder sometimes pauses for so long that it is lost."""
        proof = self._proof(held, ("record_id", row))
        seen = await self._operate("read", claim, None, _read, row)
        if seen is not None:
            await self._linger()
            await self._operate("guarded", claim, ["record_id", row, proof.fence], _write, proof, row, seen + 1)

    async def _linger(self) -> None:
        if self._random.random() < 0.3:
            await self._operate("renew", self.session.id, None, _renew, self.session)
        await self._client.pause(self._random.choice((0, 10, 500, 1_500, 3_000)))

    async def _release(self, claim: str) -> None:
        if self._random.random() < 0.9:
            work = lock_layer.release
            await self._operate("release", claim, None, work, self.session, claim, tier=Tier.IMPORTANT)

    async def _operate(
        self, kind: str, key: str, argument: Any, work: Work[Any], *args: Any, tier: Tier = Tier.CRITICAL
    ) -> Any:
        """`Client.operate`, in the name of the session."""
        operation = self._history.invoke(self.session.id, kind, key, argument)
        try:
            result = await self._client.transact(work, *args, tier=tier)
        except FastnessError as error:
            self._history.raised(operation, error)
            return None
        self._history.ok(operation, result)
        return result

    def _proof(self, held: GrantedLocks, path: tuple[str, str]) -> LockProof:
        fence = next(lock.fence for lock in held.locks if (lock.level, lock.name) == path)
        return LockProof(self.session, *path, fence)


# Checks.


def _check_locks(simulation: Simulation) -> None:
    operations = simulation.history.operations
    check_locks(operation for operation in operations if operation.kind in _KINDS)
    for row in _ROWS:
        counts = simulation.database.read(_counts, row)
        if counts != list(range(1, len(counts) + 1)):
            raise Violation(f"{row} was counted {counts}: two sessions held it at once", [])
    stored = {(row, each) for row in _ROWS for each in simulation.database.read(_counts, row)}
    for operation in operations:
        is_count = operation.kind == "guarded" and operation.outcome is Outcome.OK and isinstance(operation.result, int)
        if is_count and (operation.argument[1], operation.result) not in stored:
            raise Violation("A count was acknowledged and is lost", [operation])
    _check_ends(simulation)


def _check_ends(simulation: Simulation) -> None:
    """Once all leases have ended, a new session gets everything at once, and leaves only fences."""
    simulation.clock.advance_ms(_LEASE_MS)
    database = simulation.database
    for number, _ in database.read(lock_layer.page, _UNIVERSE, after="", limit=10_000):
        database.transact(lock_layer.reap, SessionKey(_UNIVERSE, number))
    session = LockSession("the-last-session-of-all", _UNIVERSE)
    steps = lock_layer.steps_of([("database", "")], "X")
    call = lock_layer.AcquireCall(session, "last", steps, "last", _LEASE_MS)
    outcome = database.transact(lock_layer.acquire, call, may_wait=False)
    if isinstance(outcome, Waiting):
        raise Violation(f"{outcome} although all sessions have ended", [])
    database.transact(lock_layer.release, session, "last")
    left = database.read(_left)
    if left:
        raise Violation(f"{left} are left although all sessions have ended", [])


# Transaction functions.


def _renew(tx: Transaction, session: LockSession) -> int:
    return lock_layer.renew(tx, session, lease_ms=_LEASE_MS)


def _read(tx: Transaction, row: str) -> int:
    return len(_counts(tx, row))


def _read_guarded(tx: Transaction, proof: LockProof) -> list[int]:
    """The counts of the rows below a lock."""
    lock_layer.check(tx, proof)
    return [_read(tx, row) for row in _ROWS if row.startswith(proof.name)]


def _write(tx: Transaction, proof: LockProof, row: str, count: int) -> int:
    lock_layer.check(tx, proof)
    tx.put(_COUNTS.key(row, tx.new_id()), b"%d" % count)
    return count


def _counts(tx: Transaction, row: str) -> list[int]:
    """The counts of a row in the order of their commits."""
    return [int(value) for _, value in tx.scan(*_COUNTS.range(row), limit=10_000)]


def _left(tx: Transaction) -> list[bytes]:
    subspace = Subspace("u", _UNIVERSE, "locks")
    keys = [key for key, _ in tx.scan(*subspace.range(), limit=10_000) if key != use_key(_UNIVERSE)]
    return [key for key in keys if subspace.unpack(key)[-1] != "d-fence"]
