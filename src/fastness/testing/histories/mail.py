"""Checks the guarantees of mailboxes: no mail is lost, skipped, reordered, or read after its confirmation.

    key: a recipient
    send      {"id", "from"}            -> [id, duplicate, sent_ms of the waiting mail with that id]
    join      session                   a name that was not used before
    leave     session
    read      [session, after, limit]   -> [[[sequence, id, sent_ms, expires_ms], ...], live_from, now_ms]
    confirm   [id, ...]                 -> anything
    key: a sender
    receipts  [after, limit]            -> [[[sequence, id, to, state, at_ms, was_stored], ...], now_ms]

A session reads from -1 on, each time after the last mail that it received. Times in milliseconds are the database's
own, and do not go back. `sent_ms` may be None for an id that is sent once.
"""

from collections import defaultdict
from collections.abc import Collection, Hashable, Mapping
from itertools import starmap
from typing import Final, NamedTuple

from fastness.testing.histories.record import NEVER, History, Operation, Outcome, Violation, by_key
from fastness.wire.mail import MailReceipt

_KINDS: Final = ("send", "join", "leave", "read", "confirm")
_STATES: Final = ("stored", "delivered", "confirmed")


class MailboxEntry(NamedTuple):
    """A mail in its mailbox, as its reader saw it."""

    sequence: int
    id: str
    sent_ms: int
    expires_ms: int


class _Box:
    """The operations of a history on one mailbox."""

    def __init__(self, key: Hashable, operations: list[Operation], left: Collection[MailboxEntry]) -> None:
        self.key = key
        self.sends: dict[str, list[Operation]] = defaultdict(list)
        self.confirms: dict[str, list[Operation]] = defaultdict(list)
        self.entries: dict[int, MailboxEntry] = {}
        self.known: dict[int, int] = {}  # The position by which a mail was certainly stored.
        self.first_read: dict[int, Operation] = {}
        self.joins = [each for each in operations if each.kind == "join"]
        self.leaves = [each for each in operations if each.kind == "leave"]
        self.reads = [each for each in operations if each.kind == "read" and each.outcome is Outcome.OK]
        self.lost_reads = [each for each in operations if each.kind == "read" and each.outcome is Outcome.UNKNOWN]
        for operation in operations:
            if operation.kind == "send":
                self.sends[operation.argument["id"]].append(operation)
            elif operation.kind == "confirm":
                for id in operation.argument:
                    self.confirms[id].append(operation)
        for read in self.reads:
            for entry in entries_read(read):
                self._record_entry(entry, read)
        for entry in left:
            self.entries.setdefault(entry.sequence, entry)
        for sequence, entry in self.entries.items():
            for send in self.sends[entry.id]:
                if send.outcome is Outcome.OK and send.result[2] in (entry.sent_ms, None):
                    self.known[sequence] = min(send.returned, self.known.get(sequence, NEVER))

    def _record_entry(self, entry: MailboxEntry, read: Operation) -> None:
        known = self.entries.setdefault(entry.sequence, entry)
        if known != entry:
            raise Violation(
                f"Sequence {entry.sequence} of {self.key} was assigned to {known.id} and {entry.id}", [read]
            )
        self.known[entry.sequence] = min(read.returned, self.known.get(entry.sequence, NEVER))
        self.first_read.setdefault(entry.sequence, read)

    def may_be_confirmed(self, entry: MailboxEntry, by: Operation) -> bool:
        """Whether it may have been confirmed before the operation `by` returned."""
        return any(
            each.outcome is not Outcome.FAILED and each.invoked < by.returned for each in self.confirms[entry.id]
        )


def entries_read(read: Operation) -> list[MailboxEntry]:
    """The mail that a read returned."""
    return [MailboxEntry(*mail) for mail in read.result[0]]


def check_mailbox(
    history: History, key: Hashable, *, left: Collection[MailboxEntry] = (), end_ms: int, ttl_ms: int
) -> dict[int, MailboxEntry]:
    """Check the history of the mailbox `key`, and return its mail by sequence.

    `left` is its mail at the end, at the time `end_ms`. Mail expires after `ttl_ms`.

    Raises:
        Violation: acknowledged mail is lost, or mail was never sent; a reader received mail out of order, skipped some,
            or was live before it had read everything; confirmed or expired mail was read.
    """
    box = _Box(key, by_key(history, *_KINDS).get(key, []), left)
    for read in box.reads:
        _check_read(box, read)
    _check_sessions(box)
    _check_ids(box, left)
    _check_nothing_lost(box, left, end_ms - ttl_ms)
    return box.entries


def check_was_stored(history: History, key: Hashable, was_stored: Mapping[str, bool]) -> None:
    """Check the `was_stored` flags of confirmation receipts for mail to `key`: whether it had to wait, by id.

    Only for ids that were sent once.

    Raises:
        Violation: a mail did not wait although no reader was live when it arrived, or waited although one was.
    """
    box = _Box(key, by_key(history, *_KINDS).get(key, []), ())
    for sequence, entry in box.entries.items():
        sends = [each for each in box.sends[entry.id] if each.outcome is not Outcome.FAILED]
        if entry.id not in was_stored or len(sends) != 1:
            continue
        (send,) = sends
        if was_stored[entry.id]:
            _check_had_to_wait(box, entry, send)
            continue
        live = [each for each in box.reads if each.result[1] is not None and each.result[1] <= sequence]
        if not any(each.invoked < send.returned for each in (*live, *box.lost_reads)):
            raise Violation(f"{entry.id} has was_stored=False, but no reader was live when it arrived", [send, *live])


def check_receipts(history: History, key: Hashable, *, ttl_ms: int) -> dict[int, MailReceipt]:
    """Check the receipts of the sender `key`, and return them by sequence.

    Raises:
        Violation: a receipt is missing, changed, or reports a state that is not possible at that point.
    """
    found: dict[int, tuple[MailReceipt, Operation]] = {}
    reads = [each for each in by_key(history, "receipts").get(key, []) if each.outcome is Outcome.OK]
    for read in reads:
        for receipt in starmap(MailReceipt, read.result[0]):
            before, first = found.setdefault(receipt.sequence, (receipt, read))
            if before != receipt:
                raise Violation(f"Receipt {receipt.sequence} of {key} has changed", [first, read])
    for read in reads:
        (after, limit), (receipts, now_ms) = read.argument, read.result
        sequences = [receipt[0] for receipt in receipts]
        if sequences and (sequences[0] <= after or sequences != list(range(sequences[0], sequences[-1] + 1))):
            raise Violation(f"Receipts of {key} after {after} have the sequences {sequences}", [read])
        end = sequences[-1] if len(sequences) == limit else max(found, default=-1)
        for sequence in sorted({*range(after + 1, end + 1)} & {*found} - {*sequences}):
            receipt, first = found[sequence]
            if first.returned < read.invoked and receipt.at_ms + ttl_ms > now_ms:
                raise Violation(f"Receipt {sequence} of {key} existed, and is missing after {after}", [first, read])
    last: dict[tuple[str, str], int] = {}
    for sequence, (receipt, read) in sorted(found.items()):
        step, before_it = _STATES.index(receipt.state), last.get((receipt.to, receipt.id), -1)
        if 0 < step <= before_it:  # A mail that is sent again is stored again.
            message = f"Receipt {sequence} of {key} repeats that {receipt.id} was {receipt.state}"
            raise Violation(message, [read])
        last[receipt.to, receipt.id] = step
    return {sequence: receipt for sequence, (receipt, _) in sorted(found.items())}


def _check_read(box: _Box, read: Operation) -> None:
    _, after, limit = read.argument
    entries, (_, _, now_ms) = entries_read(read), read.result
    sequences = [entry.sequence for entry in entries]
    if sequences != sorted(set(sequences)) or any(sequence <= after for sequence in sequences):
        raise Violation(f"Mail of {box.key} is out of order: {sequences} after {after}", [read])
    for entry in entries:
        if entry.expires_ms <= now_ms:
            raise Violation(f"{entry.id} was read at {now_ms}, and expired at {entry.expires_ms}", [read])
        for confirm in box.confirms[entry.id]:
            was_there = box.known.get(entry.sequence, NEVER) < confirm.invoked
            if was_there and confirm.outcome is Outcome.OK and confirm.returned < read.invoked:
                raise Violation(f"{entry.id} was read again after it was confirmed", [confirm, read])
    for sequence, entry in box.entries.items():
        if sequence <= after or sequence in sequences or entry.expires_ms <= now_ms:
            continue
        if box.known.get(sequence, NEVER) > read.invoked or box.may_be_confirmed(entry, read):
            continue
        if entries and sequence < sequences[-1]:
            raise Violation(f"{entry.id} was skipped: {sequences[-1]} came before {sequence}", [read])
        if len(entries) < limit:
            raise Violation(f"{entry.id} was stored, and a read below its limit did not return it", [read])


def _check_sessions(box: _Box) -> None:
    """Each session reads everything before it is live, and nothing after another session has joined."""
    sessions: dict[str, list[Operation]] = defaultdict(list)
    for read in box.reads:
        if read.argument[0] is not None:
            sessions[read.argument[0]].append(read)
    for session, reads in sessions.items():
        mine = next((join for join in box.joins if join.argument == session), None)
        seen: set[int] = set()
        live_from: int | None = None
        for read in reads:
            for other in box.joins:
                joined = other.outcome is Outcome.OK and other.returned < read.invoked
                if other is not mine and joined and mine is not None and other.invoked > mine.returned:
                    raise Violation(f"{session} reads {box.key} although another session joined", [mine, other, read])
            seen |= {entry.sequence for entry in entries_read(read)}
            if live_from is not None and read.result[1] != live_from:
                raise Violation(f"{session} was live from {live_from}, and then from {read.result[1]}", [read])
            if live_from is None and read.result[1] is not None:
                live_from = read.result[1]
                _check_live(box, read, live_from, seen)


def _check_live(box: _Box, read: Operation, live_from: int, seen: set[int]) -> None:
    if any(lost.argument[0] == read.argument[0] for lost in box.lost_reads):
        return  # A lost answer may have contained it.
    for sequence, entry in box.entries.items():
        if sequence >= live_from or sequence in seen or entry.expires_ms <= read.result[2]:
            continue
        if box.known.get(sequence, NEVER) < read.invoked and not box.may_be_confirmed(entry, read):
            raise Violation(f"A reader is live from {live_from} and has not read {entry.id}, at {sequence}", [read])


def _check_ids(box: _Box, left: Collection[MailboxEntry]) -> None:
    """An id has at most as many mails as it was sent, and one at a time."""
    by_id: dict[str, set[int]] = defaultdict(set)
    for entry in box.entries.values():
        by_id[entry.id].add(entry.sequence)
    for id, sequences in by_id.items():
        sends = [each for each in box.sends[id] if each.outcome is not Outcome.FAILED]
        if len(sequences) > len(sends):
            seen = [box.first_read[each] for each in sequences if each in box.first_read]
            message = f"{id} was sent {len(sends)} times to {box.key}, and is stored {len(sequences)} times"
            raise Violation(message, [*box.sends[id], *seen])
    for entries, operations in [*((entries_read(read), [read]) for read in box.reads), (list(left), [])]:
        ids = [entry.id for entry in entries]
        if len(set(ids)) != len(ids):
            raise Violation(f"Two mails of one id wait for {box.key}: {sorted(ids)}", operations)


def _check_nothing_lost(box: _Box, left: Collection[MailboxEntry], expired_before_ms: int) -> None:
    present = {entry.id for entry in left}
    for id, sends in box.sends.items():
        for send in sends:
            if send.outcome is not Outcome.OK or id in present:
                continue
            if send.result[2] is not None and send.result[2] <= expired_before_ms:
                continue
            confirms = [each for each in box.confirms[id] if each.outcome is not Outcome.FAILED]
            if not any(each.returned > send.invoked for each in confirms):
                raise Violation(f"{id} was acknowledged to its sender and is lost", [send, *confirms])


def _check_had_to_wait(box: _Box, entry: MailboxEntry, send: Operation) -> None:
    """Raise if a session certainly was live when it arrived, received it, and stayed until it was confirmed."""
    confirms = [each for each in box.confirms[entry.id] if each.outcome is not Outcome.FAILED]
    if len(confirms) != 1 or confirms[0].outcome is not Outcome.OK:
        return
    for live in box.reads:
        session = live.argument[0]
        if session is None or live.result[1] is None or live.returned > send.invoked:
            continue
        given = [
            read
            for read in box.reads
            if read.argument[0] == session and entry in entries_read(read) and read.returned < confirms[0].invoked
        ]
        changed = any(
            each.argument != session and each.returned > live.invoked and each.invoked < confirms[0].returned
            for each in box.joins
        ) or any(each.argument == session and each.invoked < confirms[0].returned for each in box.leaves)
        if given and not changed:
            message = f"{entry.id} has was_stored=True, but {session} was live when it arrived"
            raise Violation(message, [live, send, given[0], confirms[0]])
