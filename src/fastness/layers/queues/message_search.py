"""Search of the messages of a queue: by state, key, group, owner, error and age.

There is no index of these: a search reads the records of a queue, a bounded number in one transaction, in this order:

    "r"  ready          "p"  delayed      "w"  blocked by a group or a key
    "t"  leased         "o"  done or cancelled, as far as that is kept
    "dr", "dp", "dt"    dead: in the dead letter queue, where they are ready, delayed or leased

Areas that the wanted states exclude are not read. A position is an area, a key in it, and for leases the position of a
message in the lease. A message that changes its state between two pages may be found twice, or not at all.
"""

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Final, NamedTuple, get_args

from fastness.errors import InvalidArgument
from fastness.kv import Pair, Transaction, pages
from fastness.layers.queues import message_leases, outcomes
from fastness.layers.queues.counters import ready_ranges, total_counters
from fastness.layers.queues.keys import QueueKey, QueueKeys, keys_of
from fastness.layers.queues.message_leases import HeldLease
from fastness.layers.queues.outcomes import OutcomeRecord
from fastness.layers.queues.policies import dead_letter_queue, policy_of
from fastness.limits import DUE_BATCH_MAX, SEARCH_ENTRIES
from fastness.wire.queues import FoundMessage, FoundMessages, MessageState, SearchMessages
from fastness.wire.stored_messages import StoredMessage, decode, format_id

_STATES: Final[tuple[MessageState, ...]] = get_args(MessageState)


_STATES_OF: Final[dict[str, tuple[MessageState, ...]]] = {  # Of the messages in each area, in the order of a search.
    "r": ("ready",),
    "p": ("delayed",),
    "w": ("blocked",),
    "t": ("leased",),
    "o": ("done", "cancelled"),
    "dr": ("dead",),
    "dp": ("dead",),
    "dt": ("dead",),
}


class _Position(NamedTuple):
    """Where a search continues: at a key of an area, or at a message of the lease with this key."""

    area: str = "r"
    key: bytes = b""  # After the prefix of the area.
    message: int = 0

    def text(self) -> str:
        return f"{self.area}.{self.key.hex()}.{self.message}"


class _Read(NamedTuple):
    """A record that was read: what it has found, if anything, and where the search continues without it."""

    found: FoundMessage | None
    at: _Position


def search_messages(tx: Transaction, queue: QueueKey, wanted: SearchMessages) -> FoundMessages:
    """The messages that match among the next `SEARCH_ENTRIES` records of a queue, at most `limit` of them.

    Raises:
        InvalidArgument: `after` is not the `next` of a page.
    """
    matches = _filter(wanted, tx.now_ms)
    states = frozenset(wanted.states or _STATES)
    start, messages, scanned = _position(wanted.after), list[FoundMessage](), 0
    for each in _records(tx, queue, states, start):
        if len(messages) == wanted.limit or scanned == SEARCH_ENTRIES:
            return FoundMessages(messages, each.at.text(), scanned)
        scanned += 1
        if each.found is not None and each.found.state in states and matches(each.found):
            messages.append(each.found)
    return FoundMessages(messages, None, scanned)


def _filter(wanted: SearchMessages, now_ms: int) -> Callable[[FoundMessage], bool]:
    """Whether a message has the wanted key, group, owner, error and age."""
    older, newer = wanted.older_than_seconds, wanted.newer_than_seconds
    before_ms = None if older is None else now_ms - round(older * 1_000)
    since_ms = None if newer is None else now_ms - round(newer * 1_000)
    error = None if wanted.error is None else wanted.error.casefold()

    def matches(found: FoundMessage) -> bool:
        return (
            (wanted.key is None or found.key == wanted.key)
            and (wanted.group is None or found.group == wanted.group)
            and (wanted.owner is None or found.owner == wanted.owner)
            and (wanted.tag is None or wanted.tag in found.tags)
            and (before_ms is None or found.created_ms <= before_ms)
            and (since_ms is None or found.created_ms > since_ms)
            and (error is None or error in (found.last_error or "").casefold())
        )

    return matches


def _position(text: str) -> _Position:
    if not text:
        return _Position()
    try:
        area, key, message = text.split(".")
        position = _Position(area, bytes.fromhex(key), int(message))
    except ValueError:
        position = _Position("")
    if position.area not in _STATES_OF or position.message < 0:
        raise InvalidArgument(f"{text[:80]!r} is not a position in a search; use `next` of the page before")
    return position


def _records(tx: Transaction, queue: QueueKey, states: frozenset[MessageState], start: _Position) -> Iterator[_Read]:
    """The records of a queue in the order of a search, from a position on."""
    dead = dead_letter_queue(queue, policy_of(tx, queue))
    areas = list(_STATES_OF)
    for area in areas[areas.index(start.area) :]:
        if states.isdisjoint(_STATES_OF[area]):
            continue
        at = start if area == start.area else _Position(area)
        origin, keys = (queue.name, keys_of(dead)) if area[0] == "d" else (None, keys_of(queue))
        if area[-1] == "t":
            yield from _leased(tx, keys, at, origin)
        elif area == "o":
            yield from _outcomes(tx, keys, at)
        else:
            yield from _stored(tx, keys, at, origin)


def _stored(tx: Transaction, keys: QueueKeys, at: _Position, origin: str | None) -> Iterator[_Read]:
    """Messages that are ready, delayed or waiting; of a dead letter queue those that come from `origin`."""
    kind, state = at.area[-1], _STATES_OF[at.area][0]
    prefix, ranges = {
        "r": (keys.ready, ready_ranges(tx, keys)),
        "p": (keys.delayed, [keys.delayed_range()]),
        "w": (keys.waiting.prefix, [keys.waiting.range()]),
    }[kind]
    for begin, end in ranges:
        for key, value in _pairs(tx, max(begin, prefix + at.key), end):
            message = decode(value)
            found = None if origin is not None and message.origin != origin else found_message(message, state)
            yield _Read(found, _Position(at.area, key[len(prefix) :]))


def _leased(tx: Transaction, keys: QueueKeys, at: _Position, origin: str | None) -> Iterator[_Read]:
    for held, suffix, position in leases_from(tx, keys, at.key, at.message):
        message = None if held is None else held.message(position)
        if message is not None and origin is not None and message.origin != origin:
            message = None
        found = None if message is None else found_message(message, "leased" if origin is None else "dead")
        yield _Read(found, _Position(at.area, suffix, position))


def leases_from(
    tx: Transaction, keys: QueueKeys, entry: bytes, first: int
) -> Iterator[tuple[HeldLease | None, bytes, int]]:
    """Leased messages: the lease, its entry in the due index, and a position; from a position in an entry on.

    An entry that is no lease has None and 0: readers count it.
    """
    if total_counters(tx, keys).leased <= 0:
        return
    begin, end = keys.due_range(0)
    for key, value in _pairs(tx, max(begin, keys.due + entry), end):
        held, suffix = message_leases.held_at(tx, keys, key, value), key[len(keys.due) :]
        for position in (0,) if held is None else held.remaining():
            if suffix != entry or position >= first:
                yield held, suffix, position


def _outcomes(tx: Transaction, keys: QueueKeys, at: _Position) -> Iterator[_Read]:
    prefix = keys.outcomes
    for key, value in _pairs(tx, prefix + at.key, prefix + b"\xff" * 17):
        id = key[len(prefix) :]
        outcome = outcomes.decode_outcome(value)
        is_over = outcome.expires_ms <= tx.now_ms or outcome.state == "dead"  # The dead letter itself is found.
        yield _Read(None if is_over else found_outcome(id, outcome), _Position(at.area, id))


def _pairs(tx: Transaction, begin: bytes, end: bytes) -> Iterator[Pair]:
    """The pairs of a range, read in small pages: a search may end after any of them."""
    return chain.from_iterable(pages(tx, begin, end, items=DUE_BATCH_MAX)) if begin < end else iter(())


def found_message(message: StoredMessage, state: MessageState) -> FoundMessage:
    """A message of the queue, as far as its record has it."""
    job = message.job or message.origin_job
    is_leased = bool(message.lease_ref)
    return FoundMessage(
        id=format_id(message.id),
        state=state,
        priority=message.priority,
        created_ms=message.created_ms,
        attempts=message.attempts,
        failure_attempts=message.failures,
        max_attempts=message.max_attempts,
        correlation_id=message.correlation_id,
        owner=message.owner if is_leased else None,
        expires_ms=message.due_ms if is_leased else 0,
        due_ms=message.due_ms if state == "delayed" else 0,
        died_ms=message.died_ms,
        key=None if job is None else job.key,
        group=message.group,
        last_error=message.last_error,
        size=message.size,
        content_type=message.content_type,
        tags=message.tags,
    )


def found_outcome(id: bytes, outcome: OutcomeRecord) -> FoundMessage:
    """A message that is not in the queue any more, and whose outcome is kept."""
    return FoundMessage(
        id=format_id(id),
        state=outcome.state,
        priority=outcome.priority,
        created_ms=outcome.created_ms,
        attempts=outcome.attempts,
        failure_attempts=outcome.failures,
        max_attempts=outcome.max_attempts,
        correlation_id=outcome.correlation_id,
        owner=outcome.owner,
        key=outcome.key,
        group=outcome.group,
        finished_ms=outcome.finished_ms,
    )
