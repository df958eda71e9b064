"""Receipts of sent mail, on every backend."""

from importlib import import_module

import pytest

from fastness.errors import (
    InvalidArgument,
)
from fastness.kv import Database
from fastness.layers import mailboxes
from fastness.layers.mailboxes import keys as mailbox_keys
from fastness.testing.clock import START_MS, ManualClock
from fastness.wire.mail import MailReceipt
from tests.unit.mailbox_calls import (
    ADA,
    BOB,
    EVE,
    SLOT_MS,
    TTL_MS,
    confirm,
    deliver,
    everything,
    join,
    peek,
    receipts_of,
    remaining_keys,
    send,
    send_some,
    set_policy,
    states,
    sweep,
    sweep_all,
)

# Receipts.


def test_a_sender_gets_receipts_for_stored_delivered_and_confirmed_mail(database: Database, clock: ManualClock) -> None:
    id = send(database)
    clock.advance_ms(10)
    deliver(database)
    clock.advance_ms(10)
    confirm(database, id)
    assert receipts_of(database) == [
        MailReceipt(0, id, "bob@main", "stored", START_MS),
        MailReceipt(1, id, "bob@main", "delivered", START_MS + 10),
        MailReceipt(2, id, "bob@main", "confirmed", START_MS + 20, was_stored=True),
    ]
    assert receipts_of(database, BOB) == []


def test_a_sender_gets_one_delivered_receipt_per_mail(database: Database) -> None:
    send(database, id="a")
    for _ in range(3):
        deliver(database)
    join(database, "s")
    deliver(database, session="s")
    send(database, id="b")
    for _ in range(2):
        deliver(database)
    assert states(database) == [("a", "stored"), ("a", "delivered"), ("b", "stored"), ("b", "delivered")]


def test_continued_reading_writes_receipts_for_new_mail_only(database: Database) -> None:
    for id in ("a", "b", "c"):
        send(database, id=id)
    deliver(database, limit=2)
    deliver(database, after=0, limit=2)
    assert states(database)[3:] == [("a", "delivered"), ("b", "delivered"), ("c", "delivered")]


def test_a_peek_writes_no_receipt(database: Database) -> None:
    send(database)
    before = everything(database)
    peek(database)
    assert everything(database) == before


def test_receipts_are_read_after_a_sequence(database: Database) -> None:
    for id in ("a", "b"):
        send(database, id=id)
    first = receipts_of(database, limit=1)
    assert states(database, after=first[-1].sequence) == [("b", "stored")]
    confirm(database, "b", "a")
    assert states(database, after=1) == [("b", "confirmed"), ("a", "confirmed")]
    assert states(database, after=3) == []


def test_agents_have_separate_receipts_and_may_send_to_themselves(database: Database) -> None:
    send(database, id="a")
    send(database, id="b", sender=EVE)
    send(database, id="c", sender=BOB)
    deliver(database)
    confirm(database, "a", "b", "c")
    for sender, id in ((ADA, "a"), (EVE, "b"), (BOB, "c")):
        assert states(database, sender) == [(id, "stored"), (id, "delivered"), (id, "confirmed")]


def test_the_number_of_unread_receipts_is_bounded(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_module("fastness.layers.mailboxes.receipts"), "RECEIPTS_MAX", 5)
    for number in range(9):
        send(database, id=f"m{number}")
    assert [receipt.sequence for receipt in receipts_of(database)] == [4, 5, 6, 7, 8]
    assert [receipt.sequence for receipt in receipts_of(database, after=1, limit=2)] == [4, 5]
    keys = mailbox_keys.keys_of(ADA)
    assert len([key for key, _ in everything(database) if key.startswith(keys.receipt)]) == 5


def test_expired_receipts_do_not_count_towards_the_bound(
    database: Database, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(import_module("fastness.layers.mailboxes.receipts"), "RECEIPTS_MAX", 5)
    send_some(database, 3)
    clock.advance_ms(TTL_MS + SLOT_MS)
    sweep_all(database)
    send_some(database, 5)
    assert [receipt.sequence for receipt in receipts_of(database)] == [3, 4, 5, 6, 7]


def test_receipts_are_kept_as_long_as_mail(database: Database, clock: ManualClock) -> None:
    send(database, id="a")
    clock.advance_ms(SLOT_MS)
    confirm(database, "a")
    clock.advance_ms(TTL_MS - SLOT_MS - 1)
    sweep_all(database)
    assert len(receipts_of(database)) == 2
    clock.advance_ms(SLOT_MS)
    sweep_all(database)
    assert states(database) == [("a", "confirmed")]
    clock.advance_ms(SLOT_MS)
    sweep_all(database)
    assert receipts_of(database) == []
    assert remaining_keys(database, ADA, BOB) == []


def test_many_receipts_are_removed_in_bounded_steps(database: Database, clock: ManualClock) -> None:
    send_some(database, 300)
    confirm(database, *(mail.id for mail in peek(database)))
    assert len(receipts_of(database)) == 556
    clock.advance_ms(TTL_MS + SLOT_MS)
    sweep(database)
    assert len(receipts_of(database)) == 300
    sweep_all(database)
    assert remaining_keys(database, ADA, BOB) == []


def test_receipts_expire_after_the_policy_ttl_was_raised(database: Database, clock: ManualClock) -> None:
    set_policy(database, ttl_seconds=60)
    send(database)
    set_policy(database, ttl_seconds=3_600)
    clock.advance_ms(60_000 + SLOT_MS)
    sweep_all(database)
    assert len(receipts_of(database)) == 1, "it is kept as long as mail is now"
    clock.advance_ms(3_600_000)
    sweep_all(database)
    assert remaining_keys(database, ADA, BOB) == []


def test_a_lowered_policy_ttl_applies_to_receipts_at_once(database: Database, clock: ManualClock) -> None:
    send(database)
    set_policy(database, ttl_seconds=60)
    send(database)
    clock.advance_ms(60_000 + SLOT_MS)
    sweep_all(database)
    assert receipts_of(database) == []


def test_the_last_seen_receipt_is_stored_and_only_grows(database: Database) -> None:
    for _ in range(3):
        send(database)
    assert join(database, "s", ADA) == (0, -1)
    database.transact(mailboxes.mark_receipts_seen, ADA, 1)
    database.transact(mailboxes.mark_receipts_seen, ADA, 0)
    assert join(database, "s", ADA) == (0, 1)
    assert len(receipts_of(database)) == 3


@pytest.mark.parametrize("sequence", [-2, 3, 1 << 70])
def test_an_unused_receipt_sequence_is_refused(database: Database, sequence: int) -> None:
    for _ in range(3):
        send(database)
    before = everything(database)
    with pytest.raises(InvalidArgument, match="not a receipt's sequence"):
        receipts_of(database, after=sequence)
    with pytest.raises(InvalidArgument, match="not a receipt's sequence"):
        database.transact(mailboxes.mark_receipts_seen, ADA, sequence)
    assert everything(database) == before
