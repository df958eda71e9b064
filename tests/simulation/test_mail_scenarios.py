"""The simulator finds nothing wrong with mailboxes, and finds every mailbox that was broken on purpose."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import msgspec
import pytest

from holdfast.backends.memory import MemoryDatabase
from holdfast.errors import DamagedDatabase
from holdfast.kv import Transaction
from holdfast.layers import mailboxes as layer
from holdfast.layers.mailboxes import Address, expiry, reading, sending
from holdfast.layers.mailboxes import keys as mailbox_keys
from holdfast.testing import mail_scenarios
from holdfast.testing.faults import FaultyDatabase
from holdfast.testing.histories import Operation, Outcome, Violation
from holdfast.testing.mail_scenarios import mail
from holdfast.testing.scenarios import play
from holdfast.testing.simulation import Rates
from holdfast.tiers import Tier
from holdfast.wire.mail import Envelope, MailPolicy, MailReceipt, NewMail

SEEDS_TO_FIND = 30  # A fault that takes more seeds than that would slip through an ordinary run.
receipts = import_module("holdfast.layers.mailboxes.receipts")


def test_small_batches_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ends of what one transaction sweeps, and of what is asked for by its key, are met all the time."""
    monkeypatch.setattr(expiry, "MAIL_SWEEP_BATCH", 1)
    monkeypatch.setattr(expiry, "MAIL_SWEEP_ROOMS", 1)
    monkeypatch.setattr(reading, "MAIL_BATCH_MAX", 5)
    monkeypatch.setattr(mailbox_keys, "_FEW", 2)
    for seed in range(60):
        play(mail, seed)


def test_faults_at_every_turn_change_nothing() -> None:
    for seed in range(60):
        play(mail, seed, rates=Rates(refused=0.15, lost=0.2, late=0.5, crash=0.02, power=0.02))


def test_the_scenario_meets_everything_that_it_is_about() -> None:
    """A simulation in which nobody is ever live, late, taken over or refused proves nothing."""
    operations: list[Operation] = []
    expired = 0
    for seed in range(30):
        mine = play(mail, seed).history.operations
        operations += mine
        sent = {each.argument["id"] for each in mine if each.kind == "send" and each.outcome is Outcome.OK}
        expired += len(
            sent - {found[1] for each in mine if each.kind == "read" and each.result for found in each.result[0]}
        )
    assert expired > 10, "some was over before anybody read it"
    met = {(each.kind, each.outcome) for each in operations}
    for kind in ("send", "join", "leave", "read", "confirm", "receipts", "sweep"):
        for outcome in Outcome:
            assert (kind, outcome) in met, (kind, outcome)
    assert any(".1" in each.client for each in operations), "somebody crashed and started again"
    known = [each for each in operations if each.outcome is Outcome.OK]
    assert any(each.kind == "send" and each.result[1] for each in known), "a mail was sent again while it waited"
    assert any(each.kind == "sweep" and each.result for each in known), "there was something to sweep"
    reads = [each.result for each in known if each.kind == "read"]
    live = [
        found for mails, live_from, _ in reads for found in mails if live_from is not None and found[0] >= live_from
    ]
    assert len(live) > 30, "mail came to those who were there"
    told = [receipt for each in known if each.kind == "receipts" for receipt in each.result[0]]
    assert {(each[3], each[5]) for each in told} == {
        ("stored", False),
        ("delivered", False),
        ("confirmed", False),
        ("confirmed", True),
    }


# Mailboxes with a fault. A checker that does not find these proves nothing.

Break = Callable[[pytest.MonkeyPatch], None]
deliver, join, confirm, send = layer.deliver, layer.join, layer.confirm, layer.send


def live_before_everything_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has read as much as it asked for is taken for somebody who has read everything."""
    read = reading._read

    def careless(*args: Any, **options: Any) -> tuple[list[Envelope], bool]:
        return read(*args, **options)[0], True

    monkeypatch.setattr(reading, "_read", careless)


def live_from_the_join_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes while stored mail is read is taken for live."""

    def hasty(tx: Transaction, address: Address, session: str) -> tuple[int, int]:
        answer = join(tx, address, session)
        room = mailbox_keys.keys_of(address)
        box = mailbox_keys.box_of(tx, room)
        box.live_from = box.next
        tx.put(room.box, mailbox_keys.encode(box))
        return answer

    monkeypatch.setattr(layer, "join", hasty)


def live_in_a_transaction_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lesson 21: between the last look and the switch to live mail is stored that nobody is given any more."""
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
    """Lesson 20: delete-on-confirm was given up for delete-on-send."""

    def hasty(tx: Transaction, address: Address, **options: Any) -> Any:
        found, live_from = deliver(tx, address, **options)
        room = mailbox_keys.keys_of(address)
        box = mailbox_keys.box_of(tx, room)
        for each in found:
            mailbox_keys.remove(tx, room, box, each.sequence, mailbox_keys.mail_at(tx, room, each.sequence))
        if found:
            mailbox_keys.save_behind_the_first(tx, room, box)
        return found, live_from

    monkeypatch.setattr(layer, "deliver", hasty)


def a_cursor_skips_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def skipping(tx: Transaction, address: Address, *, after: int, **options: Any) -> Any:
        box = mailbox_keys.box_of(tx, mailbox_keys.keys_of(address))
        return deliver(tx, address, after=min(after + (after >= 0), box.next - 1), **options)

    monkeypatch.setattr(layer, "deliver", skipping)


def a_reader_begins_behind_what_was_delivered_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the last reader was given and did not confirm never comes again."""

    def forgetful(tx: Transaction, address: Address, *, after: int, **options: Any) -> Any:
        box = mailbox_keys.box_of(tx, mailbox_keys.keys_of(address))
        return deliver(tx, address, after=max(after, box.delivered - 1), **options)

    monkeypatch.setattr(layer, "deliver", forgetful)


def the_newest_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lesson 22: live traffic overtook stored mail."""

    def backwards(tx: Transaction, address: Address, **options: Any) -> Any:
        found, live_from = deliver(tx, address, **options)
        newest = layer.peek(tx, address, after=-1, limit=256)[-1:]
        if found and newest != found[:1]:
            found = newest
        return found, live_from

    monkeypatch.setattr(layer, "deliver", backwards)


def whoever_was_taken_over_reads_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def lenient(tx: Transaction, address: Address, *, session: str, **options: Any) -> Any:
        box = mailbox_keys.box_of(tx, mailbox_keys.keys_of(address))
        return deliver(tx, address, session=box.session or session, **options)

    monkeypatch.setattr(layer, "deliver", lenient)


def a_confirmation_is_forgotten_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(tx: Transaction, address: Address, ids: list[str]) -> int:
        return confirm(tx, address, ids[:1]) + len(ids) - 1

    monkeypatch.setattr(layer, "confirm", forgetful)


def a_confirmation_takes_everything_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a cursor would that is taken for what was confirmed."""

    def greedy(tx: Transaction, address: Address, ids: list[str]) -> int:
        waiting = layer.peek(tx, address, after=-1, limit=256)
        places = [place for place, each in enumerate(waiting) if each.id in ids]
        confirm(tx, address, [each.id for each in waiting[: max(places, default=-1) + 1]])
        return len(ids)

    monkeypatch.setattr(layer, "confirm", greedy)


def a_full_mailbox_forgets_its_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silent eviction."""

    def evicting(tx: Transaction, sender: Address, to: Address, new: NewMail) -> tuple[str, bool]:
        room = mailbox_keys.keys_of(to)
        box = mailbox_keys.box_of(tx, room)
        if box.count >= 8:
            mailbox_keys.remove(tx, room, box, box.first, mailbox_keys.mail_at(tx, room, box.first))
            mailbox_keys.save_behind_the_first(tx, room, box)
        return send(tx, sender, to, new)

    monkeypatch.setattr(layer, "send", evicting)


def a_full_mailbox_swallows_mail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Main lost messages when the send buffer filled."""

    def silent(tx: Transaction, sender: Address, to: Address, new: NewMail) -> tuple[str, bool]:
        if mailbox_keys.box_of(tx, mailbox_keys.keys_of(to)).count >= 8:
            return new.id or "", False
        return send(tx, sender, to, new)

    monkeypatch.setattr(layer, "send", silent)


def a_mailbox_has_no_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    policy_of = sending.policy_of

    def boundless(tx: Transaction, universe: str) -> MailPolicy:
        return msgspec.structs.replace(policy_of(tx, universe), pending_max=1_000)

    monkeypatch.setattr(sending, "policy_of", boundless)


def sequences_come_from_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lesson 23: two that are sent in one millisecond have one key."""
    store = sending._store

    def timed(tx: Transaction, room: mailbox_keys.Room, box: mailbox_keys.Box, each: mailbox_keys.Mail) -> None:
        box.next = (tx.now_ms - 1_700_000_000_000) // 1_000
        store(tx, room, box, each)

    monkeypatch.setattr(sending, "_store", timed)


def ids_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "_waits", lambda *args: False)


def mail_is_acknowledged_before_it_is_durable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lesson 29: acknowledged mail that a power failure takes back."""
    transact = FaultyDatabase.transact

    def hasty(self: FaultyDatabase, work: Callable[..., Any], /, *args: Any, tier: Tier = Tier.CRITICAL) -> Any:
        return transact(self, work, *args, tier=Tier.IMPORTANT if work is mail_scenarios._send else tier)

    monkeypatch.setattr(FaultyDatabase, "transact", hasty)


def what_is_over_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    read = reading._read

    class Early:
        """A transaction whose clock is late."""

        def __init__(self, tx: Transaction) -> None:
            self._tx = tx
            self.now_ms = tx.now_ms - 60_000

        def __getattr__(self, name: str) -> Any:
            return getattr(self._tx, name)

    monkeypatch.setattr(reading, "_read", lambda tx, *args, **options: read(Early(tx), *args, **options))


def a_sweep_takes_what_is_not_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def greedy(tx: Transaction, universe: str) -> tuple[dict[str, int], bool]:
        room = mailbox_keys.keys_of(Address(universe, "bob"))
        box = mailbox_keys.box_of(tx, room)
        if box.count:
            mailbox_keys.remove(tx, room, box, box.first, mailbox_keys.mail_at(tx, room, box.first))
            mailbox_keys.save_behind_the_first(tx, room, box)
        return {}, False

    monkeypatch.setattr(layer, "sweep", greedy)


def a_sweep_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer, "sweep", lambda tx, universe: ({}, False))


def receipts_say(monkeypatch: pytest.MonkeyPatch, was_stored: Callable[[str], bool]) -> None:
    def written(sequence: int, id: str, to: str, state: str, at_ms: int, _: bool) -> MailReceipt:
        return MailReceipt(sequence, id, to, state, at_ms, was_stored(state))

    monkeypatch.setattr(receipts, "MailReceipt", written)


def nothing_ever_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lesson 22: `was_stored` was never set by anyone."""
    receipts_say(monkeypatch, lambda state: False)


def everything_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    receipts_say(monkeypatch, lambda state: state == "confirmed")


def deliveries_are_told_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def chatty(tx: Transaction, address: Address, **options: Any) -> Any:
        room = mailbox_keys.keys_of(address)
        box = mailbox_keys.box_of(tx, room)
        box.delivered = 0
        tx.put(room.box, mailbox_keys.encode(box))
        return deliver(tx, address, **options)

    monkeypatch.setattr(layer, "deliver", chatty)


def confirmations_are_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    senders = [mailbox_keys.keys_of(Address("main", name)) for name in mail_scenarios._SENDERS]

    def silent(tx: Transaction, address: Address, ids: list[str]) -> int:
        before = [mailbox_keys.outgoing_of(tx, room) for room in senders]
        confirmed = confirm(tx, address, ids)
        for room, outgoing in zip(senders, before, strict=True):
            for sequence in range(outgoing.next, mailbox_keys.outgoing_of(tx, room).next):
                tx.delete(room.receipt_key(sequence))
            tx.put(room.outgoing, mailbox_keys.encode(outgoing))
        return confirmed

    monkeypatch.setattr(layer, "confirm", silent)


def receipts_are_lost_when_there_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receipts, "RECEIPTS_MAX", 6)


def a_receipt_cursor_skips_one(monkeypatch: pytest.MonkeyPatch) -> None:
    read = layer.receipts

    def skipping(tx: Transaction, address: Address, *, after: int, limit: int) -> Any:
        return read(tx, address, after=after, limit=limit)[after >= 0 :]

    monkeypatch.setattr(layer, "receipts", skipping)


def the_count_forgets_what_expired(monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(
        tx: Transaction, room: mailbox_keys.Room, box: mailbox_keys.Box, sequence: int, each: mailbox_keys.Mail
    ) -> None:
        mailbox_keys.remove(tx, room, box, sequence, each)
        box.count += 1

    monkeypatch.setattr(expiry, "remove", careless)


def ids_outlive_their_mail(monkeypatch: pytest.MonkeyPatch) -> None:
    remove = mailbox_keys.remove

    def careless(
        tx: Transaction, room: mailbox_keys.Room, box: mailbox_keys.Box, sequence: int, each: mailbox_keys.Mail
    ) -> None:
        remove(tx, room, box, sequence, each)
        tx.put(room.id_key(each.id), sequence.to_bytes(8, "big"))

    monkeypatch.setattr(reading, "remove", careless)


BROKEN: list[tuple[Break, str]] = [
    (live_before_everything_was_read, "is live from"),
    (live_from_the_join_on, "is live from|did not wait"),
    (live_in_a_transaction_of_its_own, "did not find it|passed over"),
    (mail_is_deleted_when_it_is_delivered, "did not find it|passed over|is lost"),
    (a_cursor_skips_one, "passed over|did not find it|is live from"),
    (a_reader_begins_behind_what_was_delivered_before, "did not find it|passed over"),
    (the_newest_comes_first, "passed over|out of order"),
    (whoever_was_taken_over_reads_on, "although another one joined"),
    (a_confirmation_is_forgotten_now_and_then, "after it was confirmed|not told that"),
    (a_confirmation_takes_everything_before_it, "is lost|did not find it|passed over"),
    (a_full_mailbox_forgets_its_oldest, "is lost|did not find it|passed over"),
    (a_full_mailbox_swallows_mail, "is lost|not told"),
    (a_mailbox_has_no_bound, "that it holds"),
    (sequences_come_from_the_clock, "was given to|is lost|counts|passed over|did not find it|knows"),
    (ids_are_forgotten, "of one id wait|sent .* times|knows|counts"),
    (mail_is_acknowledged_before_it_is_durable, "is lost|did not find it|passed over|was given to|another one before"),
    (what_is_over_is_read, "was over at"),
    (a_sweep_takes_what_is_not_over, "is lost|did not find it|passed over"),
    (a_sweep_does_nothing, "keys are left"),
    (nothing_ever_waited, "did not wait, and nobody was live"),
    (everything_waited, "says that it waited"),
    (deliveries_are_told_every_time, "as one before it did"),
    (confirmations_are_not_told, "was not told that"),
    (receipts_are_lost_when_there_are_many, "was not told|is missing"),
    (a_receipt_cursor_skips_one, "is missing|came as"),
    (the_count_forgets_what_expired, "counts|lacks a mail that it counts"),
    (ids_outlive_their_mail, "knows|is lost"),
]


@pytest.mark.parametrize(("break_it", "expected"), BROKEN, ids=[break_it.__name__ for break_it, _ in BROKEN])
def test_a_broken_mailbox_is_found(break_it: Break, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    break_it(monkeypatch)
    with pytest.raises((Violation, DamagedDatabase), match=expected):
        for seed in range(SEEDS_TO_FIND):
            play(mail, seed, rates=Rates(power=0.02))


class ForgetsCommits(MemoryDatabase):
    """Acknowledges every fortieth commit without keeping it."""

    def _commit(self, tx: Transaction) -> None:
        if self._commits % 40 == 39:
            self._commits += 1
        else:
            super()._commit(tx)


class HalfCommits(MemoryDatabase):
    """Keeps only the first write of every thirtieth commit."""

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
