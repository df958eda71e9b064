"""Random lives of mailboxes on every backend are what plain lists and dicts say.

The model below is DESIGN section 7 in Python: mail in lists, receipts in lists, and a clock that is moved. It knows
nothing of keys, watermarks and indexes, and after every step all of those must say the same as it does. Beside it each
reader and each sender remembers for itself what it was told, and finds nothing missing, twice or out of order.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from itertools import accumulate, count, repeat
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from holdfast.backends.memory import MemoryDatabase
from holdfast.backends.postgres import PostgresDatabase
from holdfast.backends.rocksdb import RocksDatabase
from holdfast.clock import IdSource
from holdfast.errors import HoldfastError, InvalidArgument, MailboxFull, MailboxTaken, SenderBlocked
from holdfast.kv import Database, Subspace, Transaction
from holdfast.layers import mailboxes
from holdfast.layers.mailboxes import Address
from holdfast.layers.mailboxes import keys as mailbox_keys
from holdfast.plane import mail as desk
from holdfast.testing.clock import ManualClock
from holdfast.wire.mail import Envelope, MailPolicy, MailReceipt, NewMail, SendMail

SLOT_MS = 300_000  # What is over within five minutes is swept when they are over.
RECEIPTS_MAX = 8
AGENTS = ("ada", "bob", "eve")


# The model.


@dataclass
class Known:
    """What there is to know of a mail."""

    sequence: int
    id: str
    sender: str
    body: bytes
    sent_ms: int
    expires_ms: int
    live_for: tuple[str, int] | None  # Who was live when it came, and since which join.
    reached: bool = False  # And has read as far as it.


@dataclass
class Box:
    """One mailbox."""

    mails: list[Known] = field(default_factory=list)
    next: int = 0
    told_up_to: int = 0  # Mail below was delivered to somebody.
    reader: tuple[str, int] | None = None  # Its session, and which join of all that was.
    live_from: int | None = None  # Mail that comes from here on comes to somebody who has read everything.
    blocked: set[str] = field(default_factory=set)
    receipts: list[MailReceipt] = field(default_factory=list)  # Of what the agent has sent.
    receipts_next: int = 0
    seen: int = -1


class Model:
    """The mailboxes of a few agents, and everything that can happen to them."""

    def __init__(self, universe: str, clock: ManualClock) -> None:
        self.universe = universe
        self.clock = clock
        self.policy = MailPolicy()
        self.boxes = {agent: Box() for agent in AGENTS}
        self.joins = count()
        self.due: set[tuple[int, str]] = set()  # When something of whom is over: what a sweep goes by.

    @property
    def now_ms(self) -> int:
        return self.clock.now_ms()

    @property
    def ttl_ms(self) -> int:
        return round(self.policy.ttl_seconds * 1_000)

    def address(self, agent: str) -> str:
        return f"{agent}@{self.universe}"

    def is_over(self, mail: Known) -> bool:
        return mail.expires_ms <= self.now_ms

    def refusal(self, sender: str, to: str, id: str | None) -> type[HoldfastError] | None:
        """Why a mail is not taken, if it is not."""
        box = self.boxes[to]
        if sender in box.blocked:
            return SenderBlocked
        same = [mail for mail in box.mails if mail.id == id and not self.is_over(mail)]
        if same:
            return InvalidArgument if same[0].sender != self.address(sender) else None
        left = [mail for mail in box.mails if not self.is_over(mail)]
        return MailboxFull if len(left) >= self.policy.pending_max else None

    def waits(self, to: str, id: str | None) -> bool:
        return any(mail.id == id and not self.is_over(mail) for mail in self.boxes[to].mails)

    def make_room(self, to: str, id: str | None) -> None:
        """What is over goes if it has the same id, and all of it if the mailbox is full."""
        box = self.boxes[to]
        box.mails = [mail for mail in box.mails if mail.id != id or not self.is_over(mail)]
        if len(box.mails) >= self.policy.pending_max:
            box.mails = [mail for mail in box.mails if not self.is_over(mail)]

    def store(self, sender: str, to: str, id: str, body: bytes) -> None:
        box, expires_ms = self.boxes[to], self.now_ms + self.ttl_ms
        live_for = box.reader if box.live_from is not None else None
        box.mails.append(Known(box.next, id, self.address(sender), body, self.now_ms, expires_ms, live_for))
        box.next += 1
        self.due.add((expires_ms // SLOT_MS, to))
        self.tell(sender, id, to, "stored")

    def tell(self, sender: str, id: str, to: str, state: str, *, was_stored: bool = False) -> None:
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

    def read(self, agent: str, after: int, limit: int) -> list[Known]:
        box = self.boxes[agent]
        return [mail for mail in box.mails if mail.sequence > after and not self.is_over(mail)][:limit]

    def deliver(
        self, agent: str, after: int, limit: int, *, session: bool, bytes_max: int | None = None
    ) -> list[Known]:
        box, found = self.boxes[agent], self.read(agent, after, limit)
        is_all = len(found) < limit
        for place, size in enumerate(accumulate(len(mail.body) for mail in found), 1):
            if bytes_max is not None and size >= bytes_max:
                found, is_all = found[:place], False
                break
        for mail in found:
            if mail.sequence >= box.told_up_to:
                self.tell(mail.sender.partition("@")[0], mail.id, agent, "delivered")
                box.told_up_to = mail.sequence + 1
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
                self.tell(mail.sender.partition("@")[0], id, agent, "confirmed", was_stored=not was_live)
        return confirmed

    def sweep(self) -> dict[str, int]:
        """Everybody who has something that is over by the end of a slot; what is over of theirs goes."""
        counts: dict[str, int] = {}
        for slot, agent in sorted(self.due):
            if slot >= self.now_ms // SLOT_MS:
                break
            self.due.discard((slot, agent))
            box = self.boxes[agent]
            over = [mail for mail in box.mails if self.is_over(mail)]
            box.mails = [mail for mail in box.mails if not self.is_over(mail)]
            if over:
                counts[agent] = counts.get(agent, 0) + len(over)
            while box.receipts and box.receipts[0].at_ms + self.ttl_ms <= self.now_ms:
                del box.receipts[0]
            if box.receipts:
                self.due.add(((box.receipts[0].at_ms + self.ttl_ms) // SLOT_MS, agent))
        return counts

    def moments(self) -> list[int]:
        """When something is over, of all that is known."""
        moments = {mail.expires_ms for box in self.boxes.values() for mail in box.mails}
        moments |= {(slot + 1) * SLOT_MS for slot, _ in self.due}
        return sorted(moment for moment in moments if moment > self.now_ms)


# Those who take part, and what each of them remembers.


@dataclass
class Reader:
    """Somebody who joined a mailbox, and goes on behind what it was given."""

    agent: str
    session: str
    after: int = -1
    seen: list[int] = field(default_factory=list)  # Sequences, as they came.
    live_from: int | None = None


@dataclass
class Watcher:
    """A sender that reads its receipts, and goes on behind the last one."""

    after: int = -1
    seen: list[MailReceipt] = field(default_factory=list)


# What is done, at random.

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
    """Ends a transaction that must leave nothing behind."""


class Mailboxes(RuleBasedStateMachine):
    """A few agents and their model; every rule is a transaction."""

    openers: Iterator[Callable[..., Database]]  # Each example takes one; it opens that example's database.
    universes: Iterator[int]  # Those of all examples may share a database.
    lasting: bool  # Whether a database that is opened again finds what was written.

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.opener = next(self.openers)
        self.seeds = count()
        self.database = self.open()
        self.universe = f"universe-{next(self.universes)}"
        self.model = Model(self.universe, self.clock)
        self.readers: list[Reader] = []
        self.watchers = {agent: Watcher() for agent in AGENTS}
        self.sessions = count()
        self.confirmed: set[tuple[str, int]] = set()  # Of whom, and which sequence.
        self.known_ids = ["x", "y", "z", "never-was"]

    def open(self) -> Database:
        return self.opener(clock=self.clock, ids=IdSource(next(self.seeds)))

    def address(self, agent: str) -> Address:
        return Address(self.universe, agent)

    # Sending.

    @initialize(some=st.lists(st.tuples(agents, agents, ids, bodies), min_size=2, max_size=8))
    def there_is_mail(self, some: list[tuple[str, str, str | None, bytes]]) -> None:
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
        expected = self.model.waits(to, id)
        stored, duplicate = send()
        assert duplicate == expected
        assert id in (None, stored)
        if not duplicate:
            self.model.make_room(to, id)
            self.model.store(sender, to, stored, body)
            self.known_ids.append(stored)

    @rule(sender=agents, some=st.lists(st.tuples(agents, ids, bodies), min_size=1, max_size=4))
    def a_batch_is_sent(self, sender: str, some: list[tuple[str, str | None, bytes]]) -> None:
        """Each is answered by itself: one that is refused leaves nothing, and disturbs none of the others."""
        request = SendMail(sender, [NewMail(to, body, id) for to, id, body in some], self.universe)
        answers = self.database.transact(desk.send, request).mails
        for (to, id, body), answer in zip(some, answers, strict=True):
            refusal = self.model.refusal(sender, to, id)
            assert answer.code == (None if refusal is None else refusal.code)
            if refusal is MailboxFull:
                self.model.make_room(to, id)
            elif refusal is None:
                assert answer.duplicate == self.model.waits(to, id)
                if not answer.duplicate:
                    self.model.make_room(to, id)
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
    def the_policy_is_another(self, policy: MailPolicy) -> None:
        self.database.transact(mailboxes.set_policy, self.universe, policy)
        self.model.policy = policy

    # Reading.

    @rule(agent=agents)
    def somebody_joins(self, agent: str) -> None:
        """And whoever read there before is told so when it reads on."""
        session = f"session-{next(self.sessions)}"
        answer = self.database.transact(mailboxes.join, self.address(agent), session)
        assert answer == (len(self.model.boxes[agent].mails), self.model.boxes[agent].seen)
        self.model.join(agent, session)
        self.readers.append(Reader(agent, session))

    @precondition(lambda self: self.readers)
    @rule(pick=picks)
    def somebody_comes_back_under_the_same_name(self, pick: int) -> None:
        reader = self.readers.pop(pick % len(self.readers))
        self.database.transact(mailboxes.join, self.address(reader.agent), reader.session)
        self.model.join(reader.agent, reader.session)
        self.readers.append(Reader(reader.agent, reader.session))

    @precondition(lambda self: self.readers)
    @rule(pick=picks, limit=limits, bytes_max=st.sampled_from((None, None, None, 1, 5)))
    def a_reader_reads_on(self, pick: int, limit: int, bytes_max: int | None) -> None:
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
        assert reader.live_from in (None, live_from), "it is live from one moment on"
        reader.live_from = live_from
        for mail in found:
            self.reader_is_given(reader, mail)

    def reader_is_given(self, reader: Reader, mail: Envelope) -> None:
        """What must hold whatever the model says."""
        assert all(mail.sequence > seen for seen in reader.seen), "in order, and no mail twice"
        assert (reader.agent, mail.sequence) not in self.confirmed, "what was confirmed never comes again"
        older = self.model.read(reader.agent, -1, 1_000)
        missed = [each.sequence for each in older if each.sequence < mail.sequence and each.sequence not in reader.seen]
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
        """And confirms what it is given, unless it is gone before."""
        self.somebody_joins(agent)
        place, box = len(self.readers) - 1, self.model.boxes[agent]
        while box.live_from is None:
            self.a_reader_reads_on(place, limit, None)
        for sender, body in some:
            self.mail_is_sent(sender, agent, None, body)
        self.a_reader_reads_on(place, 50, None)
        given = self.readers[place].seen
        if not stays:
            self.a_reader_is_gone(place, "crashes")
        there = {mail.sequence: mail.id for mail in box.mails}
        self.confirm(agent, [there[sequence] for sequence in given if sequence in there] or ["never-was"])

    @precondition(lambda self: self.readers)
    @rule(pick=picks, how=st.sampled_from(("leaves", "crashes")))
    def a_reader_is_gone(self, pick: int, how: str) -> None:
        """With what it was given and did not confirm."""
        reader = self.readers.pop(pick % len(self.readers))
        if how == "leaves":
            self.database.transact(mailboxes.leave, self.address(reader.agent), reader.session)
            self.model.leave(reader.agent, reader.session)

    @rule(agent=agents, pick=picks, limit=limits, peek=st.booleans())
    def somebody_reads_without_joining(self, agent: str, pick: int, limit: int, peek: bool) -> None:
        """Behind any mail that ever was."""
        after = pick % (self.model.boxes[agent].next + 1) - 1
        if peek:
            expected = self.model.read(agent, after, limit)
            found = self.database.read(mailboxes.peek, self.address(agent), after=after, limit=limit)
        else:
            expected = self.model.deliver(agent, after, limit, session=False)
            options = {"after": after, "limit": limit}
            found, live_from = self.database.transact(mailboxes.deliver, self.address(agent), **options)
            assert live_from is None
        assert found == [self.envelope(agent, mail) for mail in expected]

    @rule(agent=agents, ahead=st.integers(0, 5))
    def nobody_reads_behind_what_never_was(self, agent: str, ahead: int) -> None:
        box = self.model.boxes[agent]
        for read, after in (
            (mailboxes.peek, box.next + ahead),
            (mailboxes.deliver, box.next + ahead),
            (mailboxes.receipts, box.receipts_next + ahead),
        ):
            with pytest.raises(InvalidArgument):
                self.database.transact(read, self.address(agent), after=after, limit=1)

    def envelope(self, agent: str, mail: Known) -> Envelope:
        to, kind = self.model.address(agent), "application/octet-stream"
        return Envelope(
            mail.sequence, mail.id, mail.sender, to, mail.body, kind, mail.id, mail.sent_ms, mail.expires_ms
        )

    # Confirming.

    @precondition(lambda self: any(reader.seen for reader in self.readers))
    @rule(pick=picks, many=st.integers(1, 5), backwards=st.booleans())
    def a_reader_confirms_some_of_what_it_was_given(self, pick: int, many: int, backwards: bool) -> None:
        """In any order, late, and although somebody else reads there by now."""
        readers = [reader for reader in self.readers if reader.seen]
        reader = readers[pick % len(readers)]
        there = {mail.sequence: mail.id for mail in self.model.boxes[reader.agent].mails}
        some = [there[sequence] for sequence in reader.seen if sequence in there][:many]
        if some:
            self.confirm(reader.agent, some[::-1] if backwards else some)

    @rule(agent=agents, some=st.lists(picks, min_size=1, max_size=4))
    def anything_is_confirmed(self, agent: str, some: list[int]) -> None:
        self.confirm(agent, [self.known_ids[pick % len(self.known_ids)] for pick in some])

    def confirm(self, agent: str, some: list[str]) -> None:
        places = {mail.id: mail.sequence for mail in self.model.boxes[agent].mails}
        expected = self.model.confirm(agent, some)
        assert self.database.transact(mailboxes.confirm, self.address(agent), some) == expected
        self.confirmed |= {(agent, places[id]) for id in some if id in places}

    # Receipts.

    @rule(agent=agents, limit=limits)
    def a_sender_reads_its_receipts_on(self, agent: str, limit: int) -> None:
        watcher, box = self.watchers[agent], self.model.boxes[agent]
        found = self.database.read(mailboxes.receipts, self.address(agent), after=watcher.after, limit=limit)
        expected = [receipt for receipt in box.receipts if receipt.sequence > watcher.after][:limit]
        assert found == expected
        watcher.seen += found
        for receipt in found:
            watcher.after = receipt.sequence

    @precondition(lambda self: any(box.receipts_next for box in self.model.boxes.values()))
    @rule(agent=agents, pick=picks)
    def a_sender_says_what_it_has_seen(self, agent: str, pick: int) -> None:
        box = self.model.boxes[agent]
        sequence = pick % (box.receipts_next + 1) - 1
        self.database.transact(mailboxes.see_receipts, self.address(agent), sequence)
        box.seen = max(box.seen, sequence)

    # Time, sweeps, and what goes wrong.

    @rule(milliseconds=moves_ms)
    def time_passes(self, milliseconds: int) -> None:
        self.clock.advance_ms(milliseconds)

    @precondition(lambda self: self.model.moments())
    @rule(pick=picks, early=st.booleans())
    def time_passes_until_something_is_over(self, pick: int, early: bool) -> None:
        moments = self.model.moments()[:4]
        self.clock.jump_to_ms(moments[pick % len(moments)] - early)

    @rule(milliseconds=st.sampled_from((1, 2_000, SLOT_MS, 3_600_000)), really=rarely)
    def the_clock_is_set_back(self, milliseconds: int, really: bool) -> None:
        if really:
            self.clock.jump_to_ms(self.model.now_ms - milliseconds)

    @rule()
    def mail_is_swept(self) -> None:
        cleaned: dict[str, int] = {}
        for _ in range(1_000):
            counts, more = self.database.transact(mailboxes.sweep, self.universe)
            for agent, number in counts.items():
                cleaned[agent] = cleaned.get(agent, 0) + number
            if not more:
                break
        else:
            raise AssertionError("a sweep never ends")
        assert cleaned == self.model.sweep()

    @rule(sender=agents, to=agents)
    def what_fails_leaves_nothing(self, sender: str, to: str) -> None:
        def work(tx: Transaction) -> None:
            mailboxes.sweep(tx, self.universe)
            mailboxes.join(tx, self.address(to), "fails")
            mailboxes.confirm(tx, self.address(to), [mail.id for mail in self.model.boxes[to].mails])
            mailboxes.block(tx, self.address(to), self.address(sender))
            raise OnPurpose

        with pytest.raises(OnPurpose):
            self.database.transact(work)

    @precondition(lambda self: self.lasting)
    @rule()
    def the_database_is_opened_again(self) -> None:
        self.database.close()
        self.database = self.open()

    # What must hold after every step.

    @invariant()
    def every_mail_is_where_the_model_says_and_nothing_else_is_there(self) -> None:
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
            # It may be noted as early for the sake of one that is gone by now. Without it, it would not be found.
            assert early <= content.early <= {(mail.expires_ms, mail.sequence) for mail in known.mails}

    @invariant()
    def counts_and_bounds_are_those_of_the_model(self) -> None:
        for agent, known in self.model.boxes.items():
            box, oldest_ms = self.database.read(mailboxes.count, self.address(agent))
            assert (box.count, box.next) == (len(known.mails), known.next)
            # A search begins where something is, and does not walk over what is gone.
            assert box.first == min([mail.sequence for mail in known.mails], default=box.next)
            outgoing = self.database.read(mailbox_keys.outgoing_of, mailbox_keys.keys_of(self.address(agent)))
            assert (outgoing.next, outgoing.seen) == (known.receipts_next, known.seen)
            assert outgoing.first == min([each.sequence for each in known.receipts], default=outgoing.next)
            assert oldest_ms == (known.mails[0].sent_ms if known.mails else None)
            assert box.session == (None if known.reader is None else known.reader[0])
            assert box.live_from == known.live_from
        listed = self.database.read(mailboxes.mailboxes, self.universe, after="", limit=10)
        assert [(agent, box.count, oldest_ms) for agent, box, oldest_ms in listed if box.count] == [
            (agent, len(known.mails), known.mails[0].sent_ms)
            for agent, known in self.model.boxes.items()
            if known.mails
        ]

    @invariant()
    def a_sweep_will_find_whatever_is_over_some_day(self) -> None:
        room = mailbox_keys.due_prefix(self.universe)
        keys = [
            key[len(room) :] for key, _ in self.database.read(lambda tx: tx.scan(room, room + b"\xff" * 9, limit=1_000))
        ]
        assert {(int.from_bytes(key[:8], "big"), key[8:].decode()) for key in keys} == self.model.due

    @invariant()
    def receipts_come_in_order_and_none_twice(self) -> None:
        for watcher in self.watchers.values():
            sequences = [receipt.sequence for receipt in watcher.seen]
            assert sequences == sorted(set(sequences))
            lives: dict[tuple[str, str], list[str]] = {}
            for receipt in watcher.seen:
                lives.setdefault((receipt.to, receipt.id), []).append(receipt.state)
            for (_, id), states in lives.items():
                if len(id) > 1:  # Those that the test chooses are chosen again.
                    assert "".join(state[0] for state in states) in OUTCOMES

    def teardown(self) -> None:
        """Whoever comes last finds what was not confirmed, in order; then all of it is over, and nothing is left."""
        try:
            for agent, known in self.model.boxes.items():
                reader = Reader(agent, "last")
                self.database.transact(mailboxes.join, self.address(agent), reader.session)
                self.model.join(agent, reader.session)
                self.readers = [reader]
                while known.live_from is None:
                    self.a_reader_reads_on(pick=0, limit=3, bytes_max=None)
                assert reader.seen == [mail.sequence for mail in known.mails if not self.model.is_over(mail)]
                self.database.transact(mailboxes.leave, self.address(agent), reader.session)
                self.model.leave(agent, reader.session)
            self.clock.advance_ms(30 * 86_400_000)
            self.mail_is_swept()
            left = self.database.read(leftovers, self.universe)
            assert not left, left
        finally:
            self.database.close()


OUTCOMES = {"s", "sd", "sdc", "sc", "d", "dc", "c"}  # stored, delivered, confirmed; the first of them may be forgotten.


@dataclass
class Contents:
    """Everything in an agent's room."""

    mails: list[tuple[int, Envelope]]
    ids: dict[str, int]
    early: set[tuple[int, int]]
    receipts: list[tuple[int, MailReceipt]]
    blocks: set[str]
    reader: bytes | None


def contents(tx: Transaction, address: Address) -> Contents:
    room = mailbox_keys.keys_of(address)

    def stored(prefix: bytes) -> list[tuple[bytes, bytes]]:
        return [(key[len(prefix) :], value) for key, value in tx.scan(prefix, prefix + b"\xff" * 65, limit=1_000)]

    decode = import_module("holdfast.layers.mailboxes.receipts").decode
    return Contents(
        [(number(key), envelope(number(key), str(address), value)) for key, value in stored(room.mail)],
        {key.decode(): number(value) for key, value in stored(room.id)},
        {(number(key[:8]), number(key[8:])) for key, _ in stored(room.early)},
        [(number(key), decode(value)) for key, value in stored(room.receipt)],
        {key.decode() for key, _ in stored(room.blocks)},
        tx.get(room.reader),
    )


def envelope(sequence: int, to: str, value: bytes) -> Envelope:
    mail = mailbox_keys.decode_mail(value)
    about = (mail.content_type, mail.correlation_id, mail.sent_ms, mail.expires_ms)
    return Envelope(sequence, mail.id, mail.sender, to, mail.body, *about)


def number(encoded: bytes) -> int:
    return int.from_bytes(encoded, "big")


def leftovers(tx: Transaction, universe: str) -> list[bytes]:
    """Keys of a universe in which everything is over but what stays for ever: what is known of a room, and blocks."""
    kept: list[bytes] = []
    for agent in AGENTS:
        room = mailbox_keys.keys_of(Address(universe, agent))
        kept += [room.box, room.outgoing, room.blocks]
    keys = [key for key, _ in tx.scan(*Subspace("u", universe).range(), limit=1_000)]
    return [key for key in keys if not key.startswith(tuple(kept)) and b"mail-policy" not in key]


@contextmanager
def few_receipts() -> Iterator[None]:
    """A bound that is met all the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(import_module("holdfast.layers.mailboxes.receipts"), "RECEIPTS_MAX", RECEIPTS_MAX)
        yield


def run_machine(openers: Iterator[Callable[..., Database]], *, examples: int, lasting: bool = False) -> None:
    machine = type("Machine", (Mailboxes,), {"openers": openers, "universes": count(), "lasting": lasting})
    bounds = settings(max_examples=examples, stateful_step_count=40, suppress_health_check=list(HealthCheck))
    with few_receipts():
        run_state_machine_as_test(machine, settings=bounds)


def often(examples: int) -> pytest.MarkDecorator:
    nightly = pytest.param(20 * examples, id="nightly", marks=pytest.mark.nightly)
    return pytest.mark.parametrize("examples", [pytest.param(examples, id="suite"), nightly])


@often(400)
def test_mailboxes_in_memory_do_what_lists_and_dicts_do(examples: int) -> None:
    run_machine(repeat(MemoryDatabase), examples=examples)


@often(100)
def test_small_batches_change_nothing(examples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ends of what one transaction sweeps are met all the time."""
    sweeps = import_module("holdfast.layers.mailboxes.expiry")
    monkeypatch.setattr(sweeps, "MAIL_SWEEP_BATCH", 2)
    monkeypatch.setattr(sweeps, "MAIL_SWEEP_ROOMS", 1)
    run_machine(repeat(MemoryDatabase), examples=examples)


@often(40)
def test_mailboxes_on_rocksdb_do_what_lists_and_dicts_do(examples: int, tmp_path: Path) -> None:
    fresh = (partial(RocksDatabase, tmp_path / str(number)) for number in count())
    run_machine(fresh, examples=examples, lasting=True)


@often(20)
def test_mailboxes_on_postgres_do_what_lists_and_dicts_do(examples: int, postgres_url: str) -> None:
    run_machine(repeat(partial(PostgresDatabase, postgres_url)), examples=examples, lasting=True)
