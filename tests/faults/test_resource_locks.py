"""Locks are split by resource: unrelated resources never wait for each other, and several never deadlock.

The locks protect plain integers that are read and written in two steps, so that a missing lock shows as a lost update.
"""

import asyncio
import random
import sys
import threading
import time
from base64 import urlsafe_b64encode
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast import limits
from holdfast.errors import LockOrderViolation, LockTimeout
from holdfast.layers import agents, mailboxes
from holdfast.layers.mailboxes import Address
from holdfast.plane.open import Options, open_plane_async
from holdfast.runtime.locks.table import RESOURCE_LEVELS, LockTable
from holdfast.wire.ingress import NewPush
from holdfast.wire.mail import MailPolicy, NewMail

SECONDS_MAX = 60.0
THREADS = 24
ROUNDS = 150
RESOURCES = [(level, agent) for level in RESOURCE_LEVELS for agent in ("ada", "bob")]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the two-second limit of a commit: in these tests a slow commit means a busy machine."""
    monkeypatch.setattr(limits, "INGRESS_STORE_SECONDS", SECONDS_MAX)


@pytest.fixture(autouse=True)
def threads_take_turns_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.fixture
def table() -> LockTable:
    return LockTable(RESOURCE_LEVELS, nested=False)


def on_threads(works: list[Callable[[], None]]) -> None:
    """Run every function in its own thread; raise the first error, or that a thread did not end."""
    errors: list[BaseException] = []

    def run(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + SECONDS_MAX
    for thread in threads:
        thread.join(max(deadline - time.monotonic(), 0))
    assert not any(thread.is_alive() for thread in threads), "a thread did not end"
    if errors:
        raise errors[0]


def test_all_resources_can_be_held_by_different_threads(table: LockTable) -> None:
    """With a single lock only the first thread would reach the barrier."""
    barrier = threading.Barrier(len(RESOURCES), timeout=SECONDS_MAX)

    def hold(resource: tuple[str, str]) -> None:
        with table.acquire(resource, timeout_seconds=0):
            barrier.wait()

    on_threads([lambda resource=resource: hold(resource) for resource in RESOURCES])  # type: ignore[misc]
    stats = table.stats()
    assert all(each.waits == 0 for each in stats.values())


def test_a_resource_has_one_holder_and_does_not_block_other_resources(table: LockTable) -> None:
    counts: Counter[tuple[str, str]] = Counter()

    def change(resource: tuple[str, str]) -> None:
        for _ in range(ROUNDS):
            with table.acquire(resource, timeout_seconds=SECONDS_MAX):
                before = counts[resource]
                time.sleep(0)
                counts[resource] = before + 1

    wanted = [("inbox", "ada"), ("outbox", "ada"), ("contacts", "ada")]
    on_threads([lambda resource=resource: change(resource) for resource in wanted * 8])  # type: ignore[misc]
    assert counts == Counter(dict.fromkeys(wanted, 8 * ROUNDS))
    stats = table.stats()
    assert {level for level, each in stats.items() if each.waits} <= {"inbox", "outbox", "contacts"}


def test_operations_on_several_resources_lose_nothing_and_never_deadlock(table: LockTable) -> None:
    """Paths are given in any order and acquired in lock order."""
    counts: Counter[tuple[str, str]] = Counter()
    wanted: Counter[tuple[str, str]] = Counter()

    def move(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(ROUNDS):
            several = chance.sample(RESOURCES, chance.randint(1, 4))
            with table.acquire_all(several, timeout_seconds=SECONDS_MAX):
                before = [counts[each] for each in several]
                time.sleep(0)
                for each, count in zip(several, before, strict=True):
                    counts[each] = count + 1

    for seed in range(THREADS):
        chance = random.Random(seed)
        for _ in range(ROUNDS):
            wanted.update(chance.sample(RESOURCES, chance.randint(1, 4)))
    on_threads([lambda seed=seed: move(seed) for seed in range(THREADS)])  # type: ignore[misc]
    assert counts == wanted
    assert table.holders() == []


def test_acquiring_resources_against_the_lock_order_is_rejected(table: LockTable) -> None:
    for index, later in enumerate(RESOURCE_LEVELS):
        for earlier in RESOURCE_LEVELS[:index]:
            with table.acquire((later, "ada")), pytest.raises(LockOrderViolation):
                table.acquire((earlier, "ada"))
    with table.acquire_all([(level, "ada") for level in reversed(RESOURCE_LEVELS)]):
        assert [holder.path[0] for holder in table.holders()] == list(RESOURCE_LEVELS)


def test_a_wait_for_a_resource_is_bounded(table: LockTable) -> None:
    with table.acquire(("inbox", "ada")):

        def impatient() -> None:
            with pytest.raises(LockTimeout):
                table.acquire_all([("outbox", "bob"), ("inbox", "ada")], timeout_seconds=0.01)

        on_threads([impatient])
    assert table.holders() == []


async def test_pushes_run_beside_threads_that_lock_inboxes_outboxes_and_contacts(tmp_path: Path) -> None:
    """The ingress locks dedupe, inboxes and outboxes; other threads lock at random; everything is stored."""
    transport = await open_plane_async(f"dir:{tmp_path}", Options(pushes_per_minute=0))
    database, resources = transport.services.database, transport.services.resources
    database.transact(mailboxes.set_policy, "main", MailPolicy(pending_max=100_000))
    names = ["ada", "bob", "eve"]
    stop = threading.Event()
    did: Counter[str] = Counter()

    def send(name: str) -> None:
        me, you = Address("main", name), Address("main", names[names.index(name) - 1])
        with resources.acquire_all([("outbox", str(me)), ("inbox", str(you))], timeout_seconds=SECONDS_MAX):
            database.transact(mailboxes.send, me, you, NewMail("", b"mail"))

    def register(name: str) -> None:
        with resources.acquire(("contacts", f"{name}@main"), timeout_seconds=SECONDS_MAX):
            database.transact(agents.register, "main", name)

    def repeat(deed: Callable[[str], None], name: str) -> None:
        while not stop.is_set():
            deed(name)
            did[f"{deed.__name__} {name}"] += 1

    works = [(deed, name) for deed in (send, register) for name in names]
    threads = [threading.Thread(target=repeat, args=work, daemon=True) for work in works]
    for thread in threads:
        thread.start()
    try:
        payload = urlsafe_b64encode(b"pushed").decode().rstrip("=")
        for number in range(600):
            new = NewPush(
                topic="t",
                content_type="text/plain",
                payload_base64=payload,
                idempotency_key=str(number),
                durability="synced" if number % 50 == 49 else "accepted",
            )
            await transport.ingress.push(Address("main", "zoe"), Address("main", names[number % 3]), new)
        await transport.ingress.close()
        async with asyncio.timeout(SECONDS_MAX):
            while not all(did[f"{deed.__name__} {name}"] for deed, name in works):
                await asyncio.sleep(0.001)
    finally:
        stop.set()
        for thread in threads:
            thread.join(SECONDS_MAX)
    assert not any(thread.is_alive() for thread in threads)
    for name in names:
        sent = did[f"send {names[(names.index(name) + 1) % 3]}"]
        assert database.read(mailboxes.summary, Address("main", name)).box.count == 200 + sent
    assert not transport.ingress.counters.lost
    assert resources.holders() == []
    await transport.close()
