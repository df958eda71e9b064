"""The simulator finds no violations in mailboxes, and finds every deliberately broken mailbox."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import msgspec
import pytest

from fastness.backends.memory import MemoryDatabase
from fastness.errors import DamagedDatabase
from fastness.kv import Transaction
from fastness.layers import mailboxes as layer
from fastness.layers.mailboxes import Address, expiry, reading, sending
from fastness.layers.mailboxes import keys as mailbox_keys
from fastness.testing import mail_scenarios
from fastness.testing.faults import FaultyDatabase
from fastness.testing.histories import Operation, Outcome, Violation
from fastness.testing.mail_scenarios import mail
from fastness.testing.scenarios import play
from fastness.testing.simulation import Rates
from fastness.tiers import Tier
from fastness.wire.mail import Envelope, MailPolicy, MailReceipt, NewMail
from tests.support.depth import Depth

SEEDS_TO_FIND = 30  # An ordinary run would miss a fault that needs more seeds.
receipts = import_module("fastness.layers.mailboxes.receipts")


def test_small_batches_find_no_violation(monkeypatch: pytest.MonkeyPatch, depth: Depth, first_seed: int) -> None:
    """The limits of one sweep transaction, and of reads by key, are reached all the time."""
    monkeypatch.setattr(expiry, "MAIL_SWEEP_BATCH", 1)
    monkeypatch.setattr(expiry, "MAIL_SWEEP_MAILBOXES", 1)
    monkeypatch.setattr(reading, "MAIL_BATCH_MAX", 5)
    monkeypatch.setattr(mailbox_keys, "_GETS_MAX", 2)
    for seed in range(first_seed, first_seed + depth.faulty_seeds):
        play(mail, seed)


def test_frequent_faults_find_no_violation(depth: Depth, first_seed: int) -> None:
    for seed in range(first_seed, first_seed + depth.faulty_seeds):
        play(mail, seed, rates=Rates(refused=0.15, lost=0.2, late=0.5, crash=0.02, power=0.02))


def test_the_scenario_covers_every_kind_and_outcome() -> None:
    """A simulation without live readers, takeovers, expiry or refusals proves nothing."""
    operations: list[Operation] = []
    expired = 0
    for seed in range(15):
        mine = play(mail, seed).history.operations
        operations += mine
        sent = {each.argument["id"] for each in mine if each.kind == "send" and each.outcome is Outcome.OK}
        expired += len(
            sent - {found[1] for each in mine if each.kind == "read" and each.result for found in each.result[0]}
        )
    assert expired > 10, "some mail expired unread"
    met = {(each.kind, each.outcome) for each in operations}
    for kind in ("send", "join", "leave", "read", "confirm", "receipts", "sweep"):
        for outcome in Outcome:
            assert (kind, outcome) in met, (kind, outcome)
    assert any(".1" in each.client for each in operations), "a client crashed and restarted"
    known = [each for each in operations if each.outcome is Outcome.OK]
    assert any(each.kind == "send" and each.result[1] for each in known), "a mail was sent again while it waited"
    assert any(each.kind == "sweep" and each.result for each in known), "there was something to sweep"
    reads = [each.result for each in known if each.kind == "read"]
    live = [
        found for mails, live_from, _ in reads for found in mails if live_from is not None and found[0] >= live_from
    ]
    assert len(live) > 30, "mail was delivered to live readers"
    receipts_read = [receipt for each in known if each.kind == "receipts" for receipt in each.result[0]]
    assert {(each[3], each[5]) for each in receipts_read} == {
        ("stored", False),
        ("delivered", False),
        ("confirmed", False),
        ("confirmed", True),
    }


# Broken mailboxes, which the checker must detect.

Break = Callable[[pytest.MonkeyPatch], None]
deliver, join, confirm, send = layer.deliver, layer.join, layer.confirm, layer.send


def live_before_everything_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that has read a full page counts as having read everything."""
    read = reading._read

    def careless(*args: Any, **options: Any) -> tuple[list[Envelope], bool]:
        return read(*args, **options)[0], True

    monkeypatch.setattr(reading, "_read", careless)


def live_from_the_join_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mail that arrives while stored mail is read counts as live."""

    def hasty(tx: Transaction, address: Address, session: str) -> tuple[int, int]:
        answer = join(tx, address, session)
        keys = mailbox_keys.keys_of(address)
        box = mailbox_keys.box_of(tx, keys)
        box.live_from = box.next
        tx.put(keys.box, mailbox_keys.encode(box))
        return answer

    monkeypatch.setattr(layer, "join", hasty)


def live_in_a_separate_transaction(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mail stored between the last read and the switch to live is never delivered."""
    switched: dict[str, int] = {}

    def two_steps(tx: Transaction, address: Address, *, after: int, limit: int, session: str) -> Any:
        found, live_from = deliver(tx, address, after=after, limit=limit, session=session)
        if live_from is not None and session in switched:
            found = [mail for mail in found if mail.sequence >= switched[session]]
        elif live_from is not None:
            switched[session] = mailbox_keys.box_of(tx, mailbox_keys.keys_of(address)).next + 1
        return found, live_from

    monkeypatch.setattr(layer, "deliver", two_steps)


def mail_is_deleted_when_it_is_delivered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unconfirmed mail is lost when its reader crashes."""

    def hasty(tx: Transaction, address: Address, **options: Any) -> Any:
        found, live_from = deliver(tx, address, **options)
        keys = mailbox_keys.keys_of(address)
        box = mailbox_keys.box_of(tx, keys)
        for each in found:
            mailbox_keys.remove(tx, keys, box, each.sequence, mailbox_keys.mail_at(tx, keys, each.sequence))
        if found:
            mailbox_keys.save_after_removal(tx, keys, box)
        return found, live_from

    monkeypatch.setattr(layer, "deliver", hasty)


def a_cursor_skips_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def skipping(tx: Transaction, address: Address, *, after: int, **options: Any) -> Any:
        box = mailbox_keys.box_of(tx, mailbox_keys.keys_of(address))
        return deliver(tx, address, after=min(after + (after >= 0), box.next - 1), **options)

    monkeypatch.setattr(layer, "deliver", skipping)


def a_reader_starts_after_earlier_deliveries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mail that the last reader received and did not confirm is never delivered again."""

    def forgetful(tx: Transaction, address: Address, *, after: int, **options: Any) -> Any:
        box = mailbox_keys.box_of(tx, mailbox_keys.keys_of(address))
        return deliver(tx, address, after=max(after, box.delivered - 1), **options)

    monkeypatch.setattr(layer, "deliver", forgetful)


def the_newest_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Live mail overtakes stored mail."""

    def backwards(tx: Transaction, address: Address, **options: Any) -> Any:
        found, live_from = deliver(tx, address, **options)
        newest = layer.peek(tx, address, after=-1, limit=256)[-1:]
        if found and newest != found[:1]:
            found = newest
        return found, live_from

    monkeypatch.setattr(layer, "deliver", backwards)


def a_replaced_session_continues_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    def lenient(tx: Transaction, address: Address, *, session: str, **options: Any) -> Any:
        box = mailbox_keys.box_of(tx, mailbox_keys.keys_of(address))
        return deliver(tx, address, session=box.session or session, **options)

    monkeypatch.setattr(layer, "deliver", lenient)


def some_confirmations_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(tx: Transaction, address: Address, ids: list[str]) -> int:
        return confirm(tx, address, ids[:1]) + len(ids) - 1

    monkeypatch.setattr(layer, "confirm", forgetful)


def a_confirmation_removes_all_earlier_mail(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a confirmation were a cursor."""

    def greedy(tx: Transaction, address: Address, ids: list[str]) -> int:
        waiting = layer.peek(tx, address, after=-1, limit=256)
        positions = [position for position, each in enumerate(waiting) if each.id in ids]
        confirm(tx, address, [each.id for each in waiting[: max(positions, default=-1) + 1]])
        return len(ids)

    monkeypatch.setattr(layer, "confirm", greedy)


def a_full_mailbox_evicts_its_oldest_mail(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest mail is silently evicted."""

    def evicting(tx: Transaction, sender: Address, to: Address, new: NewMail) -> tuple[str, bool]:
        keys = mailbox_keys.keys_of(to)
        box = mailbox_keys.box_of(tx, keys)
        if box.count >= 8:
            mailbox_keys.remove(tx, keys, box, box.first, mailbox_keys.mail_at(tx, keys, box.first))
            mailbox_keys.save_after_removal(tx, keys, box)
        return send(tx, sender, to, new)

    monkeypatch.setattr(layer, "send", evicting)


def a_full_mailbox_drops_new_mail(monkeypatch: pytest.MonkeyPatch) -> None:
    """New mail is acknowledged and dropped."""

    def silent(tx: Transaction, sender: Address, to: Address, new: NewMail) -> tuple[str, bool]:
        if mailbox_keys.box_of(tx, mailbox_keys.keys_of(to)).count >= 8:
            return new.id or "", False
        return send(tx, sender, to, new)

    monkeypatch.setattr(layer, "send", silent)


def a_mailbox_has_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    def boundless(tx: Transaction, universe: str) -> MailPolicy:
        return msgspec.structs.replace(mailbox_keys.policy_of(tx, universe), pending_max=1_000)

    monkeypatch.setattr(sending, "policy_of", boundless)


def sequences_come_from_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two mails sent in the same millisecond have the same key."""
    store = sending._store

    def timed(tx: Transaction, keys: mailbox_keys.MailboxKeys, box: mailbox_keys.Box, each: mailbox_keys.Mail) -> None:
        box.next = (tx.now_ms - 1_700_000_000_000) // 1_000
        store(tx, keys, box, each)

    monkeypatch.setattr(sending, "_store", timed)


def duplicate_ids_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "_is_pending", lambda *args: False)


def mail_is_acknowledged_before_it_is_durable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A power loss reverts acknowledged mail."""
    commit = FaultyDatabase.commit

    def hasty(self: FaultyDatabase, work: Callable[..., Any], /, *args: Any, tier: Tier, may_lose: bool) -> Any:
        return commit(
            self, work, *args, tier=Tier.IMPORTANT if work is mail_scenarios._send else tier, may_lose=may_lose
        )

    monkeypatch.setattr(FaultyDatabase, "commit", hasty)


def expired_mail_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    read = reading._read

    class Early:
        """A transaction whose clock is slow."""

        def __init__(self, tx: Transaction) -> None:
            self._tx = tx
            self.now_ms = tx.now_ms - 60_000

        def __getattr__(self, name: str) -> Any:
            return getattr(self._tx, name)

    monkeypatch.setattr(reading, "_read", lambda tx, *args, **options: read(Early(tx), *args, **options))  # type: ignore[arg-type]


def a_sweep_removes_unexpired_mail(monkeypatch: pytest.MonkeyPatch) -> None:
    def greedy(tx: Transaction, universe: str, entries: list[bytes]) -> dict[str, int]:
        keys = mailbox_keys.keys_of(Address(universe, "bob"))
        box = mailbox_keys.box_of(tx, keys)
        if box.count:
            mailbox_keys.remove(tx, keys, box, box.first, mailbox_keys.mail_at(tx, keys, box.first))
            mailbox_keys.save_after_removal(tx, keys, box)
        return {}

    monkeypatch.setattr(layer, "sweep", greedy)


def a_sweep_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer, "due_entries", lambda tx, universe: [])


def set_was_stored(monkeypatch: pytest.MonkeyPatch, was_stored: Callable[[str], bool]) -> None:
    def written(sequence: int, id: str, to: str, state: str, at_ms: int, _: bool) -> MailReceipt:
        return MailReceipt(sequence, id, to, state, at_ms, was_stored(state))

    monkeypatch.setattr(receipts, "MailReceipt", written)


def was_stored_is_always_false(monkeypatch: pytest.MonkeyPatch) -> None:
    """`was_stored` is never set."""
    set_was_stored(monkeypatch, lambda state: False)


def was_stored_is_always_true(monkeypatch: pytest.MonkeyPatch) -> None:
    set_was_stored(monkeypatch, lambda state: state == "confirmed")


def delivery_receipts_are_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    def chatty(tx: Transaction, address: Address, **options: Any) -> Any:
        keys = mailbox_keys.keys_of(address)
        box = mailbox_keys.box_of(tx, keys)
        box.delivered = 0
        tx.put(keys.box, mailbox_keys.encode(box))
        return deliver(tx, address, **options)

    monkeypatch.setattr(layer, "deliver", chatty)


def confirmation_receipts_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    senders = [mailbox_keys.keys_of(Address("main", name)) for name in mail_scenarios._SENDERS]

    def silent(tx: Transaction, address: Address, ids: list[str]) -> int:
        before = [mailbox_keys.outgoing_of(tx, keys) for keys in senders]
        confirmed = confirm(tx, address, ids)
        for keys, outgoing in zip(senders, before, strict=True):
            for sequence in range(outgoing.next, mailbox_keys.outgoing_of(tx, keys).next):
                tx.delete(keys.receipt_key(sequence))
            tx.put(keys.outgoing, mailbox_keys.encode(outgoing))
        return confirmed

    monkeypatch.setattr(layer, "confirm", silent)


def receipts_are_lost_when_there_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receipts, "RECEIPTS_MAX", 6)


def a_receipt_cursor_skips_one(monkeypatch: pytest.MonkeyPatch) -> None:
    read = layer.receipts

    def skipping(tx: Transaction, address: Address, *, after: int, limit: int) -> Any:
        return read(tx, address, after=after, limit=limit)[after >= 0 :]

    monkeypatch.setattr(layer, "receipts", skipping)


def the_counter_ignores_expired_mail(monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(
        tx: Transaction, keys: mailbox_keys.MailboxKeys, box: mailbox_keys.Box, sequence: int, each: mailbox_keys.Mail
    ) -> None:
        mailbox_keys.remove(tx, keys, box, sequence, each)
        box.count += 1

    monkeypatch.setattr(expiry, "remove", careless)


def ids_are_not_removed_with_their_mail(monkeypatch: pytest.MonkeyPatch) -> None:
    remove = mailbox_keys.remove

    def careless(
        tx: Transaction, keys: mailbox_keys.MailboxKeys, box: mailbox_keys.Box, sequence: int, each: mailbox_keys.Mail
    ) -> None:
        remove(tx, keys, box, sequence, each)
        tx.put(keys.id_key(each.id), sequence.to_bytes(8, "big"))

    monkeypatch.setattr(reading, "remove", careless)


BROKEN: list[tuple[Break, str]] = [
    (live_before_everything_was_read, "is live from"),
    (live_from_the_join_on, "is live from|was_stored=False"),
    (live_in_a_separate_transaction, "did not return it|skipped"),
    (mail_is_deleted_when_it_is_delivered, "did not return it|skipped|is lost"),
    (a_cursor_skips_one, "skipped|did not return it|is live from"),
    (a_reader_starts_after_earlier_deliveries, "did not return it|skipped"),
    (the_newest_comes_first, "skipped|out of order"),
    (a_replaced_session_continues_reading, "although another session joined"),
    (some_confirmations_are_ignored, "after it was confirmed|no receipt that"),
    (a_confirmation_removes_all_earlier_mail, "is lost|did not return it|skipped"),
    (a_full_mailbox_evicts_its_oldest_mail, "is lost|did not return it|skipped"),
    (a_full_mailbox_drops_new_mail, "is lost|no receipt"),
    (a_mailbox_has_no_limit, "its limit of"),
    (sequences_come_from_the_clock, "was assigned to|is lost|its counter|skipped|did not return it|indexed"),
    (duplicate_ids_are_accepted, "of one id wait|sent .* times|indexed|its counter"),
    (mail_is_acknowledged_before_it_is_durable, "is lost|did not return it|skipped|was assigned to|has changed"),
    (expired_mail_is_read, "and expired at"),
    (a_sweep_removes_unexpired_mail, "is lost|did not return it|skipped"),
    (a_sweep_does_nothing, "keys are left"),
    (was_stored_is_always_false, "was_stored=False"),
    (was_stored_is_always_true, "was_stored=True"),
    (delivery_receipts_are_repeated, "repeats that"),
    (confirmation_receipts_are_missing, "has no receipt that"),
    (receipts_are_lost_when_there_are_many, "has no receipt|is missing"),
    (a_receipt_cursor_skips_one, "is missing|have the sequences"),
    (the_counter_ignores_expired_mail, "its counter|lacks a mail that it counts|mail is missing"),
    (ids_are_not_removed_with_their_mail, "indexed|is lost"),
]


@pytest.mark.parametrize(("break_it", "expected"), BROKEN, ids=[break_it.__name__ for break_it, _ in BROKEN])
def test_a_broken_mailbox_is_found(break_it: Break, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    break_it(monkeypatch)
    with pytest.raises((Violation, DamagedDatabase), match=expected):
        for seed in range(SEEDS_TO_FIND):
            play(mail, seed, rates=Rates(power=0.02))


class ForgetsCommits(MemoryDatabase):
    """Acknowledges every fortieth commit without storing it."""

    def _commit(self, tx: Transaction) -> None:
        if self._commits % 40 == 39:
            self._commits += 1
        else:
            super()._commit(tx)


class HalfCommits(MemoryDatabase):
    """Stores only the first write of every thirtieth commit."""

    def _commit(self, tx: Transaction) -> None:
        if self._commits % 30 == 29:
            for key in list(tx.writes)[1:]:
                del tx.writes[key]
        super()._commit(tx)


@pytest.mark.parametrize("broken", [ForgetsCommits, HalfCommits])
def test_a_broken_database_is_found(broken: type[MemoryDatabase]) -> None:
    with pytest.raises((Violation, DamagedDatabase)):
        for seed in range(SEEDS_TO_FIND):
            play(mail, seed, broken)
