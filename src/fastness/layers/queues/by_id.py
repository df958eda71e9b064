"""Messages by their ids: what state one is in, cancelling it, and changing it while it waits.

A message that is delayed or ready is found by its id. One with job options, or behind its group, has a location. A
plain message that is leased is searched for in the leases, a bounded number of entries of the due index at a time:
`SearchOn` says where another transaction has to continue. Every read is checked again by the transaction that writes.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from fastness.errors import FastnessError, InvalidArgument, MessageFinished, MessageLeased, MessageNotFound
from fastness.kv import Transaction
from fastness.layers.queues import (
    dead_letters,
    failures,
    key_flow,
    locations,
    message_leases,
    outcomes,
    sidecars,
    unique_keys,
)
from fastness.layers.queues.counters import QueueTransaction, total_counters
from fastness.layers.queues.enqueue import insert, move_ttl
from fastness.layers.queues.keys import QueueKey, place_of
from fastness.layers.queues.message_leases import HeldLease
from fastness.layers.queues.message_search import found_message, found_outcome
from fastness.layers.queues.outcomes import OutcomeRecord
from fastness.layers.queues.policies import dead_letter_queue, is_too_old, policy_of
from fastness.limits import FIND_ENTRIES, PRIORITY_MAX
from fastness.wire.queues import LEASE_BYTES, Failure, MessageInfo, MessageResult, MessageState
from fastness.wire.stored_messages import ID_BYTES, StoredMessage, decode, format_id, parse_id

_PRIORITIES: Final = range(PRIORITY_MAX + 1)


class SearchOn(NamedTuple):
    """The message may be in a lease after this key of the due index."""

    after: bytes


Leases = Mapping[bytes, bytes]  # The result of a search: the keys in the due index of leases, by the ids of messages.


class WaitingMessage(NamedTuple):
    """A message that is not leased, and where it is."""

    message: StoredMessage
    state: MessageState
    key: bytes


def find_waiting(
    queue_tx: QueueTransaction, id: bytes, priorities: Iterable[int] = _PRIORITIES
) -> WaitingMessage | None:
    """A message that is delayed, ready, or behind its group or key."""
    tx, keys = queue_tx.tx, queue_tx.keys
    key = keys.delayed_key(id)
    if (stored := tx.get(key)) is not None:
        return WaitingMessage(decode(stored), "delayed", key)
    location = locations.find(queue_tx, id)
    if location is None:
        for priority in priorities:
            key = keys.ready_key_at(priority, id)
            if (stored := tx.get(key)) is not None and (
                message := decode(stored)
            ).id == id:  # It may be another's turn.
                return WaitingMessage(message, "ready", key)
        return None
    kind, text = location
    if kind == locations.IN_GROUP:
        key = keys.waiting.key(text.decode()) + id
        stored = tx.get(key)
        return None if stored is None else WaitingMessage(decode(stored), "blocked", key)
    return _find_with_key(queue_tx, id, text.decode()) if kind == locations.WITH_KEY else None


def _find_with_key(queue_tx: QueueTransaction, id: bytes, name: str) -> WaitingMessage | None:
    tx, keys = queue_tx.tx, queue_tx.keys
    state = queue_tx.key_state(name)
    if state.ready_place[1:] == id:
        key = keys.ready + state.ready_at
        stored = tx.get(key)
        return None if stored is None else WaitingMessage(decode(stored), "ready", key)
    for priority in _PRIORITIES:
        key = keys.lane_key(name, place_of(priority, id))
        if (stored := tx.get(key)) is not None:
            return WaitingMessage(decode(stored), "blocked", key)
    return None


def take(queue_tx: QueueTransaction, found: WaitingMessage) -> StoredMessage:
    """Take a message out that is not leased."""
    message = found.message
    if found.state == "delayed":
        queue_tx.remove_delayed(message)
    elif found.state == "ready":
        key_flow.remove_ready(queue_tx, message)
    elif message.key is None or not key_flow.remove_waiting(queue_tx, message, message.key):
        queue_tx.tx.delete(found.key)
        queue_tx.counters.blocked -= 1
    if found.state == "blocked" or message.job is not None:
        locations.clear(queue_tx, message.id)
    return message


def get(
    tx: Transaction, queue: QueueKey, id: str, *, leases: Leases | None = None, searches: bool = True
) -> MessageInfo | SearchOn:
    """What is known about a message; or where to search for it.

    `leases` is the result of a search. Without one, and if this call `searches`, it reads the first leases.

    Raises:
        InvalidArgument: `id` is not a message id.
        MessageNotFound: there is no such message, and nothing is kept about it.
    """
    queue_tx, number = QueueTransaction(tx, queue), parse_id(id)
    found = find_waiting(queue_tx, number) or _find_leased(queue_tx, number, leases, searches=searches)
    if isinstance(found, SearchOn):
        return found
    if found is None:
        return finished_info(queue_tx, number)
    if isinstance(found, WaitingMessage):
        message, state = found.message, found.state
    else:
        message, state = found[0].message(found[1]), "leased"
    if is_too_old(policy_of(tx, queue), message, tx.now_ms):
        return finished_info(queue_tx, number)
    return _info(queue_tx, message, state)


def finished_info(queue_tx: QueueTransaction, id: bytes) -> MessageInfo:
    """What is known about a message that is not in the queue any more."""
    tx, keys = queue_tx.tx, queue_tx.keys
    letter = _dead_letter(queue_tx, id)
    if letter is not None:
        return letter
    outcome = outcomes.find(tx, keys, id)
    if outcome is not None:
        return _outcome_info(id, outcome, _kept_failures(queue_tx, id, outcome))
    raise MessageNotFound(
        f"Queue {queue_tx.queue.name} has no message {format_id(id)}, and nothing is kept about it; "
        "put messages with keep_result=True to find them after they are done"
    )


def _dead_letter(queue_tx: QueueTransaction, id: bytes) -> MessageInfo | None:
    queue = queue_tx.queue
    dead = QueueTransaction(queue_tx.tx, dead_letter_queue(queue, policy_of(queue_tx.tx, queue)))
    found = find_waiting(dead, id)
    message = None if found is None else found.message
    if found is None:
        held = _find_leased(dead, id)  # A consumer of the dead letters may have it.
        message = None if held is None or isinstance(held, SearchOn) else held[0].message(held[1])
    return None if message is None or message.origin != queue.name else _info(dead, message, "dead")


def result(tx: Transaction, queue: QueueKey, id: str) -> MessageResult | None:
    """The result of a message that was kept; None if there is none, or not yet.

    Raises:
        InvalidArgument: `id` is not a message id.
        MessageFailed: it is a dead letter. MessageCancelled: it was cancelled.
    """
    number = parse_id(id)
    outcome = outcomes.find(tx, QueueTransaction(tx, queue).keys, number)
    return None if outcome is None else outcomes.result_of(number, outcome)


def cancel(
    tx: Transaction, queue: QueueKey, id: str, *, leases: Leases | None = None, searches: bool = True
) -> MessageInfo | SearchOn:
    """Cancel a message that is in the queue; what it is then, or where to search for it, as `get` does.

    Raises:
        InvalidArgument: `id` is not a message id.
        MessageNotFound: there is no such message, and nothing is kept about it.
    """
    queue_tx, number = QueueTransaction(tx, queue), parse_id(id)
    found = find_waiting(queue_tx, number) or _find_leased(queue_tx, number, leases, searches=searches)
    if isinstance(found, SearchOn):
        return found
    if found is None:
        return finished_info(queue_tx, number)
    message = take(queue_tx, found) if isinstance(found, WaitingMessage) else _revoke(queue_tx, *found)
    dead_letters.cancel_message(queue_tx, message)
    queue_tx.save()
    outcome = outcomes.find(tx, queue_tx.keys, number)
    assert outcome is not None
    return _outcome_info(number, outcome, failures.failures_of(tx, queue, [message]).get(number, []))


def by_ids(
    tx: Transaction,
    work: Callable[..., MessageInfo | SearchOn],
    queue: QueueKey,
    ids: Sequence[str],
    *,
    leases: Leases | None,
) -> list[MessageInfo | FastnessError | SearchOn]:
    """`get` or `cancel` messages; the answer or the error for each.

    Without `leases`, one transaction searches them for a single message only.
    """
    answers: list[MessageInfo | FastnessError | SearchOn] = []
    for id in ids:
        try:
            answers.append(work(tx, queue, id, leases=leases, searches=len(ids) == 1))
        except (InvalidArgument, MessageNotFound) as error:
            answers.append(error)
    return answers


def update(
    tx: Transaction, queue: QueueKey, id: str, *, priority: int | None, delay_seconds: float | None
) -> MessageInfo:
    """Change the priority or the delay of a message that is not leased; what it is then.

    Raises:
        InvalidArgument: `id` is not a message id, or no value is given.
        MessageLeased: a consumer has it.
        MessageFinished: it is done, dead or cancelled.
        MessageNotFound: there is no such message.
    """
    if priority is None and delay_seconds is None:
        raise InvalidArgument("Nothing would change; give a priority or delay_seconds")
    queue_tx, number = QueueTransaction(tx, queue), parse_id(id)
    found = find_waiting(queue_tx, number)
    if found is None:
        held = _find_leased(queue_tx, number)
        if held is None:
            raise finished(finished_info(queue_tx, number))
        owner = "a consumer" if isinstance(held, SearchOn) else held[0].record.owner
        raise MessageLeased(f"Message {id} is leased by {owner}; wait until it is settled, or cancel it")
    message = take(queue_tx, found)
    delay_ms = max(message.due_ms - tx.now_ms, 0) if delay_seconds is None else round(delay_seconds * 1_000)
    message.priority = message.priority if priority is None else priority
    move_ttl(queue_tx, message)
    if not delay_ms:
        unique_keys.end_debounce(queue_tx, message)
    insert(queue_tx, message, delay_ms=delay_ms, newest=False)
    tx.expose()  # A receive may deliver it, although it is blocked.
    queue_tx.emit("updated", message)
    queue_tx.save()
    changed = find_waiting(queue_tx, number)
    assert changed is not None
    return _info(queue_tx, changed.message, changed.state)


def finished(known: MessageInfo) -> MessageFinished:
    """The error of changing a message that is done, dead or cancelled."""
    return MessageFinished(
        f"Message {known.id} is {known.state} and cannot change; redrive it if it is dead, or put it again"
    )


def search_leases(
    tx: Transaction, queue: QueueKey, ids: Sequence[str], *, after: bytes
) -> tuple[dict[bytes, bytes], bytes | None]:
    """Search a bounded number of leases for messages: those that were found, and where to continue, or None."""
    return search_many(QueueTransaction(tx, queue), [parse_id(id) for id in ids], after)


def search_many(
    queue_tx: QueueTransaction, ids: Sequence[bytes], after: bytes
) -> tuple[dict[bytes, bytes], bytes | None]:
    """`search_leases`, by the bytes of ids."""
    tx, keys, wanted = queue_tx.tx, queue_tx.keys, frozenset(ids)
    only = ids[0] if len(wanted) == 1 else b""  # Leases without this id need not be decoded.
    begin, end = keys.due_range(0 if tx.writer else queue_tx.counters.due_front_ms)
    pairs = tx.scan(after + b"\x00" if after else begin, end, limit=FIND_ENTRIES)
    found: dict[bytes, bytes] = {}
    for key, value in pairs:
        held = message_leases.held_at(tx, keys, key, value) if only in value else None
        if held is not None:
            found.update((id, key) for id in map(held.record.id_at, held.remaining()) if id in wanted)
    return found, pairs[-1][0] if len(pairs) == FIND_ENTRIES else None


def _find_leased(
    queue_tx: QueueTransaction, id: bytes, leases: Leases | None = None, *, searches: bool = True
) -> tuple[HeldLease, int] | SearchOn | None:
    """A leased message: its lease and its position there."""
    if locations.find(queue_tx, id) is not None:
        return _located(queue_tx, id)
    after: bytes | None = None
    if leases is None:
        if total_counters(queue_tx.tx, queue_tx.keys).leased <= 0:
            return None
        leases, after = search_many(queue_tx, [id], b"") if searches else ({}, b"")
    if id in leases:
        return _held(queue_tx, id, leases[id])
    return None if after is None else SearchOn(after)


def _located(queue_tx: QueueTransaction, id: bytes) -> tuple[HeldLease, int] | None:
    """A leased message that has a location."""
    kind, ref = locations.find(queue_tx, id) or (b"", b"")
    for lease in (ref[:LEASE_BYTES], ref) if kind == locations.LEASED else ():
        held = message_leases.load(queue_tx.tx, queue_tx.keys, lease)
        position = None if held is None else _position(held, id)
        if held is not None and position is not None:
            return held, position
    return None


def _held(queue_tx: QueueTransaction, id: bytes, key: bytes) -> tuple[HeldLease, int] | None:
    """A leased message whose lease was found, unless it has left the lease since."""
    stored = queue_tx.tx.get(key)
    held = None if stored is None else message_leases.held_at(queue_tx.tx, queue_tx.keys, key, stored)
    position = None if held is None else _position(held, id)
    return None if held is None or position is None else (held, position)


def _position(held: HeldLease, id: bytes) -> int | None:
    """The position of a message that is still in a lease."""
    ids = held.record.ids
    for position in held.remaining():
        if ids[position * ID_BYTES : (position + 1) * ID_BYTES] == id:
            return position
    return None


def _revoke(queue_tx: QueueTransaction, held: HeldLease, position: int) -> StoredMessage:
    """Take a message out of its lease, and let its consumer know."""
    (message,) = held.take(queue_tx, [position])
    outcomes.cancel_lease(queue_tx, held.ref(position), message.id)
    key_flow.release(queue_tx, message)
    return message


def _info(queue_tx: QueueTransaction, message: StoredMessage, state: MessageState) -> MessageInfo:
    tx, job = queue_tx.tx, message.job or message.origin_job
    payload = tx.get(queue_tx.keys.body_key(message.id)) if message.has_body else message.payload
    state_document = sidecars.document(tx, queue_tx.queue, message)
    is_leased = state == "leased"
    known = {
        **msgspec.structs.asdict(found_message(message, state)),
        "owner": message.owner if is_leased else None,  # Not the consumer of a dead letter.
        "expires_ms": message.due_ms if is_leased else 0,
    }
    return MessageInfo(
        **known,
        payload=payload,
        blob=message.blob,
        attributes=message.attributes,
        unique_key=None if job is None else job.unique_key,
        failures=failures.failures_of(tx, queue_tx.queue, [message]).get(message.id, []),
        ttl_at_ms=message.ttl_at_ms,
        lease_id=message.lease_id if is_leased else None,
        fence=message.fence,
        leased_ms=message.leased_ms,
        keep_result=job is not None and job.keep_result,
        stateful=message.stateful,
        state_value=None if state_document is None else state_document.value,
        state_etag=None if state_document is None else state_document.etag,
    )


def _kept_failures(queue_tx: QueueTransaction, id: bytes, outcome: OutcomeRecord) -> list[Failure]:
    if outcome.state != "dead":
        return failures.failures_of_finished(queue_tx.tx, queue_tx.keys, id)
    # All of them were with the dead letter, which is not there any more.
    return [] if outcome.failure is None else [outcome.failure]


def _outcome_info(id: bytes, outcome: OutcomeRecord, known: list[Failure]) -> MessageInfo:
    found = msgspec.structs.asdict(found_outcome(id, outcome))
    return MessageInfo(**found, failures=known, has_result=outcome.result is not None)
