"""Bursts of pushes, failing writers and killed processes: only unsynced pushes are lost, and no key is stored twice."""

import asyncio
import os
import signal
import subprocess
import threading
from base64 import urlsafe_b64encode
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from fastness import limits
from fastness.backends.memory import MemoryDatabase
from fastness.backends.objects import open_objects
from fastness.backends.rocksdb import RocksDatabase
from fastness.errors import Busy, FastnessError
from fastness.kv import Database
from fastness.layers import mailboxes
from fastness.layers.mailboxes import Address
from fastness.limits import INGRESS_QUEUE_MAX
from fastness.runtime.blobs import AsyncBlobStore
from fastness.runtime.ingress.ingress import Ingress
from fastness.testing.faults import FaultyDatabase, SeededFaults
from fastness.wire.ingress import NewPush, Pushed
from fastness.wire.mail import MailPolicy
from tests.support.depth import Depth
from tests.support.forked import start_python

RECIPIENTS = [Address("main", f"r{number}") for number in range(20)]
SENDER = Address("main", "ada")
SECONDS_MAX = 300.0


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the two-second limit of a commit: in these tests a slow commit means a busy machine."""
    monkeypatch.setattr(limits, "INGRESS_STORE_SECONDS", SECONDS_MAX)


def new(key: str, *, synced: bool = False) -> NewPush:
    return NewPush(
        topic="t",
        content_type="text/plain",
        payload_base64=urlsafe_b64encode(key.encode()).decode().rstrip("="),
        idempotency_key=key,
        durability="synced" if synced else "accepted",
    )


def ingress_on(database: Database) -> Ingress:
    return Ingress(
        database,
        AsyncBlobStore(database, open_objects("memory:")),
        pushes_per_minute=0,
    )


def recipient(key: str) -> Address:
    return RECIPIENTS[int(key) % len(RECIPIENTS)]


def stored(database: Database) -> Counter[str]:
    """The keys of all mail in the mailboxes, and how often each is stored."""
    found: Counter[str] = Counter()
    for each in RECIPIENTS:
        after = -1
        while mails := database.read(mailboxes.peek, each, after=after, limit=256):
            found.update(msgspec.json.decode(mail.body)["idempotency_key"] for mail in mails)
            after = mails[-1].sequence
    return found


@pytest.mark.parametrize("backend", ["memory", "rocksdb"])
async def test_a_burst_of_pushes_stores_every_key_once(backend: str, tmp_path: Path, depth: Depth) -> None:
    """Thousands of keys, each pushed twice concurrently by 500 senders, which retry after Busy."""
    count = round(10_000 * depth.load)
    database: Database = MemoryDatabase() if backend == "memory" else RocksDatabase(tmp_path / "kv")
    database.transact(mailboxes.set_policy, "main", MailPolicy(pending_max=1_000_000))
    ingress = ingress_on(database)
    answers: Counter[str] = Counter()
    firsts: Counter[str] = Counter()

    async def push(key: str) -> None:
        while True:
            try:
                pushed = await ingress.push(SENDER, recipient(key), new(key))
            except Busy:
                answers["busy"] += 1
                await asyncio.sleep(0.001)
            else:
                answers["deduped" if pushed.deduped else "accepted"] += 1
                firsts[key] += not pushed.deduped
                return

    async def sender(number: int) -> None:
        for key in range(number, count, 250):
            await push(str(key))
            await asyncio.sleep(0)

    async with asyncio.timeout(SECONDS_MAX):
        await asyncio.gather(*(sender(number % 250) for number in range(500)))
        await ingress.close()
    assert answers["accepted"] == answers["deduped"] == count
    assert set(firsts.values()) == {1}
    assert stored(database) == Counter(map(str, range(count)))
    assert not ingress.counters.lost
    database.close()


class Stuck:
    """A store that blocks until it is released."""

    def __init__(self) -> None:
        self.let_go = threading.Event()
        self.is_on = False

    def at(self, point: str) -> None:
        if self.is_on and point == "transact: begin":
            self.let_go.wait(SECONDS_MAX)


async def test_a_full_buffer_raises_busy_and_never_blocks() -> None:
    """Every push is answered and the event loop runs while the store is blocked."""
    stuck = Stuck()
    inner = MemoryDatabase()
    inner.transact(mailboxes.set_policy, "main", MailPolicy(pending_max=1_000_000))
    ingress = ingress_on(FaultyDatabase(inner, stuck))
    await ingress.start()
    stuck.is_on = True
    beats = 0

    async def beat() -> None:
        nonlocal beats
        while True:
            beats += 1
            await asyncio.sleep(0)

    async def push(key: int) -> str:
        try:
            await ingress.push(SENDER, recipient(str(key)), new(str(key)))
        except Busy as error:
            return error.code
        return "accepted"

    heart = asyncio.create_task(beat())
    answers = Counter(await asyncio.gather(*(push(key) for key in range(INGRESS_QUEUE_MAX * 2))))
    assert beats > 1
    # The batch of the writer has left the buffer. It may have been abandoned meanwhile on a slow machine.
    assert answers["accepted"] >= INGRESS_QUEUE_MAX
    assert answers["busy"] > 0
    assert answers["busy"] == ingress.counters.rejects["busy"]
    heart.cancel()
    stuck.let_go.set()
    await ingress.close()
    assert stored(inner).total() + ingress.counters.lost.total() == answers["accepted"]
    assert set(stored(inner).values()) == {1}
    inner.close()


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.rotating) for seed in (1, 2, 3))])
async def test_a_failing_writer_loses_only_unsynced_pushes(seed: int) -> None:
    """Every fifth commit fails and every fifth answer is lost. Synced pushes are stored, accepted ones are stored or
    counted as lost, and after retries everything is stored once."""
    inner = MemoryDatabase()
    inner.transact(mailboxes.set_policy, "main", MailPolicy(pending_max=1_000_000))
    ingress = ingress_on(FaultyDatabase(inner, SeededFaults(seed, refused=0.1, lost=0.2)))
    outcomes: dict[str, Pushed | FastnessError] = {}

    async def push(key: str, *, synced: bool) -> None:
        try:
            outcomes[key] = await ingress.push(SENDER, recipient(key), new(key, synced=synced))
        except Busy as error:
            outcomes[key] = error

    for begin in range(0, 3_000, 300):
        keys = range(begin, begin + 300)
        await asyncio.gather(*(push(str(key), synced=key % 3 == 0) for key in keys))
        await push(str(begin + 10_000), synced=True)  # When it is answered, everything before it is done.
    there = stored(inner)
    assert set(there.values()) == {1}
    failed = [key for key, outcome in outcomes.items() if isinstance(outcome, Busy)]
    synced = [
        key for key, outcome in outcomes.items() if isinstance(outcome, Pushed) and outcome.durability == "synced"
    ]
    accepted = [key for key in outcomes if key not in failed and key not in synced]
    assert failed
    assert all(there[key] for key in synced)
    missing = [key for key in accepted if not there[key]]
    assert missing
    # A lost answer counts as lost, although its commit succeeded.
    assert len(missing) <= ingress.counters.lost.total() <= len(accepted)

    async def insist(key: str) -> Pushed:
        while True:
            try:
                return await ingress.push(SENDER, recipient(key), new(key, synced=True))
            except Busy:
                continue

    for key in [*failed, *accepted]:
        assert (await insist(key)).durability == "synced"
    await ingress.close()
    assert stored(inner) == Counter(outcomes.keys())
    inner.close()


CHILD = """
import asyncio, sys
import fastness

async def main() -> None:
    plane = await fastness.open_async(sys.argv[1], ingress_pushes_per_minute=0)
    await plane.set_mail_policy(fastness.MailPolicy(pending_max=1_000_000))
    for number in range(1_000_000):
        to, key, synced = f"r{number % 20}", str(number), number % 100 == 99
        answer = await plane.ingress.push(to, "t", "hi", idempotency_key=key, synced=synced, sender="ada")
        sys.stdout.write(f"{number} {answer.durability}\\n")
        sys.stdout.flush()

asyncio.run(main())
"""


@pytest.mark.parametrize("lines", [150, 777])
async def test_a_killed_process_loses_only_pushes_not_stored_yet(tmp_path: Path, lines: int) -> None:
    """Synced pushes and those accepted before them are stored; a retry stores the missing ones, once."""
    url = f"dir:{tmp_path}"
    child = start_python(["-c", CHILD, url], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    acknowledged: list[tuple[str, str]] = []
    for line in child.stdout:
        key, durability = line.split()
        acknowledged.append((key, durability))
        if len(acknowledged) == lines:
            os.kill(child.pid, signal.SIGKILL)
            break
    child.wait()
    child.stdout.close()
    last_synced = max(int(key) for key, durability in acknowledged if durability == "synced")
    with RocksDatabase(tmp_path / "kv") as database:
        there = stored(database)
        assert set(there.values()) == {1}
        assert all(there[str(key)] for key in range(last_synced + 1))
        ingress = ingress_on(database)
        for key, _ in acknowledged:
            await ingress.push(SENDER, recipient(key), new(key))
        await ingress.close()
        there = stored(database)
        assert set(there.values()) == {1}
        assert all(there[key] for key, _ in acknowledged)
