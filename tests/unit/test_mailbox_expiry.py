"""Expiry of mail: what readers and senders see, and the sweep, on every backend."""

import pytest

from fastness.kv import Database
from fastness.layers import mailboxes
from fastness.layers.mailboxes import Address, expiry
from fastness.layers.mailboxes import keys as mailbox_keys
from fastness.testing.clock import START_MS, ManualClock
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
    peek,
    remaining_keys,
    send,
    send_some,
    set_policy,
    states,
    stored_count,
    sweep,
    sweep_all,
    touches,
)

# Expiry.


def test_expired_mail_is_never_read(database: Database, clock: ManualClock) -> None:
    send(database, b"old")
    clock.advance_ms(TTL_MS - 1)
    send(database, b"young")
    join(database, "s")
    assert bodies(database, session="s") == [b"old", b"young"]
    clock.advance_ms(1)
    assert bodies(database) == bodies(database, session="s") == [b"young"]
    assert [mail.body for mail in peek(database)] == [b"young"]


def test_a_count_leaves_out_expired_mail(
    database: Database, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    send_some(database, 700)
    clock.advance_ms(TTL_MS - 1)
    send(database, b"week")
    set_policy(database, ttl_seconds=60)
    send(database, b"minute")
    assert (count(database), join(database, "s")[0]) == (702, 702)
    clock.advance_ms(1)
    found = database.read(mailboxes.summary, BOB)
    assert (found.pending, found.oldest_ms, found.box.count) == (2, START_MS + TTL_MS - 1, 702)
    clock.advance_ms(60_000)
    assert (bodies(database), count(database), join(database, "s")[0]) == ([b"week"], 1, 1)
    assert touches(database, mailboxes.summary, BOB).scans <= 6
    with monkeypatch.context() as patch:
        patch.setattr(expiry, "MAIL_EXPIRED_UNCOUNTED_MAX", 600)
        assert count(database) == 101, "the work is bounded"
    clock.advance_ms(TTL_MS)
    found = database.read(mailboxes.summary, BOB)
    assert (found.pending, found.oldest_ms, join(database, "s")[0]) == (0, None, 0)
    assert touches(database, mailboxes.summary, BOB).scans == 0, "all mail has expired when the last one has"


def test_a_read_skips_any_number_of_expired_mails(database: Database, clock: ManualClock) -> None:
    send_some(database, 700)
    clock.advance_ms(TTL_MS)
    send(database, b"new")
    seen = touches(database, mailboxes.deliver, BOB, after=-1, limit=1)
    assert seen.scans <= 4
    assert bodies(database, limit=1) == [b"new"]


def test_mail_read_before_its_expiry_can_be_confirmed_until_it_is_swept(database: Database, clock: ManualClock) -> None:
    one, other = send(database), send(database)
    deliver(database)
    clock.advance_ms(TTL_MS)
    assert confirm(database, one) == 1
    clock.advance_ms(SLOT_MS)
    sweep_all(database)
    assert confirm(database, other) == 0


def test_a_policy_applies_to_mail_sent_after_it(database: Database, clock: ManualClock) -> None:
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
    assert remaining_keys(database, ADA, BOB) == []


def test_mail_sent_after_the_clock_was_set_back_expires_first(database: Database, clock: ManualClock) -> None:
    clock.jump_to_ms(START_MS + DAY_MS)
    send(database, b"first", id="first")
    clock.jump_to_ms(START_MS)
    send(database, b"second")
    clock.jump_to_ms(START_MS + TTL_MS + SLOT_MS)
    assert bodies(database) == [b"first"]
    assert sweep_all(database) == {"bob": 1}
    confirm(database, "first")
    assert count(database) == 0


def test_confirming_early_expiring_mail_leaves_no_keys(database: Database, clock: ManualClock) -> None:
    send(database, id="long")
    set_policy(database, ttl_seconds=60)
    for id in ("a", "b"):
        send(database, id=id)
    confirm(database, "a")
    clock.advance_ms(60_000 + SLOT_MS)
    assert sweep_all(database) == {"bob": 1}
    confirm(database, "long")
    keys = mailbox_keys.keys_of(BOB)
    assert [key for key, _ in everything(database) if key.startswith(keys.prefix)] == [keys.box]


def test_mail_in_an_empty_mailbox_is_never_early(database: Database) -> None:
    """So it needs no entry in the index of early expiry."""
    send(database, id="long")
    confirm(database, "long")
    set_policy(database, ttl_seconds=60)
    send(database)
    early = mailbox_keys.keys_of(BOB).early
    assert not [key for key, _ in everything(database) if key.startswith(early)]


# Sweeping.


def test_a_sweep_removes_a_bounded_number_per_transaction(database: Database, clock: ManualClock) -> None:
    send_some(database, 600)
    clock.advance_ms(TTL_MS + SLOT_MS)
    removed: list[int] = []
    while (found := sweep(database))[1]:
        removed += found[0].values()
    assert removed == [168, 256, 176], "600 mails of bob's, behind 600 receipts of ada's"
    assert count(database) == 0
    assert remaining_keys(database, ADA, BOB) == []
    assert sweep(database) == ({}, False)


def test_one_sweep_limit_covers_regular_and_early_expiry(
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
    removed: list[int] = []
    while (found := sweep(database))[1]:
        removed += found[0].values()
    assert removed == [2, 2], "behind the fourth receipt of ada's"
    assert bodies(database) == [b"long"]


def test_a_sweep_covers_several_mailboxes_and_returns_counts_per_agent(database: Database, clock: ManualClock) -> None:
    agents = [Address("main", f"agent-{number}") for number in range(40)]
    for number, agent in enumerate(agents):
        for _ in range(number % 3):
            send(database, to=agent)
    clock.advance_ms(TTL_MS + SLOT_MS)
    assert sweep_all(database) == {agent.agent: number % 3 for number, agent in enumerate(agents) if number % 3}
    assert remaining_keys(database, ADA, *agents) == []


def test_a_sweep_keeps_unexpired_mail_and_other_universes(database: Database, clock: ManualClock) -> None:
    other = Address("other", "bob")
    send(database, b"old")
    send(database, b"elsewhere", to=other, sender=Address("other", "ada"))
    clock.advance_ms(TTL_MS - DAY_MS)
    send(database, b"young")
    clock.advance_ms(DAY_MS + SLOT_MS)
    assert sweep_all(database) == {"bob": 1}
    assert (stored_count(database), stored_count(database, other)) == (1, 1)
    assert bodies(database) == [b"young"]


def test_a_sweep_with_nothing_due_reads_no_mailbox(database: Database, clock: ManualClock) -> None:
    send_some(database, 300)
    clock.advance_ms(TTL_MS - 2 * SLOT_MS)
    seen = touches(database, mailboxes.due_entries, "main")
    assert (seen.keys, seen.scans) == (set(), 1)


def test_expired_mail_produces_no_receipt(database: Database, clock: ManualClock) -> None:
    id = send(database)
    clock.advance_ms(TTL_MS)
    send(database, id="later")
    clock.advance_ms(SLOT_MS)
    sweep_all(database)
    assert [state for state in states(database) if state[0] == id] == []
    assert states(database) == [("later", "stored")]
