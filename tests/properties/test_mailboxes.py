"""Random histories of mailboxes match a plain Python model, on every backend.

The model has mail in lists, receipts in lists, and a manual clock. It has no keys, watermarks or indexes; after every
step the stored data must agree with it. In addition each reader and each sender keeps what it received, and checks that
nothing is missing, duplicated or out of order.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from itertools import accumulate, count, repeat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from fastness.backends.memory import MemoryDatabase
from fastness.backends.rocksdb import RocksDatabase
from fastness.clock import IdSource
from fastness.errors import FastnessError, InvalidArgument, MailboxFull, MailboxTaken, SenderBlocked
from fastness.kv import Database, Subspace, Transaction
from fastness.layers import mailboxes
from fastness.layers.mailboxes import Address
from fastness.layers.mailboxes import keys as mailbox_keys
from fastness.plane import mail as desk
from fastness.testing.clock import ManualClock
from fastness.wire.mail import Envelope, MailPolicy, MailReceipt, NewMail, SendMail

SLOT_MS = 300_000  # Mail that expires in a slot of five minutes is swept at its end.
RECEIPTS_MAX = 8
AGENTS = ("ada", "bob", "eve")


# The model.


@dataclass
class ModelMail:
    """A mail in the model."""

    sequence: int
    id: str
    sender: str
    body: bytes
    sent_ms: int
    expires_ms: int
    live_for: tuple[str, int] | None  # The live session when it arrived, and its join.
    reached: bool = False  # And has read up to it.


@dataclass
class Box:
    """One mailbox."""

    mails: list[ModelMail] = field(default_factory=list)
    next: int = 0
    delivered_up_to: int = 0  # Mail below was delivered.
    reader: tuple[str, int] | None = None  # The session, and the number of its join.
    live_from: int | None = None  # Mail from here on arrives at a live reader.
    blocked: set[str] = field(default_factory=set)
    receipts: list[MailReceipt] = field(default_factory=list)  # For the agent's sent mail.
    receipts_next: int = 0
    seen: int = -1


class Model:
    """The model: mailboxes of a few agents, and all operations on them."""

    def __init__(self, universe: str, clock: ManualClock) -> None:
        self.universe = universe
        self.clock = clock
        self.policy = MailPolicy()
        self.boxes = {agent: Box() for agent in AGENTS}
        self.joins = count()
        self.due: set[tuple[int, str]] = set()  # The due index: which agents have something that expires in a slot.

    @property
    def now_ms(self) -> int:
        return self.clock.now_ms()

    @property
    def ttl_ms(self) -> int:
        return round(self.policy.ttl_seconds * 1_000)

    def address(self, agent: str) -> str:
        return f"{agent}@{self.universe}"

    def is_expired(self, mail: ModelMail) -> bool:
        return mail.expires_ms <= self.now_ms

    def refusal(self, sender: str, to: str, id: str | None) -> type[FastnessError] | None:
        """The error that sending a mail gets; None if it is stored."""
        box = self.boxes[to]
        if sender in box.blocked:
            return SenderBlocked
        same = [mail for mail in box.mails if mail.id == id and not self.is_expired(mail)]
        if same:
            return InvalidArgument if same[0].sender != self.address(sender) else None
        left = [mail for mail in box.mails if not self.is_expired(mail)]
        return MailboxFull if len(left) >= self.policy.pending_max else None

    def is_pending(self, to: str, id: str | None) -> bool:
        return any(mail.id == id and not self.is_expired(mail) for mail in self.boxes[to].mails)

    def remove_expired(self, to: str, id: str | None) -> None:
        """Expired mail with the same id is removed, and all expired mail if the mailbox is full."""
        box = self.boxes[to]
        box.mails = [mail for mail in box.mails if mail.id != id or not self.is_expired(mail)]
        if len(box.mails) >= self.policy.pending_max:
            box.mails = [mail for mail in box.mails if not self.is_expired(mail)]

    def store(self, sender: str, to: str, id: str, body: bytes) -> None:
        box, expires_ms = self.boxes[to], self.now_ms + self.ttl_ms
        live_for = box.reader if box.live_from is not None else None
        box.mails.append(ModelMail(box.next, id, self.address(sender), body, self.now_ms, expires_ms, live_for))
        box.next += 1
        self.due.add((expires_ms // SLOT_MS, to))
        self.write_receipt(sender, id, to, "stored")

    def write_receipt(self, sender: str, id: str, to: str, state: str, *, was_stored: bool = False) -> None:
        box = self.boxes[sender]
        box.receipts.append(MailReceipt(box.receipts_next, id, self.address(to), state, self.now_ms, was_stored))
        box.receipts_next += 1
        del box.receipts[:-RECEIPTS_MAX]
        self.due.add(((self.now_ms + self.ttl_ms) // SLOT_MS, sender))

    def join(self, agent: str, session: str) -> None:
        box = self.boxes[agent]
        box.reader, box.live_from = (session, next(self.joins)), None

    def leave(self, agent: str, session: str) -> None:
        box = self.boxes[agent]
        if box.reader is not None and box.reader[0] == session:
            box.reader = box.live_from = None

    def read(self, agent: str, after: int, limit: int) -> list[ModelMail]:
        box = self.boxes[agent]
        return [mail for mail in box.mails if mail.sequence > after and not self.is_expired(mail)][:limit]

    def deliver(
        self, agent: str, after: int, limit: int, *, session: bool, bytes_max: int | None = None
    ) -> list[ModelMail]:
        box, found = self.boxes[agent], self.read(agent, after, limit)
        is_all = len(found) < limit
        for place, size in enumerate(accumulate(len(mail.body) for mail in found), 1):
            if bytes_max is not None and size >= bytes_max:
                found, is_all = found[:place], False
                break
        for mail in found:
            if mail.sequence >= box.delivered_up_to:
                self.write_receipt(mail.sender.partition("@")[0], mail.id, agent, "delivered")
                box.delivered_up_to = mail.sequence + 1
        for mail in box.mails if session and found else ():
            if mail.live_for is not None and mail.live_for == box.reader and mail.sequence <= found[-1].sequence:
                mail.reached = True
        if session and is_all and box.live_from is None:
            box.live_from = box.next
        return found

    def confirm(self, agent: str, ids: list[str]) -> int:
        box, confirmed = self.boxes[agent], 0
        for id in ids:
            for mail in [mail for mail in box.mails if mail.id == id]:
                box.mails.remove(mail)
                confirmed += 1
                was_live = mail.reached and mail.live_for == box.reader
                self.write_receipt(mail.sender.partition("@")[0], id, agent, "confirmed", was_stored=not was_live)
        return confirmed

    def sweep(self) -> dict[str, int]:
        """Remove what has expired, for all agents with an entry in the due index."""
        counts: dict[str, int] = {}
        for slot, agent in sorted(self.due):
            if slot >= self.now_ms // SLOT_MS:
                break
            self.due.discard((slot, agent))
            box = self.boxes[agent]
            expired = [mail for mail in box.mails if self.is_expired(mail)]
            box.mails = [mail for mail in box.mails if not self.is_expired(mail)]
            if expired:
                counts[agent] = counts.get(agent, 0) + len(expired)
            while box.receipts and box.receipts[0].at_ms + self.ttl_ms <= self.now_ms:
                del box.receipts[0]
            if box.receipts:
                self.due.add(((box.receipts[0].at_ms + self.ttl_ms) // SLOT_MS, agent))
        return counts

    def expiry_times(self) -> list[int]:
        """All expiry times in the model."""
        expiry_times = {mail.expires_ms for box in self.boxes.values() for mail in box.mails}
        expiry_times |= {(slot + 1) * SLOT_MS for slot, _ in self.due}
        return sorted(time_ms for time_ms in expiry_times if time_ms > self.now_ms)


# Readers and senders, and what each of them has received.


@dataclass
class Reader:
    """A reader that joined a mailbox, and continues after the mail it received."""

    agent: str
    session: str
    after: int = -1
    seen: list[int] = field(default_factory=list)  # Sequences in the order of delivery.
    expired: set[int] = field(default_factory=set)  # Sequences that had expired when a later mail was delivered.
    live_from: int | None = None


@dataclass
class ReceiptReader:
    """A sender that reads its receipts, and continues after the last one."""

    after: int = -1
    seen: list[MailReceipt] = field(default_factory=list)


# Strategies.

agents = st.sampled_from(AGENTS)
ids = st.sampled_from((None, None, None, "x", "y", "z"))
bodies = st.binary(max_size=4)
limits = st.sampled_from((1, 2, 3, 50))
picks = st.integers(0, 1_000)
rarely = st.sampled_from((False, False, False, True))
policies = st.builds(
    MailPolicy,
    pending_max=st.sampled_from((1, 3, 5, 1_000)),
    ttl_seconds=st.sampled_from((1.0, 60.0, 301.5, 3_600.0, 604_800.0)),
)
moves_ms = st.sampled_from((1, 999, 1_000, 60_000, SLOT_MS, 3_600_000, 8 * 86_400_000))


class OnPurpose(Exception):
    """Aborts a transaction, which must write nothing."""


class Mailboxes(RuleBasedStateMachine):
    """A few agents and the model; every rule is a transaction."""

    openers: Iterator[Callable[..., Database]]  # Opens the database of one example.
    universes: Iterator[int]  # Examples may share a database, so each has its own universe.
    lasting: bool  # Whether data survives reopening the database.

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.opener = next(self.openers)
        self.seeds = count()
        self.database = self.open()
        self.universe = f"universe-{next(self.universes)}"
        self.model = Model(self.universe, self.clock)
        self.readers: list[Reader] = []
        self.receipt_readers = {agent: ReceiptReader() for agent in AGENTS}
        self.sessions = count()
        self.confirmed: set[tuple[str, int]] = set()  # Agent and sequence.
        self.known_ids = ["x", "y", "z", "never-was"]

    def open(self) -> Database:
        return self.opener(clock=self.clock, ids=IdSource(next(self.seeds)))

    def address(self, agent: str) -> Address:
        return Address(self.universe, agent)

    # Sending.

    @initialize(some=st.lists(st.tuples(agents, agents, ids, bodies), min_size=2, max_size=8))
    def initial_mail_is_sent(self, some: list[tuple[str, str, str | None, bytes]]) -> None:
        for sender, to, id, body in some:
            self.mail_is_sent(sender, to, id, body)

    @rule(sender=agents, to=agents, id=ids, body=bodies)
    def mail_is_sent(self, sender: str, to: str, id: str | None, body: bytes) -> None:
        new = NewMail(self.model.address(to), body, id)
        send = partial(self.database.transact, mailboxes.send, self.address(sender), self.address(to), new)
        refusal = self.model.refusal(sender, to, id)
        if refusal is not None:
            with pytest.raises(refusal):
                send()
            return
        expected = self.model.is_pending(to, id)
        stored, duplicate = send()
        assert duplicate == expected
        assert id in (None, stored)
        if not duplicate:
            self.model.remove_expired(to, id)
            self.model.store(sender, to, stored, body)
            self.known_ids.append(stored)

    @rule(sender=agents, some=st.lists(st.tuples(agents, ids, bodies), min_size=1, max_size=4))
    def a_batch_is_sent(self, sender: str, some: list[tuple[str, str | None, bytes]]) -> None:
        """Each mail has its own result: a refused one writes nothing and does not affect the others."""
        request = SendMail(sender, [NewMail(to, body, id) for to, id, body in some], self.universe)
        answers = self.database.transact(desk.send, request).mails
        for (to, id, body), answer in zip(some, answers, strict=True):
            refusal = self.model.refusal(sender, to, id)
            assert answer.code == (None if refusal is None else refusal.code)
            if refusal is MailboxFull:
                self.model.remove_expired(to, id)
            elif refusal is None:
                assert answer.duplicate == self.model.is_pending(to, id)
                if not answer.duplicate:
                    self.model.remove_expired(to, id)
                    self.model.store(sender, to, answer.id, body)
                    self.known_ids.append(answer.id)

    @rule(agent=agents, sender=agents, blocked=st.booleans())
    def a_sender_is_blocked_or_accepted_again(self, agent: str, sender: str, blocked: bool) -> None:
        self.database.transact(mailboxes.block, self.address(agent), self.address(sender), blocked=blocked)
        names = self.model.boxes[agent].blocked
        names.add(sender) if blocked else names.discard(sender)
        listed = self.database.read(mailboxes.blocks, self.address(agent), after="", limit=10)
        assert listed == sorted(map(self.model.address, names))

    @rule(policy=policies)
    def the_policy_changes(self, policy: MailPolicy) -> None:
        self.database.transact(mailboxes.set_policy, self.universe, policy)
        self.model.policy = policy

    # Reading.

    @rule(agent=agents)
    def a_reader_joins(self, agent: str) -> None:
        """The previous reader gets MailboxTaken at its next read."""
        session = f"session-{next(self.sessions)}"
        answer = self.database.transact(mailboxes.join, self.address(agent), session)
        pending = sum(not self.model.is_expired(mail) for mail in self.model.boxes[agent].mails)
        assert answer == (pending, self.model.boxes[agent].seen)
        self.model.join(agent, session)
        self.readers.append(Reader(agent, session))

    @precondition(lambda self: self.readers)
    @rule(pick=picks)
    def a_reader_rejoins_with_the_same_session(self, pick: int) -> None:
        reader = self.readers.pop(pick % len(self.readers))
        self.database.transact(mailboxes.join, self.address(reader.agent), reader.session)
        self.model.join(reader.agent, reader.session)
        self.readers.append(Reader(reader.agent, reader.session))

    @precondition(lambda self: self.readers)
    @rule(pick=picks, limit=limits, bytes_max=st.sampled_from((None, None, None, 1, 5)))
    def a_reader_continues(self, pick: int, limit: int, bytes_max: int | None) -> None:
        reader = self.readers[pick % len(self.readers)]
        deliver = partial(
            self.database.transact,
            mailboxes.deliver,
            self.address(reader.agent),
            after=reader.after,
            limit=limit,
            session=reader.session,
            bytes_max=bytes_max,
        )
        box = self.model.boxes[reader.agent]
        if box.reader is None or box.reader[0] != reader.session:
            with pytest.raises(MailboxTaken):
                deliver()
            self.readers.remove(reader)
            return
        expected = self.model.deliver(reader.agent, reader.after, limit, session=True, bytes_max=bytes_max)
        found, live_from = deliver()
        assert found == [self.envelope(reader.agent, mail) for mail in expected]
        assert live_from == box.live_from
        assert reader.live_from in (None, live_from), "live_from does not change while the reader stays"
        reader.live_from = live_from
        for mail in found:
            self.check_delivery(reader, mail)

    def check_delivery(self, reader: Reader, mail: Envelope) -> None:
        """Checks that do not depend on the model."""
        assert all(mail.sequence > seen for seen in reader.seen), "in order, and no mail twice"
        assert (reader.agent, mail.sequence) not in self.confirmed, "what was confirmed never comes again"
        before = [each for each in self.model.boxes[reader.agent].mails if each.sequence < mail.sequence]
        # Expired mail is passed over, also if the clock is set back afterwards.
        reader.expired.update(each.sequence for each in before if self.model.is_expired(each))
        missed = {each.sequence for each in before} - reader.expired - set(reader.seen)
        assert not missed, "nothing older was passed over, and nothing overtakes"
        reader.seen.append(mail.sequence)
        reader.after = mail.sequence

    @rule(
        agent=agents,
        some=st.lists(st.tuples(agents, bodies), min_size=1, max_size=3),
        limit=limits,
        stays=st.booleans(),
    )
    def a_reader_waits_until_mail_comes(
        self, agent: str, some: list[tuple[str, bytes]], limit: int, stays: bool
    ) -> None:
        """It confirms the mail, unless it has left before."""
        self.a_reader_joins(agent)
        place, box = len(self.readers) - 1, self.model.boxes[agent]
        while box.live_from is None:
            self.a_reader_continues(place, limit, None)
        for sender, body in some:
            self.mail_is_sent(sender, agent, None, body)
        self.a_reader_continues(place, 50, None)
        given = self.readers[place].seen
        if not stays:
            self.a_reader_leaves(place, "crashes")
        there = {mail.sequence: mail.id for mail in box.mails}
        self.confirm(agent, [there[sequence] for sequence in given if sequence in there] or ["never-was"])

    @precondition(lambda self: self.readers)
    @rule(pick=picks, how=st.sampled_from(("leaves", "crashes")))
    def a_reader_leaves(self, pick: int, how: str) -> None:
        """Its delivered mail may be unconfirmed."""
        reader = self.readers.pop(pick % len(self.readers))
        if how == "leaves":
            self.database.transact(mailboxes.leave, self.address(reader.agent), reader.session)
            self.model.leave(reader.agent, reader.session)

    @rule(agent=agents, pick=picks, limit=limits, peek=st.booleans())
    def mail_is_read_without_joining(self, agent: str, pick: int, limit: int, peek: bool) -> None:
        """After any sequence ever used."""
        after = pick % (self.model.boxes[agent].next + 1) - 1
        if peek:
            expected = self.model.read(agent, after, limit)
            found = self.database.read(mailboxes.peek, self.address(agent), after=after, limit=limit)
        else:
            expected = self.model.deliver(agent, after, limit, session=False)
            options: dict[str, Any] = {"after": after, "limit": limit}
            found, live_from = self.database.transact(mailboxes.deliver, self.address(agent), **options)
            assert live_from is None
        assert found == [self.envelope(agent, mail) for mail in expected]

    @rule(agent=agents, ahead=st.integers(0, 5))
    def unused_sequences_are_refused(self, agent: str, ahead: int) -> None:
        box = self.model.boxes[agent]
        for read, after in (
            (mailboxes.peek, box.next + ahead),
            (mailboxes.deliver, box.next + ahead),
            (mailboxes.receipts, box.receipts_next + ahead),
        ):
            with pytest.raises(InvalidArgument):
                self.database.transact(read, self.address(agent), after=after, limit=1)

    def envelope(self, agent: str, mail: ModelMail) -> Envelope:
        to, kind = self.model.address(agent), "application/octet-stream"
        return Envelope(
            mail.sequence, mail.id, mail.sender, to, mail.body, kind, mail.id, mail.sent_ms, mail.expires_ms
        )

    # Confirming.

    @precondition(lambda self: any(reader.seen for reader in self.readers))
    @rule(pick=picks, many=st.integers(1, 5), backwards=st.booleans())
    def a_reader_confirms_some_mail(self, pick: int, many: int, backwards: bool) -> None:
        """In any order, late, and after another reader joined."""
        readers = [reader for reader in self.readers if reader.seen]
        reader = readers[pick % len(readers)]
        there = {mail.sequence: mail.id for mail in self.model.boxes[reader.agent].mails}
        some = [there[sequence] for sequence in reader.seen if sequence in there][:many]
        if some:
            self.confirm(reader.agent, some[::-1] if backwards else some)

    @rule(agent=agents, some=st.lists(picks, min_size=1, max_size=4))
    def any_ids_are_confirmed(self, agent: str, some: list[int]) -> None:
        self.confirm(agent, [self.known_ids[pick % len(self.known_ids)] for pick in some])

    def confirm(self, agent: str, some: list[str]) -> None:
        places = {mail.id: mail.sequence for mail in self.model.boxes[agent].mails}
        expected = self.model.confirm(agent, some)
        assert self.database.transact(mailboxes.confirm, self.address(agent), some) == expected
        self.confirmed |= {(agent, places[id]) for id in some if id in places}

    # Receipts.

    @rule(agent=agents, limit=limits)
    def a_sender_reads_its_receipts(self, agent: str, limit: int) -> None:
        receipt_reader, box = self.receipt_readers[agent], self.model.boxes[agent]
        found = self.database.read(mailboxes.receipts, self.address(agent), after=receipt_reader.after, limit=limit)
        expected = [receipt for receipt in box.receipts if receipt.sequence > receipt_reader.after][:limit]
        assert found == expected
        receipt_reader.seen += found
        for receipt in found:
            receipt_reader.after = receipt.sequence

    @precondition(lambda self: any(box.receipts_next for box in self.model.boxes.values()))
    @rule(agent=agents, pick=picks)
    def a_sender_marks_receipts_seen(self, agent: str, pick: int) -> None:
        box = self.model.boxes[agent]
        sequence = pick % (box.receipts_next + 1) - 1
        self.database.transact(mailboxes.mark_receipts_seen, self.address(agent), sequence)
        box.seen = max(box.seen, sequence)

    # Time, sweeps and faults.

    @rule(milliseconds=moves_ms)
    def time_passes(self, milliseconds: int) -> None:
        self.clock.advance_ms(milliseconds)

    @precondition(lambda self: self.model.expiry_times())
    @rule(pick=picks, early=st.booleans())
    def time_passes_until_an_expiry(self, pick: int, early: bool) -> None:
        expiry_times = self.model.expiry_times()[:4]
        self.clock.jump_to_ms(expiry_times[pick % len(expiry_times)] - early)

    @rule(milliseconds=st.sampled_from((1, 2_000, SLOT_MS, 3_600_000)), really=rarely)
    def the_clock_is_set_back(self, milliseconds: int, really: bool) -> None:
        if really:
            self.clock.jump_to_ms(self.model.now_ms - milliseconds)

    @rule()
    def mail_is_swept(self) -> None:
        cleaned: dict[str, int] = {}
        for _ in range(1_000):
            entries = self.database.read(mailboxes.due_entries, self.universe)
            more = bool(entries)
            counts = self.database.transact(mailboxes.sweep, self.universe, entries)
            for agent, number in counts.items():
                cleaned[agent] = cleaned.get(agent, 0) + number
            if not more:
                break
        else:
            raise AssertionError("a sweep never ends")
        assert cleaned == self.model.sweep()

    @rule(sender=agents, to=agents)
    def a_failed_transaction_writes_nothing(self, sender: str, to: str) -> None:
        def work(tx: Transaction) -> None:
            mailboxes.sweep(tx, self.universe, mailboxes.due_entries(tx, self.universe))
            mailboxes.join(tx, self.address(to), "fails")
            mailboxes.confirm(tx, self.address(to), [mail.id for mail in self.model.boxes[to].mails])
            mailboxes.block(tx, self.address(to), self.address(sender))
            raise OnPurpose

        with pytest.raises(OnPurpose):
            self.database.transact(work)

    @precondition(lambda self: self.lasting)
    @rule()
    def the_database_is_reopened(self) -> None:
        self.database.close()
        self.database = self.open()

    # Invariants.

    @invariant()
    def stored_mail_equals_the_model(self) -> None:
        for agent, known in self.model.boxes.items():
            content = self.database.read(contents, self.address(agent))
            assert content.mails == [(mail.sequence, self.envelope(agent, mail)) for mail in known.mails]
            assert content.ids == {mail.id: mail.sequence for mail in known.mails}
            assert content.receipts == [(receipt.sequence, receipt) for receipt in known.receipts]
            assert content.reader == (None if known.reader is None else known.reader[0].encode())
            assert content.blocks == {self.model.address(sender) for sender in known.blocked}
            early, latest_ms = set(), 0
            for mail in known.mails:
                if mail.expires_ms < latest_ms:
                    early.add((mail.expires_ms, mail.sequence))
                latest_ms = max(latest_ms, mail.expires_ms)
            # It may be early because of a mail that is removed by now. Without the entry it would not be found.
            assert early <= content.early <= {(mail.expires_ms, mail.sequence) for mail in known.mails}

    @invariant()
    def counts_and_bounds_equal_the_model(self) -> None:
        for agent, known in self.model.boxes.items():
            box, pending, oldest_ms = self.database.read(mailboxes.summary, self.address(agent))
            assert (box.count, box.next) == (len(known.mails), known.next)
            # Scans start at the first existing entry, and skip removed ones.
            assert box.first == min([mail.sequence for mail in known.mails], default=box.next)
            outgoing = self.database.read(mailbox_keys.outgoing_of, mailbox_keys.keys_of(self.address(agent)))
            assert (outgoing.next, outgoing.seen) == (known.receipts_next, known.seen)
            assert outgoing.first == min([each.sequence for each in known.receipts], default=outgoing.next)
            left = [mail for mail in known.mails if not self.model.is_expired(mail)]
            assert (pending, oldest_ms) == (len(left), left[0].sent_ms if left else None)
            assert box.session == (None if known.reader is None else known.reader[0])
            assert box.live_from == known.live_from
        listed = self.database.read(mailboxes.mailboxes, self.universe, after="", limit=10)
        assert [(agent, found.pending) for agent, found in listed if found.box.count] == [
            (agent, sum(not self.model.is_expired(mail) for mail in known.mails))
            for agent, known in self.model.boxes.items()
            if known.mails
        ]

    @invariant()
    def the_due_index_covers_all_expiries(self) -> None:
        agent_keys = mailbox_keys.due_prefix(self.universe)
        keys = [
            key[len(agent_keys) :]
            for key, _ in self.database.read(lambda tx: tx.scan(agent_keys, agent_keys + b"\xff" * 9, limit=1_000))
        ]
        assert {(int.from_bytes(key[:8], "big"), key[8:].decode()) for key in keys} == self.model.due

    @invariant()
    def receipts_are_ordered_and_unique(self) -> None:
        for receipt_reader in self.receipt_readers.values():
            sequences = [receipt.sequence for receipt in receipt_reader.seen]
            assert sequences == sorted(set(sequences))
            lives: dict[tuple[str, str], list[str]] = {}
            for receipt in receipt_reader.seen:
                lives.setdefault((receipt.to, receipt.id), []).append(receipt.state)
            for (_, id), states in lives.items():
                if len(id) > 1:  # The test reuses these ids.
                    assert "".join(state[0] for state in states) in OUTCOMES

    def teardown(self) -> None:
        """A last reader gets all unconfirmed mail in order; then everything expires, and no keys are left."""
        try:
            for agent, known in self.model.boxes.items():
                reader = Reader(agent, "last")
                self.database.transact(mailboxes.join, self.address(agent), reader.session)
                self.model.join(agent, reader.session)
                self.readers = [reader]
                while known.live_from is None:
                    self.a_reader_continues(pick=0, limit=3, bytes_max=None)
                assert reader.seen == [mail.sequence for mail in known.mails if not self.model.is_expired(mail)]
                self.database.transact(mailboxes.leave, self.address(agent), reader.session)
                self.model.leave(agent, reader.session)
            self.clock.advance_ms(30 * 86_400_000)
            self.mail_is_swept()
            left = self.database.read(remaining_keys, self.universe)
            assert not left, left
        finally:
            self.database.close()


OUTCOMES = {"s", "sd", "sdc", "sc", "d", "dc", "c"}  # stored, delivered, confirmed; the first may have been deleted.


@dataclass
class Contents:
    """All stored data of an agent."""

    mails: list[tuple[int, Envelope]]
    ids: dict[str, int]
    early: set[tuple[int, int]]
    receipts: list[tuple[int, MailReceipt]]
    blocks: set[str]
    reader: bytes | None


def contents(tx: Transaction, address: Address) -> Contents:
    agent_keys = mailbox_keys.keys_of(address)

    def stored(prefix: bytes) -> list[tuple[bytes, bytes]]:
        return [(key[len(prefix) :], value) for key, value in tx.scan(prefix, prefix + b"\xff" * 65, limit=1_000)]

    decode = import_module("fastness.layers.mailboxes.receipts").decode
    return Contents(
        [(number(key), envelope(number(key), str(address), value)) for key, value in stored(agent_keys.mail)],
        {key.decode(): number(value) for key, value in stored(agent_keys.id)},
        {(number(key[:8]), number(key[8:])) for key, _ in stored(agent_keys.early)},
        [(number(key), decode(value)) for key, value in stored(agent_keys.receipt)],
        {key.decode() for key, _ in stored(agent_keys.blocks)},
        tx.get(agent_keys.reader),
    )


def envelope(sequence: int, to: str, value: bytes) -> Envelope:
    mail = mailbox_keys.decode_mail(value)
    about = (mail.content_type, mail.correlation_id, mail.sent_ms, mail.expires_ms)
    return Envelope(sequence, mail.id, mail.sender, to, mail.body, *about)


def number(encoded: bytes) -> int:
    return int.from_bytes(encoded, "big")


def remaining_keys(tx: Transaction, universe: str) -> list[bytes]:
    """The keys of a universe in which everything has expired, except mailbox headers and blocks."""
    kept: list[bytes] = []
    for agent in AGENTS:
        agent_keys = mailbox_keys.keys_of(Address(universe, agent))
        kept += [agent_keys.box, agent_keys.outgoing, agent_keys.blocks]
    keys = [key for key, _ in tx.scan(*Subspace("u", universe).range(), limit=1_000)]
    return [key for key in keys if not key.startswith(tuple(kept)) and b"mail-policy" not in key]


@pytest.fixture(autouse=True)
def few_receipts() -> Iterator[None]:
    """A small limit that is reached often."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(import_module("fastness.layers.mailboxes.receipts"), "RECEIPTS_MAX", RECEIPTS_MAX)
        yield


@pytest.mark.examples(80)
def test_mailboxes_in_memory_match_the_model(run_machine: Callable[..., None]) -> None:
    run_machine(Mailboxes, steps=40, openers=repeat(MemoryDatabase), universes=count(), lasting=False)


@pytest.mark.examples(30)
def test_mailboxes_with_small_batches_match_the_model(
    run_machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limits of one sweep are reached often."""
    sweeps = import_module("fastness.layers.mailboxes.expiry")
    monkeypatch.setattr(sweeps, "MAIL_SWEEP_BATCH", 2)
    monkeypatch.setattr(sweeps, "MAIL_SWEEP_MAILBOXES", 1)
    run_machine(Mailboxes, steps=40, openers=repeat(MemoryDatabase), universes=count(), lasting=False)


@pytest.mark.examples(25)
def test_mailboxes_on_rocksdb_match_the_model(run_machine: Callable[..., None], tmp_path: Path) -> None:
    fresh = (partial(RocksDatabase, tmp_path / str(number)) for number in count())
    run_machine(Mailboxes, steps=40, openers=fresh, universes=count(), lasting=True)


@pytest.mark.examples(12)
def test_mailboxes_on_postgres_match_the_model(
    run_machine: Callable[..., None], open_postgres: Callable[..., Database]
) -> None:
    run_machine(Mailboxes, steps=40, openers=repeat(open_postgres), universes=count(), lasting=True)
