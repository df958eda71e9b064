"""Mailboxes, as functions over a transaction, on every backend."""

from collections.abc import Callable, Collection, Iterable
from importlib import import_module
from typing import Any

import msgspec
import pytest

from holdfast.errors import (
    BatchTooLarge,
    HoldfastError,
    InvalidArgument,
    MailboxFull,
    MailboxTaken,
    PayloadTooLarge,
    SenderBlocked,
    WorldNotActive,
)
from holdfast.kv import Database, Transaction
from holdfast.layers import agents, inboxes, journal_records, journals, mailboxes, worlds
from holdfast.layers.mailboxes import Address, Box, expiry, sending
from holdfast.layers.mailboxes import keys as mailbox_keys
from holdfast.layers.worlds import World, WorldState
from holdfast.testing.clock import START_MS, ManualClock
from holdfast.wire.inboxes import Delivery
from holdfast.wire.mail import Envelope, MailPolicy, MailReceipt, NewMail

ADA, BOB, EVE = (Address("main", agent) for agent in ("ada", "bob", "eve"))
DAY_MS = 86_400_000
TTL_MS = 7 * DAY_MS
SLOT_MS = 300_000  # Whatever ends within five minutes is swept when they are over.


def send(database: Database, body: bytes = b"x", *, sender: Address = ADA, to: Address = BOB, **options: Any) -> str:
    return database.transact(mailboxes.send, sender, to, NewMail(str(to), body, **options))[0]


def send_again(database: Database, id: str, *, sender: Address = ADA, to: Address = BOB) -> bool:
    """Whether it was there already."""
    return database.transact(mailboxes.send, sender, to, NewMail(str(to), b"again", id))[1]


def send_some(database: Database, count: int, **options: Any) -> None:
    """As one commit, which is faster."""

    def work(tx: Transaction) -> None:
        for number in range(count):
            mailboxes.send(tx, ADA, BOB, NewMail(str(BOB), b"%d" % number, **options))

    database.transact(work)


def deliver(database: Database, of: Address = BOB, **options: Any) -> tuple[list[Envelope], int | None]:
    return database.transact(mailboxes.deliver, of, **{"after": -1, "limit": 256, **options})


def bodies(database: Database, of: Address = BOB, **options: Any) -> list[bytes]:
    return [mail.body for mail in deliver(database, of, **options)[0]]


def peek(database: Database, of: Address = BOB, **options: Any) -> list[Envelope]:
    return database.read(mailboxes.peek, of, **{"after": -1, "limit": 256, **options})


def confirm(database: Database, *ids: str, of: Address = BOB) -> int:
    return database.transact(mailboxes.confirm, of, ids)


def join(database: Database, session: str, of: Address = BOB) -> tuple[int, int]:
    return database.transact(mailboxes.join, of, session)


def leave(database: Database, session: str, of: Address = BOB) -> None:
    database.transact(mailboxes.leave, of, session)


def told(database: Database, of: Address = ADA, **options: Any) -> list[MailReceipt]:
    return database.read(mailboxes.receipts, of, **{"after": -1, "limit": 1_000, **options})


def states(database: Database, of: Address = ADA, **options: Any) -> list[tuple[str, str]]:
    return [(receipt.id, receipt.state) for receipt in told(database, of, **options)]


def was_stored(database: Database, of: Address = ADA) -> dict[str, bool]:
    return {receipt.id: receipt.was_stored for receipt in told(database, of) if receipt.state == "confirmed"}


def count(database: Database, of: Address = BOB) -> int:
    return database.read(mailboxes.count, of)[0].count


def set_policy(database: Database, **options: Any) -> None:
    database.transact(mailboxes.set_policy, "main", MailPolicy(**options))


def block(database: Database, sender: Address, *, of: Address = BOB, blocked: bool = True) -> None:
    database.transact(mailboxes.block, of, sender, blocked=blocked)


def sweep(database: Database, universe: str = "main") -> tuple[dict[str, int], bool]:
    return database.transact(mailboxes.sweep, universe)


def sweep_all(database: Database) -> dict[str, int]:
    counts: dict[str, int] = {}
    for _ in range(10_000):
        found, more = sweep(database)
        for agent, number in found.items():
            counts[agent] = counts.get(agent, 0) + number
        if not more:
            return counts
    raise AssertionError("it never ends")


def everything(database: Database) -> list[tuple[bytes, bytes]]:
    return database.read(lambda tx: tx.scan(b"", b"\xff" * 8, limit=10_000))


def left(database: Database, *addresses: Address) -> list[bytes]:
    """The keys of the whole key space but those that a room keeps for ever: what is known of it, and its policy."""
    kept = {key for each in addresses for key in (mailbox_keys.keys_of(each).box, mailbox_keys.keys_of(each).outgoing)}
    return [key for key, _ in everything(database) if key not in kept and b"mail-policy" not in key]


class Touches:
    """A transaction that notes which keys it gives out or takes, and how often it scans."""

    def __init__(self, tx: Transaction) -> None:
        self._tx = tx
        self.keys: set[bytes] = set()
        self.scans = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tx, name)

    def get(self, key: bytes) -> bytes | None:
        self.keys.add(key)
        return self._tx.get(key)

    def put(self, key: bytes, value: bytes) -> None:
        self.keys.add(key)
        self._tx.put(key, value)

    def delete(self, key: bytes) -> None:
        self.keys.add(key)
        self._tx.delete(key)

    def scan(self, begin: bytes, end: bytes, **options: Any) -> list[tuple[bytes, bytes]]:
        found = self._tx.scan(begin, end, **options)
        self.scans += 1
        self.keys |= {key for key, _ in found}
        return found


def touches(database: Database, work: Callable[..., Any], *args: Any, **options: Any) -> Touches:
    def watched(tx: Transaction) -> Touches:
        seen = Touches(tx)
        work(seen, *args, **options)
        return seen

    return database.transact(watched)


# Order.


def test_mail_comes_in_the_order_in_which_it_was_stored_whoever_sent_it(database: Database) -> None:
    for number in range(12):
        send(database, b"%d" % number, sender=(ADA, EVE, BOB)[number % 3])
    found, _ = deliver(database)
    assert [mail.body for mail in found] == [b"%d" % number for number in range(12)]
    assert [mail.sequence for mail in found] == list(range(12))
    assert [mail.sender for mail in found[:3]] == ["ada@main", "eve@main", "bob@main"]


def test_a_mail_says_what_it_is(database: Database, clock: ManualClock) -> None:
    id = send(database, b"\x00\xff", content_type="text/x", correlation_id="because")
    (mail,) = peek(database)
    assert mail == Envelope(
        0, id, "ada@main", "bob@main", b"\x00\xff", "text/x", "because", START_MS, START_MS + TTL_MS
    )
    assert len(id) == 36
    assert send(database, id="mine") == "mine"
    assert peek(database, after=0)[0].correlation_id == "mine"


def test_the_order_is_that_of_the_commits_although_the_clock_was_set_back(
    database: Database, clock: ManualClock
) -> None:
    """Lesson 23: keys came from the wall clock, which can go back."""
    send(database, b"first")
    clock.jump_to_ms(START_MS - DAY_MS)
    send(database, b"second")
    clock.jump_to_ms(START_MS + 1)
    send(database, b"third")
    assert bodies(database) == [b"first", b"second", b"third"]
    assert [receipt.sequence for receipt in told(database)] == list(range(6))


def test_a_sequence_is_never_given_twice(database: Database, clock: ManualClock) -> None:
    send(database)
    send(database, id="b")
    confirm(database, *(mail.id for mail in peek(database)))
    send(database)
    clock.advance_ms(TTL_MS + SLOT_MS)
    sweep_all(database)
    assert (count(database), peek(database)) == (0, [])
    send(database, b"c")
    assert [(mail.sequence, mail.body) for mail in peek(database)] == [(3, b"c")]


def listed(database: Database, universe: str, *, after: str = "", limit: int) -> list[tuple[str, int, int | None]]:
    """Whose mailboxes there are, how many mails wait in each, and since when the oldest does."""
    found = database.read(mailboxes.mailboxes, universe, after=after, limit=limit)
    return [(agent, box.count, oldest_ms) for agent, box, oldest_ms in found]


def test_everybody_has_a_mailbox_of_their_own(database: Database) -> None:
    send(database, b"for bob")
    send(database, b"for eve", to=EVE)
    send(database, b"elsewhere", to=Address("other", "bob"), sender=Address("other", "ada"))
    assert bodies(database) == [b"for bob"]
    assert bodies(database, EVE) == [b"for eve"]
    assert bodies(database, Address("other", "bob")) == [b"elsewhere"]
    assert listed(database, "main", limit=10) == [("ada", 0, None), ("bob", 1, START_MS), ("eve", 1, START_MS)]
    assert listed(database, "main", after="ada", limit=1) == [("bob", 1, START_MS)]
    assert listed(database, "nobody", limit=10) == []


# Reading.


def test_reading_removes_nothing_and_a_reader_goes_on_behind_what_it_was_given(database: Database) -> None:
    """Lesson 20: the flush loop kept re-reading the entries in flight, and deleted on send to make it stop."""
    send_some(database, 7)
    after, seen = -1, []
    while found := deliver(database, after=after, limit=3)[0]:
        seen += [mail.body for mail in found]
        after = found[-1].sequence
    assert seen == [b"%d" % number for number in range(7)]
    assert count(database) == 7
    assert bodies(database) == seen, "whoever comes back finds what was not confirmed"


def test_what_was_confirmed_is_gone_and_what_was_not_stays_in_its_place(database: Database) -> None:
    for number in range(6):
        send(database, b"%d" % number, id=f"m{number}")
    assert confirm(database, "m4", "m0") == 2
    assert bodies(database) == [b"1", b"2", b"3", b"5"]
    assert bodies(database, after=2) == [b"3", b"5"]
    assert confirm(database, "m1", "m2", "m5") == 3
    assert bodies(database) == [b"3"]
    assert confirm(database, "m3") == 1
    assert (bodies(database), count(database)) == ([], 0)


def test_what_is_not_there_is_confirmed_to_nobody(database: Database) -> None:
    id = send(database)
    send(database, id="for-eve", to=EVE)
    assert confirm(database, id, id) == 1
    before = everything(database)
    assert confirm(database, id, "never-was", "for-eve") == 0
    assert everything(database) == before


@pytest.mark.parametrize("read", [deliver, peek])
@pytest.mark.parametrize("after", [-2, 3, 1 << 62, 1 << 70, "0", None, 0.5, True])
def test_a_cursor_that_no_mail_ever_had_is_refused(database: Database, read: Callable[..., Any], after: Any) -> None:
    """Whoever reads behind it would wait for ever, and miss what comes until then."""
    send_some(database, 3)
    confirm(database, *(mail.id for mail in peek(database)))
    assert read(database, after=2) in ([], ([], None))
    before = everything(database)
    with pytest.raises(InvalidArgument, match="no mail's sequence"):
        read(database, after=after)
    assert everything(database) == before


@pytest.mark.parametrize("limit", [0, -1, 257, 1.0, "1", None])
def test_a_read_takes_a_bounded_number(database: Database, limit: Any) -> None:
    for read in (deliver, peek):
        with pytest.raises(InvalidArgument, match="1 to 256"):
            read(database, limit=limit)
    assert everything(database) == []


# Counting.


def test_the_count_is_exact_whatever_happens(database: Database, clock: ManualClock) -> None:
    assert count(database) == 0
    send_some(database, 5)
    ids = [mail.id for mail in peek(database)]
    assert count(database) == 5
    send_again(database, ids[0])
    deliver(database)
    assert count(database) == 5
    confirm(database, ids[3], ids[3], "never-was")
    assert count(database) == 4
    clock.advance_ms(TTL_MS)
    send(database)
    assert count(database) == 5, "what is over takes room until it is swept"
    clock.advance_ms(SLOT_MS)
    assert sweep_all(database) == {"bob": 4}
    assert count(database) == 1


def test_counting_and_storing_touch_as_many_keys_in_a_full_mailbox_as_in_an_empty_one(database: Database) -> None:
    """Lesson 23: counting a mailbox walked it, on every store."""
    new = NewMail(str(BOB), b"x", "small")

    def costs() -> tuple[int, int]:
        stored = touches(database, mailboxes.send, ADA, BOB, new)
        counted = touches(database, mailboxes.count, BOB)
        confirm(database, "small")
        return len(stored.keys) + stored.scans, len(counted.keys) + counted.scans

    send(database)
    small = costs()
    send_some(database, 900)
    assert costs() == small
    assert small[1] <= 3
    assert touches(database, mailboxes.join, BOB, "s").scans == 0


def test_the_cost_of_a_read_does_not_grow_with_what_was_confirmed(database: Database) -> None:
    send_some(database, 500)
    for start in (0, 250):
        confirm(database, *(mail.id for mail in peek(database, limit=250)))
        assert count(database) == 250 - start
    send(database, b"new")
    seen = touches(database, mailboxes.deliver, BOB, after=-1, limit=50)
    assert seen.scans == 0, "what can be one of a few is asked for by its key"
    assert mailbox_keys.keys_of(BOB).mail_key(500) in seen.keys
    assert len(seen.keys) < 20


def test_it_is_known_since_when_the_oldest_mail_waits(database: Database, clock: ManualClock) -> None:
    def oldest_ms() -> int | None:
        return database.read(mailboxes.count, BOB)[1]

    assert oldest_ms() is None
    first = send(database)
    clock.advance_ms(1_000)
    send(database)
    assert oldest_ms() == START_MS
    confirm(database, first)
    assert oldest_ms() == START_MS + 1_000


# The bound.


def test_a_full_mailbox_is_an_error_to_the_sender_and_nothing_is_stored(database: Database) -> None:
    set_policy(database, pending_max=3)
    send_some(database, 3)
    before = everything(database)
    for sender in (ADA, EVE):
        with pytest.raises(MailboxFull, match="bob@main holds 3 mails"):
            send(database, sender=sender)
    assert everything(database) == before
    send(database, to=EVE)
    confirm(database, peek(database)[1].id)
    send(database, b"again")
    assert bodies(database) == [b"0", b"2", b"again"]


def test_a_mailbox_holds_a_thousand_mails_unless_a_policy_says_otherwise(database: Database) -> None:
    send_some(database, 1_000)
    with pytest.raises(MailboxFull, match="1000"):
        send(database)
    assert count(database) == 1_000
    set_policy(database, pending_max=1_001)
    send(database)
    set_policy(database, pending_max=5)
    with pytest.raises(MailboxFull):
        send(database)
    assert count(database) == 1_001


def test_a_sender_that_is_refused_has_little_looked_at(database: Database) -> None:
    """Mails are long, and whoever is refused asks again."""
    set_policy(database, pending_max=300)
    send_some(database, 300)
    room = mailbox_keys.keys_of(BOB)

    def refused(tx: Any) -> None:
        with pytest.raises(MailboxFull):
            mailboxes.send(tx, EVE, BOB, NewMail(str(BOB)))

    assert len([key for key in touches(database, refused).keys if key.startswith(room.mail)]) == 1


def test_a_mailbox_that_is_full_of_what_is_over_takes_new_mail(database: Database, clock: ManualClock) -> None:
    set_policy(database, pending_max=600)
    send_some(database, 600)
    clock.advance_ms(TTL_MS)
    send(database, b"new")
    assert bodies(database) == [b"new"]
    assert count(database) == 600 - 256 + 1


def test_one_that_lasts_longer_does_not_keep_the_room_of_those_behind_it(
    database: Database, clock: ManualClock
) -> None:
    """Policies change: what is over stands behind what is not."""
    send(database, b"long")
    set_policy(database, pending_max=3, ttl_seconds=60)
    send(database, b"short")
    send(database, b"short")
    with pytest.raises(MailboxFull):
        send(database)
    clock.advance_ms(60_000)
    send(database, b"new")
    assert (bodies(database), count(database)) == ([b"long", b"new"], 2)


# What is over.


def test_what_is_over_is_never_read(database: Database, clock: ManualClock) -> None:
    send(database, b"old")
    clock.advance_ms(TTL_MS - 1)
    send(database, b"young")
    join(database, "s")
    assert bodies(database, session="s") == [b"old", b"young"]
    clock.advance_ms(1)
    assert bodies(database) == bodies(database, session="s") == [b"young"]
    assert [mail.body for mail in peek(database)] == [b"young"]
    assert count(database) == 2


def test_a_reader_passes_over_any_number_of_what_is_over_at_once(database: Database, clock: ManualClock) -> None:
    send_some(database, 700)
    clock.advance_ms(TTL_MS)
    send(database, b"new")
    seen = touches(database, mailboxes.deliver, BOB, after=-1, limit=1)
    assert seen.scans <= 4
    assert bodies(database, limit=1) == [b"new"]


def test_what_was_read_in_time_can_be_confirmed_until_it_is_swept(database: Database, clock: ManualClock) -> None:
    one, other = send(database), send(database)
    deliver(database)
    clock.advance_ms(TTL_MS)
    assert confirm(database, one) == 1
    clock.advance_ms(SLOT_MS)
    sweep_all(database)
    assert confirm(database, other) == 0


def test_a_policy_holds_for_what_is_sent_from_then_on(database: Database, clock: ManualClock) -> None:
    send(database, b"week")
    set_policy(database, ttl_seconds=60)
    send(database, b"minute")
    set_policy(database, ttl_seconds=3_600)
    send(database, b"hour")
    assert [mail.expires_ms - START_MS for mail in peek(database)] == [TTL_MS, 60_000, 3_600_000]
    clock.advance_ms(60_000)
    assert bodies(database) == [b"week", b"hour"]
    clock.advance_ms(SLOT_MS)
    assert sweep_all(database) == {"bob": 1}, "although an older one lasts longer"
    clock.advance_ms(3_600_000)
    assert sweep_all(database) == {"bob": 1}
    assert (bodies(database), count(database)) == ([b"week"], 1)
    clock.advance_ms(TTL_MS)
    sweep_all(database)
    assert left(database, ADA, BOB) == []


def test_what_was_sent_after_the_clock_was_set_back_is_over_first(database: Database, clock: ManualClock) -> None:
    clock.jump_to_ms(START_MS + DAY_MS)
    send(database, b"first", id="first")
    clock.jump_to_ms(START_MS)
    send(database, b"second")
    clock.jump_to_ms(START_MS + TTL_MS + SLOT_MS)
    assert bodies(database) == [b"first"]
    assert sweep_all(database) == {"bob": 1}
    confirm(database, "first")
    assert count(database) == 0


def test_one_that_was_to_be_over_early_leaves_nothing_when_it_is_confirmed(
    database: Database, clock: ManualClock
) -> None:
    send(database, id="long")
    set_policy(database, ttl_seconds=60)
    for id in ("a", "b"):
        send(database, id=id)
    confirm(database, "a")
    clock.advance_ms(60_000 + SLOT_MS)
    assert sweep_all(database) == {"bob": 1}
    confirm(database, "long")
    room = mailbox_keys.keys_of(BOB)
    assert [key for key, _ in everything(database) if key.startswith(room.prefix)] == [room.box]


def test_mail_that_comes_into_an_empty_mailbox_is_over_before_nobody(database: Database) -> None:
    """And needs no key of its own for that."""
    send(database, id="long")
    confirm(database, "long")
    set_policy(database, ttl_seconds=60)
    send(database)
    early = mailbox_keys.keys_of(BOB).early
    assert not [key for key, _ in everything(database) if key.startswith(early)]


# Sweeping.


def test_a_sweep_removes_a_bounded_number_in_one_transaction_and_ends(database: Database, clock: ManualClock) -> None:
    send_some(database, 600)
    clock.advance_ms(TTL_MS + SLOT_MS)
    removed = []
    while (found := sweep(database))[1]:
        removed += found[0].values()
    assert removed == [168, 256, 176], "600 mails of bob's, behind 600 receipts of ada's"
    assert count(database) == 0
    assert left(database, ADA, BOB) == []
    assert sweep(database) == ({}, False)


def test_what_is_over_first_and_what_is_over_early_are_bounded_together(
    database: Database, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expiry, "MAIL_SWEEP_BATCH", 3)
    set_policy(database, ttl_seconds=60)
    send_some(database, 1)
    set_policy(database)
    send(database, b"long", sender=EVE)
    set_policy(database, ttl_seconds=60)
    send_some(database, 3)
    clock.advance_ms(60_000 + SLOT_MS)
    removed = []
    while (found := sweep(database))[1]:
        removed += found[0].values()
    assert removed == [2, 2], "behind the fourth receipt of ada's"
    assert bodies(database) == [b"long"]


def test_a_sweep_looks_at_several_rooms_and_says_how_much_was_whose(database: Database, clock: ManualClock) -> None:
    everybody = [Address("main", f"agent-{number}") for number in range(40)]
    for number, agent in enumerate(everybody):
        for _ in range(number % 3):
            send(database, to=agent)
    clock.advance_ms(TTL_MS + SLOT_MS)
    assert sweep_all(database) == {agent.agent: number % 3 for number, agent in enumerate(everybody) if number % 3}
    assert left(database, ADA, *everybody) == []


def test_a_sweep_leaves_what_is_not_over_and_other_universes_alone(database: Database, clock: ManualClock) -> None:
    other = Address("other", "bob")
    send(database, b"old")
    send(database, b"elsewhere", to=other, sender=Address("other", "ada"))
    clock.advance_ms(TTL_MS - DAY_MS)
    send(database, b"young")
    clock.advance_ms(DAY_MS + SLOT_MS)
    assert sweep_all(database) == {"bob": 1}
    assert (count(database), count(database, other)) == (1, 1)
    assert bodies(database) == [b"young"]


def test_a_sweep_with_nothing_to_do_looks_at_nothing(database: Database, clock: ManualClock) -> None:
    send_some(database, 300)
    clock.advance_ms(TTL_MS - 2 * SLOT_MS)
    seen = touches(database, mailboxes.sweep, "main")
    assert (seen.keys, seen.scans) == (set(), 1)


def test_mail_expires_in_silence(database: Database, clock: ManualClock) -> None:
    id = send(database)
    clock.advance_ms(TTL_MS)
    send(database, id="later")
    clock.advance_ms(SLOT_MS)
    sweep_all(database)
    assert [state for state in states(database) if state[0] == id] == []
    assert states(database) == [("later", "stored")]


# Receipts.


def test_a_sender_is_told_that_its_mail_is_stored_delivered_and_confirmed(
    database: Database, clock: ManualClock
) -> None:
    id = send(database)
    clock.advance_ms(10)
    deliver(database)
    clock.advance_ms(10)
    confirm(database, id)
    assert told(database) == [
        MailReceipt(0, id, "bob@main", "stored", START_MS),
        MailReceipt(1, id, "bob@main", "delivered", START_MS + 10),
        MailReceipt(2, id, "bob@main", "confirmed", START_MS + 20, was_stored=True),
    ]
    assert told(database, BOB) == []


def test_a_sender_is_told_once_that_its_mail_was_delivered_however_often_it_is_read(database: Database) -> None:
    send(database, id="a")
    for _ in range(3):
        deliver(database)
    join(database, "s")
    deliver(database, session="s")
    send(database, id="b")
    for _ in range(2):
        deliver(database)
    assert states(database) == [("a", "stored"), ("a", "delivered"), ("b", "stored"), ("b", "delivered")]


def test_a_reader_that_goes_on_has_only_what_is_new_to_it_told(database: Database) -> None:
    for id in ("a", "b", "c"):
        send(database, id=id)
    deliver(database, limit=2)
    deliver(database, after=0, limit=2)
    assert states(database)[3:] == [("a", "delivered"), ("b", "delivered"), ("c", "delivered")]


def test_a_peek_is_told_to_nobody(database: Database) -> None:
    send(database)
    before = everything(database)
    peek(database)
    assert everything(database) == before


def test_a_sender_goes_on_behind_the_last_receipt_that_it_has_seen(database: Database) -> None:
    for id in ("a", "b"):
        send(database, id=id)
    first = told(database, limit=1)
    assert states(database, after=first[-1].sequence) == [("b", "stored")]
    confirm(database, "b", "a")
    assert states(database, after=1) == [("b", "confirmed"), ("a", "confirmed")]
    assert states(database, after=3) == []


def test_everybody_has_receipts_of_their_own_and_one_may_write_to_oneself(database: Database) -> None:
    send(database, id="a")
    send(database, id="b", sender=EVE)
    send(database, id="c", sender=BOB)
    deliver(database)
    confirm(database, "a", "b", "c")
    for sender, id in ((ADA, "a"), (EVE, "b"), (BOB, "c")):
        assert states(database, sender) == [(id, "stored"), (id, "delivered"), (id, "confirmed")]


def test_receipts_that_nobody_asks_for_are_bounded(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_module("holdfast.layers.mailboxes.receipts"), "RECEIPTS_MAX", 5)
    for number in range(9):
        send(database, id=f"m{number}")
    assert [receipt.sequence for receipt in told(database)] == [4, 5, 6, 7, 8]
    assert [receipt.sequence for receipt in told(database, after=1, limit=2)] == [4, 5]
    room = mailbox_keys.keys_of(ADA)
    assert len([key for key, _ in everything(database) if key.startswith(room.receipt)]) == 5


def test_what_was_forgotten_does_not_count_among_the_receipts_that_are_kept(
    database: Database, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(import_module("holdfast.layers.mailboxes.receipts"), "RECEIPTS_MAX", 5)
    send_some(database, 3)
    clock.advance_ms(TTL_MS + SLOT_MS)
    sweep_all(database)
    send_some(database, 5)
    assert [receipt.sequence for receipt in told(database)] == [3, 4, 5, 6, 7]


def test_receipts_are_kept_as_long_as_mail_is(database: Database, clock: ManualClock) -> None:
    send(database, id="a")
    clock.advance_ms(SLOT_MS)
    confirm(database, "a")
    clock.advance_ms(TTL_MS - SLOT_MS - 1)
    sweep_all(database)
    assert len(told(database)) == 2
    clock.advance_ms(SLOT_MS)
    sweep_all(database)
    assert states(database) == [("a", "confirmed")]
    clock.advance_ms(SLOT_MS)
    sweep_all(database)
    assert told(database) == []
    assert left(database, ADA, BOB) == []


def test_many_receipts_are_forgotten_in_bounded_steps(database: Database, clock: ManualClock) -> None:
    send_some(database, 300)
    confirm(database, *(mail.id for mail in peek(database)))
    assert len(told(database)) == 556
    clock.advance_ms(TTL_MS + SLOT_MS)
    sweep(database)
    assert len(told(database)) == 300
    sweep_all(database)
    assert left(database, ADA, BOB) == []


def test_receipts_are_forgotten_although_the_policy_became_longer_meanwhile(
    database: Database, clock: ManualClock
) -> None:
    set_policy(database, ttl_seconds=60)
    send(database)
    set_policy(database, ttl_seconds=3_600)
    clock.advance_ms(60_000 + SLOT_MS)
    sweep_all(database)
    assert len(told(database)) == 1, "it is kept as long as mail is now"
    clock.advance_ms(3_600_000)
    sweep_all(database)
    assert left(database, ADA, BOB) == []


def test_a_policy_that_became_shorter_holds_for_receipts_at_once(database: Database, clock: ManualClock) -> None:
    send(database)
    set_policy(database, ttl_seconds=60)
    send(database)
    clock.advance_ms(60_000 + SLOT_MS)
    sweep_all(database)
    assert told(database) == []


def test_which_receipts_were_seen_is_remembered_and_only_grows(database: Database) -> None:
    for _ in range(3):
        send(database)
    assert join(database, "s", ADA) == (0, -1)
    database.transact(mailboxes.see_receipts, ADA, 1)
    database.transact(mailboxes.see_receipts, ADA, 0)
    assert join(database, "s", ADA) == (0, 1)
    assert len(told(database)) == 3


@pytest.mark.parametrize("sequence", [-2, 3, 1 << 70, "1", None, 1.0])
def test_a_receipt_that_never_was_is_refused(database: Database, sequence: Any) -> None:
    for _ in range(3):
        send(database)
    before = everything(database)
    with pytest.raises(InvalidArgument, match="no receipt's sequence"):
        told(database, after=sequence)
    with pytest.raises(InvalidArgument, match="no receipt's sequence"):
        database.transact(mailboxes.see_receipts, ADA, sequence)
    for limit in (0, 10_001, "1"):
        with pytest.raises(InvalidArgument, match="1 to 10000"):
            told(database, limit=limit)
    assert everything(database) == before


# Readers.


def test_whoever_joins_is_told_how_much_waits_and_is_the_only_reader(database: Database) -> None:
    send_some(database, 3)
    assert join(database, "one") == (3, -1)
    assert bodies(database, session="one", limit=1) == [b"0"]
    assert join(database, "two") == (3, -1)
    with pytest.raises(MailboxTaken, match="join it again"):
        deliver(database, session="one", after=0)
    assert bodies(database, session="two") == [b"0", b"1", b"2"]
    leave(database, "one")
    assert bodies(database, session="two") == [b"0", b"1", b"2"], "leaving is for whoever reads"


def test_whoever_has_left_reads_no_more(database: Database) -> None:
    join(database, "one")
    leave(database, "one")
    leave(database, "one")
    with pytest.raises(MailboxTaken):
        deliver(database, session="one")
    with pytest.raises(MailboxTaken):
        deliver(database, EVE, session="never joined")
    assert database.read(mailboxes.count, BOB)[0].session is None


@pytest.mark.parametrize("session", ["", "x" * 65, "ü", "a\n", None, 5])
def test_a_session_has_a_name(database: Database, session: Any) -> None:
    with pytest.raises(InvalidArgument):
        join(database, session)
    assert everything(database) == []


def test_a_reader_is_live_once_it_has_read_everything_and_not_before(database: Database) -> None:
    send_some(database, 4)
    join(database, "s")
    assert deliver(database, session="s", limit=2)[1] is None
    assert deliver(database, session="s", limit=2, after=1)[1] is None, "there might be more"
    assert deliver(database, session="s", limit=2, after=3) == ([], 4)
    assert deliver(database, limit=2, after=3) == ([], None), "only a session is live"


def test_mail_that_comes_while_stored_mail_is_read_comes_behind_it(database: Database) -> None:
    """Lesson 22: live traffic overtook stored mail."""
    send_some(database, 3)
    join(database, "s")
    first, _ = deliver(database, session="s", limit=2)
    send(database, b"meanwhile")
    second, live_from = deliver(database, session="s", after=first[-1].sequence)
    assert [mail.body for mail in first + second] == [b"0", b"1", b"2", b"meanwhile"]
    assert live_from == 4


def test_nothing_is_stranded_between_the_last_look_and_the_first_live_mail(database: Database) -> None:
    """Lesson 21: a message stored between the last empty read and the end of flushing waited for a reconnect.

    There is no moment between them: the transaction that finds nothing more is the one from which on mail is live.
    """
    join(database, "s")
    send(database, b"before")
    found, live_from = deliver(database, session="s")
    assert ([mail.body for mail in found], live_from) == ([b"before"], 1)
    send(database, b"after")
    found, live_from = deliver(database, session="s", after=0)
    assert ([(mail.sequence, mail.body) for mail in found], live_from) == ([(1, b"after")], 1)


def test_a_sender_is_told_whether_its_mail_had_to_wait(database: Database) -> None:
    """Lesson 22: `was_stored` was never set by anyone."""
    send(database, id="waited")
    join(database, "s")
    send(database, id="came while the stored ones were read")
    deliver(database, session="s")
    send(database, id="live")
    deliver(database, session="s", after=1)
    confirm(database, "live", "waited", "came while the stored ones were read")
    assert was_stored(database) == {
        "live": False,
        "waited": True,
        "came while the stored ones were read": True,
    }


def test_mail_for_a_reader_that_is_gone_without_a_word_has_waited(database: Database) -> None:
    """A reader that crashed does not leave. What comes then is not live, whoever reads it next and however."""
    join(database, "crashes")
    deliver(database, session="crashes")
    send(database, id="live")
    deliver(database, session="crashes")
    send(database, id="came later")
    deliver(database)
    confirm(database, "live", "came later")
    assert was_stored(database) == {"live": False, "came later": True}


def test_what_a_reader_left_behind_waits_for_the_next_one(database: Database) -> None:
    join(database, "one")
    deliver(database, session="one")
    send(database, id="a")
    deliver(database, session="one")
    leave(database, "one")
    send(database, id="b")
    join(database, "two")
    send(database, id="c")
    assert deliver(database, session="two")[1] == 3
    send(database, id="d")
    deliver(database, session="two", after=2)
    confirm(database, "a", "b", "c", "d")
    assert was_stored(database) == {"a": True, "b": True, "c": True, "d": False}


def test_a_live_reader_is_so_only_for_what_it_was_given_itself(database: Database) -> None:
    join(database, "s")
    deliver(database, session="s")
    send(database, id="a")
    deliver(database)  # Somebody else looks, too.
    deliver(database, session="s")
    confirm(database, "a")
    assert was_stored(database) == {"a": False}


# Ids.


def test_a_mail_that_is_sent_again_while_it_waits_is_stored_once(database: Database) -> None:
    send(database, b"first", id="x")
    before = everything(database)
    assert send_again(database, "x")
    assert everything(database) == before
    assert not send_again(database, "x", to=EVE)
    confirm(database, "x")
    assert not send_again(database, "x")
    assert bodies(database) == [b"again"]


def test_the_id_of_somebody_elses_mail_is_refused_and_not_taken_for_a_repetition(database: Database) -> None:
    """Whoever guesses an id must not make another sender believe that its mail is stored."""
    send(database, b"eve's", sender=EVE, id="x")
    before = everything(database)
    with pytest.raises(InvalidArgument, match="somebody else's mail"):
        send(database, b"ada's", id="x")
    assert everything(database) == before
    confirm(database, "x")
    send(database, b"ada's", id="x")
    assert bodies(database) == [b"ada's"]


@pytest.mark.parametrize("sender", [ADA, EVE])
def test_an_id_whose_mail_is_over_is_free_again(database: Database, clock: ManualClock, sender: Address) -> None:
    """What nobody will ever read must not swallow what is sent now."""
    send(database, b"old", id="x")
    send(database, b"old too")
    clock.advance_ms(TTL_MS)
    id, duplicate = database.transact(mailboxes.send, sender, BOB, NewMail(str(BOB), b"new", "x"))
    assert (id, duplicate) == ("x", False)
    assert (bodies(database), count(database)) == ([b"new"], 2)
    assert confirm(database, "x") == 1
    assert count(database) == 1


# Blocks.


def test_the_mail_of_a_sender_that_is_blocked_is_refused_and_that_of_others_is_not(database: Database) -> None:
    send(database, b"before")
    block(database, ADA)
    before = everything(database)
    with pytest.raises(SenderBlocked, match="does not want mail of ada@main"):
        send(database)
    assert everything(database) == before
    send(database, b"eve's", sender=EVE)
    send(database, to=EVE)
    assert bodies(database) == [b"before", b"eve's"]
    block(database, ADA, blocked=False)
    block(database, ADA, blocked=False)
    send(database, b"after")
    assert bodies(database)[-1] == b"after"


@pytest.mark.parametrize("has_mail", [True, False], ids=["with mail", "before its first mail"])
def test_a_box_that_says_nothing_of_blocks_is_asked_for_them(database: Database, has_mail: bool) -> None:
    """As older versions wrote them: nobody had noted whether somebody is blocked."""
    if has_mail:
        send(database)
    room = mailbox_keys.keys_of(BOB)

    def write_as_before(tx: Transaction) -> None:
        tx.put(room.block_key(ADA), bytes(8))
        stored = tx.get(room.box)
        if stored is not None:
            tx.put(room.box, mailbox_keys.encode(msgspec.msgpack.decode(stored)[:-1]))

    database.transact(write_as_before)
    with pytest.raises(SenderBlocked):
        send(database)
    send(database, sender=EVE)
    with pytest.raises(SenderBlocked):
        send(database)


def test_a_box_says_whether_anybody_may_be_blocked(database: Database) -> None:
    """So that most mail is stored without a search for its sender."""

    def may_refuse() -> bool:
        return database.read(lambda tx: mailbox_keys.box_of(tx, mailbox_keys.keys_of(BOB)).may_refuse)

    send(database)
    assert not may_refuse()
    block(database, EVE)
    assert may_refuse()
    send(database)
    assert may_refuse()


def test_a_name_that_begins_like_a_blocked_one_is_another_name(database: Database) -> None:
    block(database, Address("main", "ada-2"))
    send(database)
    block(database, ADA)
    send(database, sender=Address("main", "ada-3"))
    assert count(database) == 2


def test_blocks_are_listed_in_pages(database: Database) -> None:
    senders = [Address("main", f"a{number}") for number in range(5)]
    for sender in reversed(senders):
        block(database, sender)

    def page(after: str, limit: int) -> list[str]:
        return database.read(mailboxes.blocks, BOB, after=after, limit=limit)

    assert page("", 3) == ["a0@main", "a1@main", "a2@main"]
    assert page("a2@main", 3) == ["a3@main", "a4@main"]
    assert page("a4@main", 3) == []
    assert database.read(mailboxes.blocks, ADA, after="", limit=10) == []
    for limit in (0, 1_001):
        with pytest.raises(InvalidArgument):
            page("", limit)


def test_a_mailbox_blocks_a_bounded_number_of_senders(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "BLOCKS_MAX", 2)
    block(database, ADA)
    block(database, EVE)
    block(database, ADA)
    with pytest.raises(InvalidArgument, match="as many as it may"):
        block(database, BOB)
    block(database, EVE, blocked=False)
    block(database, BOB)


# Worlds.


def bind(database: Database, agent: Address = BOB, world: str = "w") -> World:
    bound = World("main", world)
    database.transact(worlds.create, bound)
    database.transact(agents.register, "main", agent.agent, world=world)
    return bound


def test_mail_for_an_agent_that_is_bound_to_a_world_is_drained_into_its_journal(database: Database) -> None:
    world = bind(database)
    id = send(database, b"hello", content_type="text/plain", correlation_id="because")
    assert (count(database), peek(database)) == (0, [])
    headers = {"from": "ada@main", "id": id, "content_type": "text/plain", "correlation_id": "because"}
    delivery = Delivery(inbox_name="mail", payload=b"hello", headers=headers)
    assert database.read(inboxes.read, world, after=None, limit=10) == [(0, delivery)]
    assert states(database) == [(id, "confirmed")]
    assert not told(database)[0].was_stored
    database.transact(inboxes.drain, world)
    assert database.read(journals.read_hot, world, 0, 10) == [(0, journal_records.ingress(0, delivery))]


def test_what_a_world_does_not_take_is_refused_and_nothing_is_written(database: Database) -> None:
    world = bind(database)
    before = everything(database)
    with pytest.raises(PayloadTooLarge, match="Mail that a world takes has at most 4096"):
        send(database, b"x" * 4_097)
    assert everything(database) == before
    send(database, b"x" * 4_096)
    database.transact(worlds.change_state, world, WorldState.ARCHIVED)
    before = everything(database)
    with pytest.raises(WorldNotActive):
        send(database)
    assert everything(database) == before


def test_a_world_has_no_mail_of_those_that_its_agent_blocks(database: Database) -> None:
    world = bind(database)
    block(database, ADA)
    with pytest.raises(SenderBlocked):
        send(database)
    assert database.read(inboxes.read, world, after=None, limit=10) == []


# What is no mail.

BAD: list[tuple[dict[str, Any], type[HoldfastError], str]] = [
    ({"body": b"x" * 65_537}, PayloadTooLarge, "at most 65536 bytes, not 65537; store a blob"),
    ({"body": "text"}, InvalidArgument, "body is bytes, not str"),
    ({"body": bytearray(b"x")}, InvalidArgument, "body is bytes"),
    ({"body": None}, InvalidArgument, "body is bytes"),
    ({"id": ""}, InvalidArgument, "no id of a mail"),
    ({"id": "x" * 65}, InvalidArgument, "no id of a mail"),
    ({"id": "ü"}, InvalidArgument, "no id of a mail"),
    ({"id": "a\x00b"}, InvalidArgument, "no id of a mail"),
    ({"id": 7}, InvalidArgument, "no id of a mail"),
    ({"content_type": "text/ü"}, InvalidArgument, "no content type"),
    ({"content_type": "a\r\nb"}, InvalidArgument, "no content type"),
    ({"content_type": "x" * 257}, InvalidArgument, "no content type"),
    ({"content_type": None}, InvalidArgument, "no content type"),
    ({"correlation_id": ""}, InvalidArgument, "correlation id"),
    ({"correlation_id": "x" * 129}, InvalidArgument, "correlation id"),
    ({"correlation_id": "a\nb"}, InvalidArgument, "correlation id"),
]


@pytest.mark.parametrize(("wrong", "error", "message"), BAD, ids=[f"{case[0]!r:.30}" for case in BAD])
def test_what_is_no_mail_is_refused_and_nothing_is_written(
    database: Database, wrong: dict[str, Any], error: type[HoldfastError], message: str
) -> None:
    """Lesson 24: an oversized envelope vanished without a word."""
    with pytest.raises(error, match=message):
        send(database, **wrong)
    assert everything(database) == []


def test_the_largest_of_everything_is_taken(database: Database) -> None:
    long = {"id": "i" * 64, "content_type": "c" * 256, "correlation_id": "r" * 128}
    universe, agent = "u" * 128, "a" * 128
    to, sender = Address(universe, agent), Address(universe, "b" * 128)
    send(database, b"\xff" * 65_536, sender=sender, to=to, **long)
    block(database, sender, of=to)
    (mail,) = deliver(database, to)[0]
    assert (mail.body, mail.id) == (b"\xff" * 65_536, "i" * 64)
    assert confirm(database, mail.id, of=to) == 1
    assert [receipt.to for receipt in told(database, sender)] == [str(to)] * 3


@pytest.mark.parametrize("id", ["", "x" * 65, "ü", None, 5, b"x"])
def test_what_is_no_id_confirms_nothing(database: Database, id: Any) -> None:
    good = send(database)
    before = everything(database)
    with pytest.raises(InvalidArgument, match="no id of a mail"):
        confirm(database, good, id)
    with pytest.raises(BatchTooLarge, match="at most 256"):
        confirm(database, *["x"] * 257)
    assert everything(database) == before


@pytest.mark.parametrize(
    "policy",
    [
        {"pending_max": 0},
        {"pending_max": 1_000_001},
        {"pending_max": 1.5},
        {"pending_max": True},
        {"ttl_seconds": 0.5},
        {"ttl_seconds": float("nan")},
        {"ttl_seconds": float("inf")},
        {"ttl_seconds": "7"},
        {"ttl_seconds": 10 * 365 * 86_400 + 1},
    ],
    ids=repr,
)
def test_a_policy_out_of_its_range_is_refused(database: Database, policy: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match=next(iter(policy))):
        set_policy(database, **policy)
    assert everything(database) == []
    assert database.read(mailboxes.policy_of, "main") == MailPolicy(1_000, 604_800.0)


# What is noted for the activity log.


def events(database: Database, work: Callable[..., Any], *args: Any, **options: Any) -> list[tuple[Any, ...]]:
    def noting(tx: Transaction) -> list[tuple[Any, ...]]:
        work(tx, *args, **options)
        return tx.events

    return database.transact(noting)


def test_whatever_happens_to_a_mail_is_noted(database: Database, clock: ManualClock) -> None:
    new = NewMail(str(BOB), b"x", "x")
    assert events(database, mailboxes.send, ADA, BOB, new) == [("mail.stored", BOB, "x", "ada@main", START_MS)]
    assert events(database, mailboxes.send, ADA, BOB, new) == []
    read = {"after": -1, "limit": 10}
    assert events(database, mailboxes.deliver, BOB, **read) == [("mail.delivered", BOB, "x", "ada@main", START_MS)]
    assert events(database, mailboxes.deliver, BOB, **read) == []
    assert events(database, mailboxes.confirm, BOB, ["x", "y"]) == [("mail.confirmed", BOB, "x", "ada@main", START_MS)]
    send(database, id="y")
    clock.advance_ms(TTL_MS + SLOT_MS)
    assert events(database, mailboxes.sweep, "main") == [("mail.expired", BOB, "y", "ada@main", clock.now_ms())]


def test_a_box_that_an_older_version_wrote_is_read(database: Database) -> None:
    """What was added to the record of a box stands at its end."""
    send(database, b"old")
    room = mailbox_keys.keys_of(BOB)
    database.transact(lambda tx: tx.put(room.box, mailbox_keys.encode([1, 0, 1, 0, None, None])))
    assert bodies(database) == [b"old"]
    send(database, b"new")
    expires_ms = START_MS + TTL_MS
    assert database.read(mailbox_keys.box_of, room) == Box(2, 0, 2, 1, None, None, 0, expires_ms, expires_ms // SLOT_MS)


def test_what_comes_under_a_slot_that_was_swept_is_swept_too(database: Database, clock: ManualClock) -> None:
    """It is noted once when mail and receipts of a slot are over; a clock that is set back comes to the slot again."""
    send(database)
    clock.advance_ms(TTL_MS + SLOT_MS)
    assert sweep_all(database) == {"bob": 1}
    clock.jump_to_ms(START_MS)
    send(database)
    clock.advance_ms(TTL_MS + SLOT_MS)
    assert sweep_all(database) == {"bob": 1}
    assert (count(database), told(database)) == (0, [])


# Reads that are bounded by bytes, and reads across holes.


def test_a_read_ends_once_it_has_as_many_bytes_as_it_may(database: Database) -> None:
    database.transact(mailboxes.join, BOB, "s")
    for _ in range(5):
        send(database, b"x" * 100)

    def read(after: int, bytes_max: int) -> tuple[list[int], int | None]:
        found, live_from = database.transact(
            mailboxes.deliver, BOB, after=after, limit=50, session="s", bytes_max=bytes_max
        )
        return [mail.sequence for mail in found], live_from

    assert read(-1, 1) == ([0], None), "one, however large it is"
    assert read(0, 200) == ([1, 2], None)
    assert read(2, 200) == ([3, 4], None), "it cannot know that this was all"
    assert read(4, 200) == ([], 5)
    send(database, b"x" * 300)
    assert read(4, 200) == ([5], 5)


@pytest.mark.parametrize("confirmed", [range(1, 3), range(1, 9), range(9), (0, 2, 4, 6, 8), (9,)], ids=repr)
def test_holes_are_passed_over(database: Database, confirmed: Iterable[int]) -> None:
    send_some(database, 10)
    ids = {mail.sequence: mail.id for mail in peek(database)}
    left = [sequence for sequence in range(10) if sequence not in confirmed]
    for sequence in confirmed:
        confirm(database, ids[sequence])
    for after in range(-1, 10):
        found = [mail.sequence for mail in peek(database, after=after)]
        assert found == [sequence for sequence in left if sequence > after]
    confirm(database, *(ids[sequence] for sequence in left))
    assert (count(database), peek(database)) == (0, [])


def test_whoever_watches_the_reader_hears_of_a_new_one_and_of_nothing_else(database: Database) -> None:
    key, heard = mailbox_keys.keys_of(BOB).reader, list[bytes]()

    def subscribe(keys: Collection[bytes], ranges: object) -> None:
        heard.extend(each for each in keys if each == key)

    stop = database.subscribe(subscribe)
    send(database)
    deliver(database)
    confirm(database, peek(database)[0].id)
    assert heard == []
    database.transact(mailboxes.join, BOB, "s")
    assert heard == [key]
    database.transact(mailboxes.leave, BOB, "s")
    assert heard == [key, key]
    stop()
