"""Mailboxes, as functions over a transaction, on every backend."""

import itertools
from collections.abc import Callable, Collection, Iterable
from typing import Any

import pytest

from fastness.errors import (
    InvalidArgument,
    MailboxFull,
    MailboxTaken,
)
from fastness.kv import Database, Event, Transaction
from fastness.kv.batch import run_batch
from fastness.layers import mailboxes
from fastness.layers.mailboxes import Address
from fastness.layers.mailboxes import keys as mailbox_keys
from fastness.layers.mailboxes.keys import MailEvent
from fastness.testing.clock import START_MS, ManualClock
from fastness.wire.mail import Envelope, MailPolicy, NewMail
from tests.support.failures import Failures
from tests.unit.mailbox_calls import (
    ADA,
    BOB,
    DAY_MS,
    EVE,
    SLOT_MS,
    TTL_MS,
    bodies,
    confirm,
    count,
    deliver,
    everything,
    join,
    leave,
    peek,
    receipts_of,
    send,
    send_again,
    send_some,
    set_policy,
    stored_count,
    sweep_all,
    touches,
    was_stored,
)

# Order of mail.


def test_mail_is_read_in_the_order_of_its_commits(database: Database) -> None:
    for number in range(12):
        send(database, b"%d" % number, sender=(ADA, EVE, BOB)[number % 3])
    found, _ = deliver(database)
    assert [mail.body for mail in found] == [b"%d" % number for number in range(12)]
    assert [mail.sequence for mail in found] == list(range(12))
    assert [mail.sender for mail in found[:3]] == ["ada@main", "eve@main", "bob@main"]


def test_an_envelope_has_all_fields_of_the_mail(database: Database, clock: ManualClock) -> None:
    id = send(database, b"\x00\xff", content_type="text/x", correlation_id="because")
    (mail,) = peek(database)
    assert mail == Envelope(
        0, id, "ada@main", "bob@main", b"\x00\xff", "text/x", "because", START_MS, START_MS + TTL_MS
    )
    assert len(id) == 36
    assert send(database, id="mine") == "mine"
    assert peek(database, after=0)[0].correlation_id == "mine"


def test_mail_order_does_not_depend_on_the_clock(database: Database, clock: ManualClock) -> None:
    send(database, b"first")
    clock.jump_to_ms(START_MS - DAY_MS)
    send(database, b"second")
    clock.jump_to_ms(START_MS + 1)
    send(database, b"third")
    assert bodies(database) == [b"first", b"second", b"third"]
    assert [receipt.sequence for receipt in receipts_of(database)] == list(range(6))


def test_a_sequence_is_never_used_twice(database: Database, clock: ManualClock) -> None:
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
    """All mailboxes with their number of pending mails and the time of the oldest."""
    found = database.read(mailboxes.mailboxes, universe, after=after, limit=limit)
    return [(agent, each.pending, each.oldest_ms) for agent, each in found]


def test_agents_have_separate_mailboxes(database: Database) -> None:
    send(database, b"for bob")
    send(database, b"for eve", to=EVE)
    send(database, b"elsewhere", to=Address("other", "bob"), sender=Address("other", "ada"))
    assert bodies(database) == [b"for bob"]
    assert bodies(database, EVE) == [b"for eve"]
    assert bodies(database, Address("other", "bob")) == [b"elsewhere"]
    assert listed(database, "main", limit=10) == [("ada", 0, None), ("bob", 1, START_MS), ("eve", 1, START_MS)]
    assert listed(database, "main", after="ada", limit=1) == [("bob", 1, START_MS)]
    assert listed(database, "unused", limit=10) == []


# Reading.


def test_reading_removes_nothing_and_continues_after_a_sequence(database: Database) -> None:
    send_some(database, 7)
    after, seen = -1, []
    while found := deliver(database, after=after, limit=3)[0]:
        seen += [mail.body for mail in found]
        after = found[-1].sequence
    assert seen == [b"%d" % number for number in range(7)]
    assert count(database) == 7
    assert bodies(database) == seen, "unconfirmed mail is delivered again"


def test_confirmed_mail_is_removed_and_other_mail_keeps_its_sequence(database: Database) -> None:
    for number in range(6):
        send(database, b"%d" % number, id=f"m{number}")
    assert confirm(database, "m4", "m0") == 2
    assert bodies(database) == [b"1", b"2", b"3", b"5"]
    assert bodies(database, after=2) == [b"3", b"5"]
    assert confirm(database, "m1", "m2", "m5") == 3
    assert bodies(database) == [b"3"]
    assert confirm(database, "m3") == 1
    assert (bodies(database), count(database)) == ([], 0)


def test_confirming_missing_mail_writes_no_receipt(database: Database) -> None:
    id = send(database)
    send(database, id="for-eve", to=EVE)
    assert confirm(database, id, id) == 1
    before = everything(database)
    assert confirm(database, id, "never-was", "for-eve") == 0
    assert everything(database) == before


def test_reading_after_an_unused_sequence_is_refused(database: Database) -> None:
    """A reader at such a sequence would miss all mail up to it."""
    send_some(database, 3)
    confirm(database, *(mail.id for mail in peek(database)))
    assert (peek(database, after=2), deliver(database, after=2)) == ([], ([], None))
    before = everything(database)
    failures = Failures()
    reads: list[Callable[..., Any]] = [deliver, peek]
    for read, after in itertools.product(reads, (-2, 3, 1 << 62, 1 << 70)):
        with failures.of((read, after)):
            with pytest.raises(InvalidArgument, match="not a mail's sequence"):
                read(database, after=after)
            assert everything(database) == before
    failures.check()


# Counting.


def test_the_count_of_pending_mail_is_exact(database: Database, clock: ManualClock) -> None:
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
    assert count(database) == 1, "expired mail does not count, although it is not swept yet"
    clock.advance_ms(SLOT_MS)
    assert sweep_all(database) == {"bob": 4}
    assert count(database) == 1


def test_counting_and_storing_cost_the_same_in_full_and_empty_mailboxes(database: Database) -> None:
    """Counting reads the header and does not scan the mailbox."""
    new = NewMail(str(BOB), b"x", "small")

    def costs() -> tuple[int, int]:
        stored = touches(database, mailboxes.send, ADA, BOB, new)
        counted = touches(database, mailboxes.summary, BOB)
        confirm(database, "small")
        return len(stored.keys) + stored.scans, len(counted.keys) + counted.scans

    send(database)
    small = costs()
    send_some(database, 900)
    assert costs() == small
    assert small[1] <= 3
    assert touches(database, mailboxes.join, BOB, "s").scans == 0


def test_the_cost_of_a_read_does_not_grow_with_confirmed_mail(database: Database) -> None:
    send_some(database, 500)
    for start in (0, 250):
        confirm(database, *(mail.id for mail in peek(database, limit=250)))
        assert count(database) == 250 - start
    send(database, b"new")
    seen = touches(database, mailboxes.deliver, BOB, after=-1, limit=50)
    assert seen.scans == 0, "what can be one of a few is asked for by its key"
    assert mailbox_keys.keys_of(BOB).mail_key(500) in seen.keys
    assert len(seen.keys) < 20


def test_count_returns_the_time_of_the_oldest_mail(database: Database, clock: ManualClock) -> None:
    def oldest_ms() -> int | None:
        return database.read(mailboxes.summary, BOB).oldest_ms

    assert oldest_ms() is None
    first = send(database)
    clock.advance_ms(1_000)
    send(database)
    assert oldest_ms() == START_MS
    confirm(database, first)
    assert oldest_ms() == START_MS + 1_000


# The limit of pending mail.


def test_sending_to_a_full_mailbox_fails_and_stores_nothing(database: Database) -> None:
    set_policy(database, pending_max=3)
    send_some(database, 3)
    before = everything(database)
    for sender in (ADA, EVE):
        with pytest.raises(MailboxFull, match="bob@main is full with 3 mails"):
            send(database, sender=sender)
    assert everything(database) == before
    send(database, to=EVE)
    confirm(database, peek(database)[1].id)
    send(database, b"again")
    assert bodies(database) == [b"0", b"2", b"again"]


def test_a_mailbox_holds_a_thousand_mails_by_default(database: Database) -> None:
    send_some(database, 1_000)
    with pytest.raises(MailboxFull, match="1,000"):
        send(database)
    assert count(database) == 1_000
    set_policy(database, pending_max=1_001)
    send(database)
    set_policy(database, pending_max=5)
    with pytest.raises(MailboxFull):
        send(database)
    assert count(database) == 1_001


def test_refusing_mail_reads_few_keys(database: Database) -> None:
    """Mails are large, and a refused sender retries."""
    set_policy(database, pending_max=300)
    send_some(database, 300)
    keys = mailbox_keys.keys_of(BOB)

    def refused(tx: Any) -> None:
        with pytest.raises(MailboxFull):
            mailboxes.send(tx, EVE, BOB, NewMail(str(BOB)))

    assert len([key for key in touches(database, refused).keys if key.startswith(keys.mail)]) == 1


def test_a_mailbox_full_of_expired_mail_accepts_new_mail(database: Database, clock: ManualClock) -> None:
    set_policy(database, pending_max=600)
    send_some(database, 600)
    clock.advance_ms(TTL_MS)
    send(database, b"new")
    assert bodies(database) == [b"new"]
    assert stored_count(database) == 600 - 256 + 1


def test_expired_mail_after_longer_lived_mail_frees_space(database: Database, clock: ManualClock) -> None:
    """After a policy change, expired mail can follow mail that has not expired."""
    send(database, b"long")
    set_policy(database, pending_max=3, ttl_seconds=60)
    send(database, b"short")
    send(database, b"short")
    with pytest.raises(MailboxFull):
        send(database)
    clock.advance_ms(60_000)
    send(database, b"new")
    assert (bodies(database), count(database)) == ([b"long", b"new"], 2)


def test_defaults_of_the_process_apply_until_the_universe_has_a_policy(database: Database, clock: ManualClock) -> None:
    """In a transaction of its own, in a group of functions that fail independently, and in reads."""
    database.defaults = {MailPolicy: MailPolicy(pending_max=2, ttl_seconds=60.0)}
    send(database)

    def send_two(tx: Transaction) -> list[Any]:
        calls = [(lambda tx, body: mailboxes.send(tx, ADA, BOB, NewMail("", body)), body) for body in (b"2", b"3")]
        tx.put(b"other", b"")  # Functions after a write get nested transactions.
        return run_batch(tx, calls)

    _, refused = database.transact(send_two)
    assert isinstance(refused, MailboxFull)
    assert database.read(mailboxes.policy_of, "main") == MailPolicy(pending_max=2, ttl_seconds=60.0)
    assert [mail.expires_ms - mail.sent_ms for mail in peek(database)] == [60_000, 60_000]
    set_policy(database)  # The built-in values, which win over those of the process.
    assert database.read(mailboxes.policy_of, "main") == MailPolicy()
    clock.advance_ms(60_000)
    send_some(database, 3)
    assert count(database) == 3


# Readers.


def test_join_returns_the_pending_count_and_replaces_the_reader(database: Database) -> None:
    send_some(database, 3)
    assert join(database, "one") == (3, -1)
    assert bodies(database, session="one", limit=1) == [b"0"]
    assert join(database, "two") == (3, -1)
    with pytest.raises(MailboxTaken, match="join it again"):
        deliver(database, session="one", after=0)
    assert bodies(database, session="two") == [b"0", b"1", b"2"]
    leave(database, "one")
    assert bodies(database, session="two") == [b"0", b"1", b"2"], "only the current reader can leave"


def test_a_session_that_left_cannot_read(database: Database) -> None:
    join(database, "one")
    leave(database, "one")
    leave(database, "one")
    with pytest.raises(MailboxTaken):
        deliver(database, session="one")
    with pytest.raises(MailboxTaken):
        deliver(database, EVE, session="never joined")
    assert database.read(mailboxes.summary, BOB).box.session is None


def test_a_reader_is_live_after_it_has_read_everything(database: Database) -> None:
    send_some(database, 4)
    join(database, "s")
    assert deliver(database, session="s", limit=2)[1] is None
    assert deliver(database, session="s", limit=2, after=1)[1] is None, "there might be more"
    assert deliver(database, session="s", limit=2, after=3) == ([], 4)
    assert deliver(database, limit=2, after=3) == ([], None), "only a session is live"


def test_live_mail_is_delivered_after_stored_mail(database: Database) -> None:
    """Live mail never overtakes stored mail."""
    send_some(database, 3)
    join(database, "s")
    first, _ = deliver(database, session="s", limit=2)
    send(database, b"meanwhile")
    second, live_from = deliver(database, session="s", after=first[-1].sequence)
    assert [mail.body for mail in first + second] == [b"0", b"1", b"2", b"meanwhile"]
    assert live_from == 4


def test_no_mail_is_lost_between_the_last_read_and_the_first_live_mail(database: Database) -> None:
    """The transaction that finds no more stored mail is the one that makes the reader live."""
    join(database, "s")
    send(database, b"before")
    found, live_from = deliver(database, session="s")
    assert ([mail.body for mail in found], live_from) == ([b"before"], 1)
    send(database, b"after")
    found, live_from = deliver(database, session="s", after=0)
    assert ([(mail.sequence, mail.body) for mail in found], live_from) == ([(1, b"after")], 1)


def test_a_receipt_says_whether_the_mail_was_stored(database: Database) -> None:
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


def test_mail_for_a_crashed_reader_counts_as_stored(database: Database) -> None:
    """A crashed reader does not leave. Mail that arrives afterwards is stored mail for the next reader."""
    join(database, "crashes")
    deliver(database, session="crashes")
    send(database, id="live")
    deliver(database, session="crashes")
    send(database, id="came later")
    deliver(database)
    confirm(database, "live", "came later")
    assert was_stored(database) == {"live": False, "came later": True}


def test_unconfirmed_mail_is_delivered_to_the_next_reader(database: Database) -> None:
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


def test_only_mail_delivered_to_the_live_session_counts_as_live(database: Database) -> None:
    join(database, "s")
    deliver(database, session="s")
    send(database, id="a")
    deliver(database)  # A peek does not change the reader.
    deliver(database, session="s")
    confirm(database, "a")
    assert was_stored(database) == {"a": False}


# Ids.


def test_pending_mail_that_is_sent_again_is_stored_once(database: Database) -> None:
    send(database, b"first", id="x")
    before = everything(database)
    assert send_again(database, "x")
    assert everything(database) == before
    assert not send_again(database, "x", to=EVE)
    confirm(database, "x")
    assert not send_again(database, "x")
    assert bodies(database) == [b"again"]


def test_another_senders_mail_id_is_refused(database: Database) -> None:
    """Otherwise a sender could believe that its mail is stored because another used its id."""
    send(database, b"eve's", sender=EVE, id="x")
    before = everything(database)
    with pytest.raises(InvalidArgument, match="another sender's pending mail"):
        send(database, b"ada's", id="x")
    assert everything(database) == before
    confirm(database, "x")
    send(database, b"ada's", id="x")
    assert bodies(database) == [b"ada's"]


@pytest.mark.parametrize("sender", [ADA, EVE])
def test_the_id_of_expired_mail_can_be_reused(database: Database, clock: ManualClock, sender: Address) -> None:
    """Expired mail must not suppress new mail as a duplicate."""
    send(database, b"old", id="x")
    send(database, b"old too")
    clock.advance_ms(TTL_MS)
    id, duplicate = database.transact(mailboxes.send, sender, BOB, NewMail(str(BOB), b"new", "x"))
    assert (id, duplicate) == ("x", False)
    assert (bodies(database), stored_count(database)) == ([b"new"], 2)
    assert confirm(database, "x") == 1
    assert stored_count(database) == 1


# Events for the activity log.


def events(database: Database, work: Callable[..., Any], *args: Any, **options: Any) -> list[Event]:
    def noting(tx: Transaction) -> list[Event]:
        work(tx, *args, **options)
        return tx.events

    return database.transact(noting)


def test_every_change_of_a_mail_emits_an_event(database: Database, clock: ManualClock) -> None:
    new = NewMail(str(BOB), b"x", "x")
    assert events(database, mailboxes.send, ADA, BOB, new) == [MailEvent("stored", BOB, "x", "ada@main", START_MS)]
    assert events(database, mailboxes.send, ADA, BOB, new) == []
    read = {"after": -1, "limit": 10}
    assert events(database, mailboxes.deliver, BOB, **read) == [MailEvent("delivered", BOB, "x", "ada@main", START_MS)]
    assert events(database, mailboxes.deliver, BOB, **read) == []
    assert events(database, mailboxes.confirm, BOB, ["x", "y"]) == [
        MailEvent("confirmed", BOB, "x", "ada@main", START_MS)
    ]
    send(database, id="y")
    clock.advance_ms(TTL_MS + SLOT_MS)
    due = database.read(mailboxes.due_entries, "main")
    assert events(database, mailboxes.sweep, "main", due) == [
        MailEvent("expired", BOB, "y", "ada@main", clock.now_ms())
    ]


def test_mail_in_a_slot_that_was_already_swept_is_swept_too(database: Database, clock: ManualClock) -> None:
    """A slot has one due entry per mailbox; after the clock is set back, the slot is used again."""
    send(database)
    clock.advance_ms(TTL_MS + SLOT_MS)
    assert sweep_all(database) == {"bob": 1}
    clock.jump_to_ms(START_MS)
    send(database)
    clock.advance_ms(TTL_MS + SLOT_MS)
    assert sweep_all(database) == {"bob": 1}
    assert (count(database), receipts_of(database)) == (0, [])


# Reads with a byte limit, and reads across gaps.


def test_a_read_stops_at_the_byte_limit(database: Database) -> None:
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
def test_reads_skip_gaps(database: Database, confirmed: Iterable[int]) -> None:
    send_some(database, 10)
    ids = {mail.sequence: mail.id for mail in peek(database)}
    remaining = [sequence for sequence in range(10) if sequence not in confirmed]
    for sequence in confirmed:
        confirm(database, ids[sequence])
    for after in range(-1, 10):
        found = [mail.sequence for mail in peek(database, after=after)]
        assert found == [sequence for sequence in remaining if sequence > after]
    confirm(database, *(ids[sequence] for sequence in remaining))
    assert (count(database), peek(database)) == (0, [])


def test_a_watch_of_the_reader_key_reports_new_readers_only(database: Database) -> None:
    key, changes = mailbox_keys.keys_of(BOB).reader, list[bytes]()

    def subscribe(keys: Collection[bytes], ranges: object) -> None:
        changes.extend(each for each in keys if each == key)

    stop = database.subscribe(subscribe)
    send(database)
    deliver(database)
    confirm(database, peek(database)[0].id)
    assert changes == []
    database.transact(mailboxes.join, BOB, "s")
    assert changes == [key]
    database.transact(mailboxes.leave, BOB, "s")
    assert changes == [key, key]
    stop()
