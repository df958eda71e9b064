"""Decides whether mailboxes kept their promises: nothing lost, stranded, overtaken, or read once it was confirmed.

    of a recipient
    send      {"id", "from"}            -> [id, duplicate, when what waits under that id was sent]
    join      session                   a name that nobody used before
    leave     session
    read      [session, after, limit]   -> [[[sequence, id, sent_ms, expires_ms], ...], live_from, now_ms]
    confirm   [id, ...]                 -> anything
    of a sender
    receipts  [after, limit]            -> [[[sequence, id, to, state, at_ms, was_stored], ...], now_ms]

A session reads from -1 on, each time behind the last mail that it was told of. The moments in milliseconds are the
database's own, and do not go back; when a mail was sent may be None, if its id is sent once.
"""

from collections import defaultdict
from collections.abc import Collection, Hashable, Mapping
from typing import Final, NamedTuple

from holdfast.testing.histories.record import NEVER, History, Operation, Outcome, Violation, by_key

_KINDS: Final = ("send", "join", "leave", "read", "confirm")
_STATES: Final = ("stored", "delivered", "confirmed")


class Place(NamedTuple):
    """A mail in its mailbox, as whoever read it knows it."""

    sequence: int
    id: str
    sent_ms: int
    expires_ms: int


class Receipt(NamedTuple):
    """What a sender was told of a mail."""

    sequence: int
    id: str
    to: str
    state: str
    at_ms: int
    was_stored: bool


class _Box:
    """What a history says of one mailbox."""

    def __init__(self, key: Hashable, operations: list[Operation], left: Collection[Place]) -> None:
        self.key = key
        self.sends: dict[str, list[Operation]] = defaultdict(list)
        self.confirms: dict[str, list[Operation]] = defaultdict(list)
        self.places: dict[int, Place] = {}
        self.known: dict[int, int] = {}  # By when a mail was there for certain.
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
            for place in found_by(read):
                self._note(place, read)
        for place in left:
            self.places.setdefault(place.sequence, place)
        for sequence, place in self.places.items():
            for send in self.sends[place.id]:
                if send.outcome is Outcome.OK and send.result[2] in (place.sent_ms, None):
                    self.known[sequence] = min(send.returned, self.known.get(sequence, NEVER))

    def _note(self, place: Place, read: Operation) -> None:
        known = self.places.setdefault(place.sequence, place)
        if known != place:
            raise Violation(f"Sequence {place.sequence} of {self.key} was given to {known.id} and {place.id}", [read])
        self.known[place.sequence] = min(read.returned, self.known.get(place.sequence, NEVER))
        self.first_read.setdefault(place.sequence, read)

    def may_be_gone(self, place: Place, by: Operation) -> bool:
        """Whether somebody may have confirmed it before an operation had its answer."""
        return any(
            each.outcome is not Outcome.FAILED and each.invoked < by.returned for each in self.confirms[place.id]
        )


def found_by(read: Operation) -> list[Place]:
    """What a read was answered."""
    return [Place(*mail) for mail in read.result[0]]


def check_mailbox(
    history: History, key: Hashable, *, left: Collection[Place] = (), end_ms: int, ttl_ms: int
) -> dict[int, Place]:
    """Check what `history` says of the mailbox `key`, and return what was in it, by sequence.

    `left` is what is in it at the end, which is at `end_ms`; mail is kept for `ttl_ms`.

    Raises:
        Violation: acknowledged mail is lost, or mail is there that nobody sent; a reader was given mail out of order,
            passed over some, or was live before it had read everything; what was confirmed or over was read again.
    """
    box = _Box(key, by_key(history, *_KINDS).get(key, []), left)
    for read in box.reads:
        _check_read(box, read)
    _check_sessions(box)
    _check_ids(box, left)
    _check_nothing_lost(box, left, end_ms - ttl_ms)
    return box.places


def check_was_stored(history: History, key: Hashable, told: Mapping[str, bool]) -> None:
    """Check what senders were told of mail to `key` when it was confirmed: whether it had to wait, by id.

    Only of ids that were sent once.

    Raises:
        Violation: it did not wait although nobody was live when it came, or it did although somebody was.
    """
    box = _Box(key, by_key(history, *_KINDS).get(key, []), ())
    for sequence, place in box.places.items():
        sends = [each for each in box.sends[place.id] if each.outcome is not Outcome.FAILED]
        if place.id not in told or len(sends) != 1:
            continue
        (send,) = sends
        if told[place.id]:
            _check_it_had_to_wait(box, place, send)
            continue
        live = [each for each in box.reads if each.result[1] is not None and each.result[1] <= sequence]
        if not any(each.invoked < send.returned for each in (*live, *box.lost_reads)):
            raise Violation(f"{place.id} says that it did not wait, and nobody was live when it came", [send, *live])


def check_receipts(history: History, key: Hashable, *, ttl_ms: int) -> dict[int, Receipt]:
    """Check what the sender `key` was told of its mail, and return all of it by sequence.

    Raises:
        Violation: a receipt is missing, was another one before, or tells of what cannot have happened then.
    """
    found: dict[int, tuple[Receipt, Operation]] = {}
    reads = [each for each in by_key(history, "receipts").get(key, []) if each.outcome is Outcome.OK]
    for read in reads:
        for receipt in map(Receipt._make, read.result[0]):
            before, first = found.setdefault(receipt.sequence, (receipt, read))
            if before != receipt:
                raise Violation(f"Receipt {receipt.sequence} of {key} was another one before", [first, read])
    for read in reads:
        (after, limit), (receipts, now_ms) = read.argument, read.result
        sequences = [receipt[0] for receipt in receipts]
        if sequences and (sequences[0] <= after or sequences != list(range(sequences[0], sequences[-1] + 1))):
            raise Violation(f"Receipts of {key} behind {after} came as {sequences}", [read])
        end = sequences[-1] if len(sequences) == limit else max(found, default=-1)
        for sequence in sorted({*range(after + 1, end + 1)} & {*found} - {*sequences}):
            receipt, first = found[sequence]
            if first.returned < read.invoked and receipt.at_ms + ttl_ms > now_ms:
                raise Violation(f"Receipt {sequence} of {key} was there, and is missing behind {after}", [first, read])
    last: dict[tuple[str, str], int] = {}
    for sequence, (receipt, read) in sorted(found.items()):
        step, before_it = _STATES.index(receipt.state), last.get((receipt.to, receipt.id), -1)
        if 0 < step <= before_it:  # One that is sent again is stored again.
            message = f"Receipt {sequence} of {key} says that {receipt.id} was {receipt.state}, as one before it did"
            raise Violation(message, [read])
        last[receipt.to, receipt.id] = step
    return {sequence: receipt for sequence, (receipt, _) in sorted(found.items())}


def _check_read(box: _Box, read: Operation) -> None:
    _, after, limit = read.argument
    places, (_, _, now_ms) = found_by(read), read.result
    sequences = [place.sequence for place in places]
    if sequences != sorted(set(sequences)) or any(sequence <= after for sequence in sequences):
        raise Violation(f"Mail of {box.key} came out of order: {sequences} behind {after}", [read])
    for place in places:
        if place.expires_ms <= now_ms:
            raise Violation(f"{place.id} was read at {now_ms}, and was over at {place.expires_ms}", [read])
        for confirm in box.confirms[place.id]:
            was_there = box.known.get(place.sequence, NEVER) < confirm.invoked
            if was_there and confirm.outcome is Outcome.OK and confirm.returned < read.invoked:
                raise Violation(f"{place.id} was read again after it was confirmed", [confirm, read])
    for sequence, place in box.places.items():
        if sequence <= after or sequence in sequences or place.expires_ms <= now_ms:
            continue
        if box.known.get(sequence, NEVER) > read.invoked or box.may_be_gone(place, read):
            continue
        if places and sequence < sequences[-1]:
            raise Violation(f"{place.id} was passed over: {sequences[-1]} came before {sequence}", [read])
        if len(places) < limit:
            raise Violation(f"{place.id} was there, and a read with room for it did not find it", [read])


def _check_sessions(box: _Box) -> None:
    """Each session sees everything before it is live, and nothing once somebody else has joined."""
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
                    raise Violation(f"{session} reads {box.key} although another one joined", [mine, other, read])
            seen |= {place.sequence for place in found_by(read)}
            if live_from is not None and read.result[1] != live_from:
                raise Violation(f"{session} was live from {live_from}, and then from {read.result[1]}", [read])
            if live_from is None and read.result[1] is not None:
                live_from = read.result[1]
                _check_live(box, read, live_from, seen)


def _check_live(box: _Box, read: Operation, live_from: int, seen: set[int]) -> None:
    if any(lost.argument[0] == read.argument[0] for lost in box.lost_reads):
        return  # It may have been given everything by an answer that it never got.
    for sequence, place in box.places.items():
        if sequence >= live_from or sequence in seen or place.expires_ms <= read.result[2]:
            continue
        if box.known.get(sequence, NEVER) < read.invoked and not box.may_be_gone(place, read):
            raise Violation(f"A reader is live from {live_from} on and has not read {place.id}, at {sequence}", [read])


def _check_ids(box: _Box, left: Collection[Place]) -> None:
    """As many mails of an id as it was sent, and one at a time."""
    by_id: dict[str, set[int]] = defaultdict(set)
    for place in box.places.values():
        by_id[place.id].add(place.sequence)
    for id, sequences in by_id.items():
        sends = [each for each in box.sends[id] if each.outcome is not Outcome.FAILED]
        if len(sequences) > len(sends):
            seen = [box.first_read[each] for each in sequences if each in box.first_read]
            message = f"{id} was sent {len(sends)} times to {box.key}, and is there {len(sequences)} times"
            raise Violation(message, [*box.sends[id], *seen])
    for places, operations in [*((found_by(read), [read]) for read in box.reads), (list(left), [])]:
        ids = [place.id for place in places]
        if len(set(ids)) != len(ids):
            raise Violation(f"Two mails of one id wait for {box.key}: {sorted(ids)}", operations)


def _check_nothing_lost(box: _Box, left: Collection[Place], over_ms: int) -> None:
    there = {place.id for place in left}
    for id, sends in box.sends.items():
        for send in sends:
            if send.outcome is not Outcome.OK or id in there:
                continue
            if send.result[2] is not None and send.result[2] <= over_ms:
                continue
            confirms = [each for each in box.confirms[id] if each.outcome is not Outcome.FAILED]
            if not any(each.returned > send.invoked for each in confirms):
                raise Violation(f"{id} was acknowledged to its sender and is lost", [send, *confirms])


def _check_it_had_to_wait(box: _Box, place: Place, send: Operation) -> None:
    """It is not certain that somebody was live when it came, was given it, and stayed until it was confirmed."""
    confirms = [each for each in box.confirms[place.id] if each.outcome is not Outcome.FAILED]
    if len(confirms) != 1 or confirms[0].outcome is not Outcome.OK:
        return
    for live in box.reads:
        session = live.argument[0]
        if session is None or live.result[1] is None or live.returned > send.invoked:
            continue
        given = [
            read
            for read in box.reads
            if read.argument[0] == session and place in found_by(read) and read.returned < confirms[0].invoked
        ]
        changed = any(
            each.argument != session and each.returned > live.invoked and each.invoked < confirms[0].returned
            for each in box.joins
        ) or any(each.argument == session and each.invoked < confirms[0].returned for each in box.leaves)
        if given and not changed:
            message = f"{place.id} says that it waited, and {session} was live when it came"
            raise Violation(message, [live, send, given[0], confirms[0]])
