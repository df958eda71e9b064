"""Settling: what becomes of a delivered message. `leasing` draws the states that it goes through.

    ack       it is done, and gone
    nack      it is ready again after a delay, as a failure or, deferred, without counting
    reject    it is a dead letter
    extend    its lease ends later
    change    its lease ends sooner or later, or now: then it is ready again, without counting a failure

Every call names the lease of a delivery and its fence. A lease that has ended is refused, once the end was processed.
"""

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Unpack

from fastness.errors import FastnessError, InvalidArgument, MessageCancelled, QueueMessageLeaseMismatch
from fastness.kv import Transaction
from fastness.layers.queues import (
    by_id,
    dead_letters,
    failures,
    groups,
    key_flow,
    message_leases,
    outcomes,
    sidecars,
)
from fastness.layers.queues.counters import QueueTransaction
from fastness.layers.queues.failures import (
    FAILED,
    REJECTED,
    Reported,
    makes_dead_letter,
    retry_delay_ms,
)
from fastness.layers.queues.keys import QueueKey
from fastness.layers.queues.message_leases import HeldLease, HeldLeases
from fastness.layers.queues.policies import is_too_old, policy_of
from fastness.limits import MESSAGES_MAX, VISIBILITY_SECONDS_MAX
from fastness.wire.queues import (
    LEASE_BYTES,
    MessageLease,
    NewResult,
    PackedAck,
    QueuePolicy,
    RefusedAck,
    VisibilityChange,
    lease_mismatch,
    message_cancelled,
    positions_in,
)
from fastness.wire.stored_messages import StoredMessage, format_id


def ack(
    tx: Transaction, queue: QueueKey, proof: MessageLease, result: NewResult | None = None, *, late: bool = False
) -> str:
    """Remove a leased message for good, unless this lease acknowledged it before; returns its correlation id.

    A result is kept for `result_ttl_seconds` of the policy. If it is `late`, the lease may have ended, as long as the
    message waits in the queue and was not delivered again.

    Raises:
        QueueMessageLeaseMismatch: the message is not leased by `proof` any more.
        MessageCancelled: it was cancelled.
    """
    (answer,) = ack_many(tx, queue, [proof], [result], late=late)
    if isinstance(answer, FastnessError):
        raise answer
    return answer


def ack_many(
    tx: Transaction,
    queue: QueueKey,
    proofs: Sequence[MessageLease],
    results: Sequence[NewResult | None] = (),
    *,
    late: bool = False,
) -> list[str | FastnessError]:
    """`ack` several messages; returns the correlation id of each, or why it was refused.

    `results` are those of the first messages.
    """
    for result in results:
        if result is not None:
            outcomes.check_result(result)
    queue_tx = QueueTransaction(tx, queue)
    held_leases = HeldLeases(queue_tx)
    answers: list[str | FastnessError] = []
    any_late = False
    for proof, result in zip_longest(proofs, results):
        try:
            correlation_id, is_late = _ack(queue_tx, held_leases, proof, result, late=late)
        except (InvalidArgument, QueueMessageLeaseMismatch) as error:
            answers.append(error)
        else:
            answers.append(correlation_id)
            any_late = any_late or is_late
    if held_leases.save() or any_late:
        queue_tx.save()
    return answers


def ack_packed(tx: Transaction, queue: QueueKey, acks: Sequence[PackedAck]) -> list[RefusedAck]:
    """`ack` messages by lease and position; returns those that are not leased any more.

    Raises:
        InvalidArgument: a position is out of range.
    """
    queue_tx = QueueTransaction(tx, queue)
    refused, changed = settle_packed(queue_tx, acks)
    if changed:
        queue_tx.save()
    return refused


def settle_packed(queue_tx: QueueTransaction, acks: Sequence[PackedAck]) -> tuple[list[RefusedAck], bool]:
    """`ack_packed`, and whether the queue has changed, which the caller saves."""
    held_leases, refused = HeldLeases(queue_tx), list[RefusedAck]()
    for each in acks:
        mask = each.mask
        if mask.bit_length() > MESSAGES_MAX:
            raise InvalidArgument(f"A lease has at most {MESSAGES_MAX} messages; send the positions of its own")
        held = held_leases.load(each.lease)
        if held is not None and (held.record.fence, held.record.fences) == (each.fence, each.fences):
            here = mask & ((1 << held.record.count) - 1) & ~held.left
            _ack_here(queue_tx, held_leases, held, here & ~held.acked)
            mask &= ~here
        if mask:
            refused += _ack_elsewhere(queue_tx, held_leases, each, mask)
    return refused, held_leases.save()


def _ack_elsewhere(
    queue_tx: QueueTransaction, held_leases: HeldLeases, ack: PackedAck, mask: int
) -> Iterator[RefusedAck]:
    """Acknowledge messages that are not in the lease: they were extended alone, or acknowledged before, or lost."""
    tx, keys = queue_tx.tx, queue_tx.keys
    mask &= ~message_leases.acked_positions(tx, keys, ack.lease, ack.fences or [ack.fence])
    for position in positions_in(mask):
        fence, own = ack.fence_at(position), None
        if fence is not None and len(ack.lease) == LEASE_BYTES:
            own = ack.lease + bytes((position,))
            held = held_leases.load(own)
            if held is not None and held.record.fence == fence:
                _ack_here(queue_tx, held_leases, held, 1 & ~held.acked)
                continue
            if message_leases.acked_positions(tx, keys, own, [fence]):
                continue
        is_cancelled = outcomes.is_cancelled(tx, keys, own or ack.lease)
        yield RefusedAck(ack.lease, position, MessageCancelled.code if is_cancelled else QueueMessageLeaseMismatch.code)


def _ack(
    queue_tx: QueueTransaction,
    held_leases: HeldLeases,
    proof: MessageLease,
    result: NewResult | None = None,
    *,
    late: bool = False,
) -> tuple[str, bool]:
    """The correlation id of an acknowledged message, and whether it was late, so that the caller saves the queue."""
    found = held_leases.find(proof)
    if found is None:
        before = message_leases.acked_before(queue_tx.tx, queue_tx.keys, proof)
        if before is not None:
            return before, False
        message = _ack_late(queue_tx, proof, result) if late else None
        if message is None:
            raise _refusal(queue_tx, proof)
        return message.correlation_id, True
    held, position = found
    _ack_here(queue_tx, held_leases, held, 1 << position & ~held.acked, result)
    return held.correlation_id(position), False


def _ack_late(queue_tx: QueueTransaction, proof: MessageLease, result: NewResult | None) -> StoredMessage | None:
    """Acknowledge a message that waits again since the lease of its last delivery ended; None if there is none."""
    id, ref = message_leases.ref_of(proof)
    found = by_id.find_waiting(queue_tx, id)
    if found is None or found.message.fence != proof.fence:
        return None
    message = by_id.take(queue_tx, found)
    queue_tx.counters.acked += 1
    _finish(queue_tx, message, result)
    message_leases.remember_ack(queue_tx, ref, message)
    queue_tx.emit("acked", message)
    return message


def _finish(queue_tx: QueueTransaction, message: StoredMessage, result: NewResult | None) -> None:
    """Keep what is asked for of a message that is done, and remove the rest."""
    is_kept = result is not None or (message.job is not None and message.job.keep_result)
    if is_kept:
        outcomes.record(queue_tx, message, "done", result=result)
    dead_letters.remove(queue_tx, message, keep_failures=is_kept)


def _refusal(queue_tx: QueueTransaction, proof: MessageLease) -> QueueMessageLeaseMismatch:
    """Why a message cannot be settled by `proof`."""
    _, ref = message_leases.ref_of(proof)
    is_cancelled = outcomes.is_cancelled(queue_tx.tx, queue_tx.keys, ref)
    return message_cancelled(proof.id) if is_cancelled else lease_mismatch(proof)


def _ack_here(
    queue_tx: QueueTransaction,
    held_leases: HeldLeases,
    held: HeldLease,
    mask: int,
    result: NewResult | None = None,
) -> None:
    """Acknowledge messages of a lease that are still in it; `mask` has their bits."""
    if not mask:
        return
    positions, record = positions_in(mask), held.record
    held.acked |= mask
    held_leases.change(held)
    queue_tx.counters.leased -= len(positions)
    queue_tx.counters.acked += len(positions)
    for position in positions:
        if record.is_plain and result is None:
            id = record.id_at(position)
            correlation_id = format_id(id)
        else:
            message = held.message(position)
            id, correlation_id = message.id, message.correlation_id
            key_flow.release(queue_tx, message)
            _finish(queue_tx, message, result)
        queue_tx.emit_of("acked", id, correlation_id, record.attempt_at(position))


def _take(queue_tx: QueueTransaction, proof: MessageLease) -> StoredMessage:
    """Take a message out of its lease.

    Raises:
        QueueMessageLeaseMismatch: the message is not leased by `proof` any more.
    """
    held, position = _unsettled(queue_tx, HeldLeases(queue_tx).find(proof), proof)
    (message,) = held.take(queue_tx, [position])
    key_flow.release(queue_tx, message)
    return message


def nack(
    tx: Transaction,
    queue: QueueKey,
    proof: MessageLease,
    *,
    delay_seconds: float | None = None,
    counts: bool = True,
    **reported: Unpack[Reported],
) -> str:
    """Return a leased message to the queue, for delivery after the delay; returns its correlation id.

    With `counts` it is a failure: the default delay is the back-off of the policy, and the last allowed failure makes
    it a dead letter. Without an `error` the message keeps the error of its last failure. Without `counts` it is
    delivered again at once by default.

    Raises:
        QueueMessageLeaseMismatch: the message is not leased by `proof` any more.
    """
    queue_tx = QueueTransaction(tx, queue)
    message = _take(queue_tx, proof)
    delay_ms = 0 if delay_seconds is None else round(delay_seconds * 1_000)
    policy = None
    if counts:
        policy = _record_failure(queue_tx, message, FAILED, **reported)
        if delay_seconds is None:
            delay_ms = retry_delay_ms(policy, message)
    queue_tx.emit("nacked" if counts else "deferred", message)
    if policy is not None and makes_dead_letter(queue_tx, policy, message, FAILED):
        dead_letters.dead_letter(queue_tx, message)
    else:
        dead_letters.requeue(queue_tx, message, delay_ms=delay_ms)
    queue_tx.save()
    return message.correlation_id


def reject(tx: Transaction, queue: QueueKey, proof: MessageLease, **reported: Unpack[Reported]) -> str:
    """Make a leased message a dead letter at once; returns its correlation id.

    While its dead letter queue is being deleted, it is returned as a failure instead.

    Raises:
        QueueMessageLeaseMismatch: the message is not leased by `proof` any more.
    """
    queue_tx = QueueTransaction(tx, queue)
    message = _take(queue_tx, proof)
    policy = _record_failure(queue_tx, message, REJECTED, **reported)
    if makes_dead_letter(queue_tx, policy, message, REJECTED):
        dead_letters.dead_letter(queue_tx, message)
    else:  # It is a dead letter already, or the queue of dead letters takes none.
        queue_tx.emit("nacked", message)
        delay_ms = 0 if message.origin is not None else retry_delay_ms(policy, message)
        dead_letters.requeue(queue_tx, message, delay_ms=delay_ms)
    queue_tx.save()
    return message.correlation_id


def extend(tx: Transaction, queue: QueueKey, proof: MessageLease, *, by_ms: int) -> StoredMessage:
    """Extend the lease of a message to at least `by_ms` from now. It never gets shorter.

    Raises:
        InvalidArgument: `by_ms` is not positive.
        QueueMessageLeaseMismatch: the message is not leased by `proof` any more.
    """
    outcome = extend_many(tx, queue, [proof], by_ms=by_ms)[0]
    if isinstance(outcome, FastnessError):
        raise outcome
    return outcome


def extend_many(
    tx: Transaction, queue: QueueKey, proofs: Sequence[MessageLease], *, by_ms: int
) -> list[StoredMessage | FastnessError]:
    """`extend` several messages; returns each as it is leased now, or why it was refused.

    Messages that are all that is left of a lease keep it, and the lease is extended. Others leave it.
    """
    queue_tx, due_ms = QueueTransaction(tx, queue), tx.now_ms + by_ms
    held_leases = HeldLeases(queue_tx)
    found: list[tuple[HeldLease, int] | FastnessError] = []
    for proof in proofs:
        try:
            found.append(_unsettled(queue_tx, held_leases.find(proof), proof))
        except (InvalidArgument, QueueMessageLeaseMismatch) as error:
            found.append(error)
    extended: dict[bytes, tuple[HeldLease, set[int]]] = {}
    for each in found:
        if not isinstance(each, FastnessError):
            held, position = each
            extended.setdefault(held.id, (held, set()))[1].add(position)
    outcomes = [each if isinstance(each, FastnessError) else each[0].message(each[1]) for each in found]
    for held, positions in extended.values():
        if due_ms > held.record.due_ms:
            _extend(queue_tx, held, positions, due_ms)
    for outcome in outcomes:
        if isinstance(outcome, StoredMessage) and due_ms > outcome.due_ms:
            outcome.due_ms = due_ms
            sidecars.extend(tx, queue, outcome)
    if extended:
        queue_tx.save()
    return outcomes


def _extend(queue_tx: QueueTransaction, held: HeldLease, positions: set[int], due_ms: int) -> None:
    if positions.issuperset(held.remaining()):
        held.move(queue_tx, due_ms)
        return
    for position in positions:
        held.separate(queue_tx, position, due_ms)
    held.save(queue_tx)


def change_visibility(
    tx: Transaction, queue: QueueKey, changes: Sequence[VisibilityChange], *, late_owner: str = ""
) -> list[StoredMessage | FastnessError]:
    """Let leases end at other times, sooner or later; returns each message as it is now, or why it was refused.

    With 0 seconds the message returns to the queue at once, without counting a failure. Its group goes on as after a
    nack. If a message is named several times, the last change counts. Unlike `extend`, a lease that has ended is
    refused also before the end was processed, and a message that is too old before it is removed: what a call does must
    not depend on when that happens.

    With a `late_owner`, a lease that has ended is changed, too, as long as its message waits and was not delivered
    again: the message is leased to that owner until the new end. One with job options or a workflow state is refused,
    and one that was redriven and waits for a younger one of its group.
    """
    queue_tx, policy = QueueTransaction(tx, queue), policy_of(tx, queue)
    held_leases = HeldLeases(queue_tx)
    answers: list[StoredMessage | FastnessError] = []
    changed: dict[bytes, tuple[HeldLease, dict[int, StoredMessage]]] = {}
    for change in changes:
        try:
            lasts_ms = _checked_lasts_ms(change.seconds)
            found = held_leases.find(change.lease)
            if found is None and late_owner:
                found = _lease_again(queue_tx, policy, held_leases, change.lease, late_owner)
            held, position = _unsettled(queue_tx, found, change.lease)
            message, is_over = held.message(position), tx.now_ms >= held.record.due_ms and not late_owner
            if is_over or is_too_old(policy, message, tx.now_ms):
                raise lease_mismatch(change.lease)
        except (InvalidArgument, QueueMessageLeaseMismatch) as error:
            answers.append(error)
            continue
        messages = changed.setdefault(held.id, (held, {}))[1]
        message = messages.setdefault(position, message)
        message.due_ms = tx.now_ms + lasts_ms
        answers.append(message)
    returned = [message for held, messages in changed.values() for message in _end_at(queue_tx, held, messages)]
    for message in sorted(returned, key=lambda each: each.id):
        key_flow.release(queue_tx, message)
        queue_tx.emit("deferred", message)
        dead_letters.requeue(queue_tx, message, delay_ms=0)
        message.lease_ref = b""  # The answer says that it is not leased, also if its TTL has expired.
    if changed:
        queue_tx.save()
    return answers


def _lease_again(
    queue_tx: QueueTransaction, policy: QueuePolicy, held_leases: HeldLeases, proof: MessageLease, owner: str
) -> tuple[HeldLease, int] | None:
    """Lease a message that waits again since the lease of its last delivery ended; None if there is none."""
    id, ref = message_leases.ref_of(proof)
    found = by_id.find_waiting(queue_tx, id)
    if found is None or found.message.fence != proof.fence or found.message.job is not None or found.message.stateful:
        return None
    if is_too_old(policy, found.message, queue_tx.tx.now_ms) or groups.is_behind_head(queue_tx, found.message):
        return None
    message = by_id.take(queue_tx, found)
    groups.lease_again(queue_tx, message)
    held = message_leases.grant_again(queue_tx, message, ref, owner=owner)
    held_leases.add(held)
    return held, 0


def _checked_lasts_ms(seconds: float) -> int:
    if not 0 <= seconds <= VISIBILITY_SECONDS_MAX:
        raise InvalidArgument(
            f"A visibility timeout changes to 0 to {VISIBILITY_SECONDS_MAX:.0f} s, not {seconds}; "
            "0 returns the message to the queue"
        )
    return round(seconds * 1_000)


def _end_at(queue_tx: QueueTransaction, held: HeldLease, messages: dict[int, StoredMessage]) -> list[StoredMessage]:
    """Let messages of a lease, by their positions, end at their `due_ms`; returns those that have left it for that.

    Those that are all that is left of the lease keep it, if they end together. The others get leases of their own.
    """
    tx = queue_tx.tx
    returned = {position: message for position, message in messages.items() if message.due_ms <= tx.now_ms}
    for position in returned:
        held.left |= 1 << position
    queue_tx.counters.leased -= len(returned)
    later = {position: message.due_ms for position, message in messages.items() if position not in returned}
    if later and len(set(later.values())) == 1 and set(later).issuperset(held.remaining()):
        held.move(queue_tx, next(iter(later.values())))
    else:
        for position, due_ms in later.items():
            held.separate(queue_tx, position, due_ms)
    if held.left:
        held.save(queue_tx)
    for position in later:
        sidecars.extend(tx, queue_tx.queue, messages[position])
    return list(returned.values())


def check(tx: Transaction, queue: QueueKey, proof: MessageLease) -> None:
    """Raise QueueMessageLeaseMismatch unless the message is leased by `proof` and the lease has not expired."""
    queue_tx = QueueTransaction(tx, queue)
    held, _ = _unsettled(queue_tx, HeldLeases(queue_tx).find(proof), proof)
    if tx.now_ms >= held.record.due_ms:
        raise lease_mismatch(proof)


def ended(tx: Transaction, queue: QueueKey, proofs: Sequence[MessageLease]) -> list[FastnessError | None]:
    """Why each of these leases does not hold any more; None for those that do."""
    answers: list[FastnessError | None] = []
    for proof in proofs:
        try:
            check(tx, queue, proof)
        except (InvalidArgument, QueueMessageLeaseMismatch) as error:
            answers.append(error)
        else:
            answers.append(None)
    return answers


def _unsettled(
    queue_tx: QueueTransaction, found: tuple[HeldLease, int] | None, proof: MessageLease
) -> tuple[HeldLease, int]:
    if found is None or found[0].acked >> found[1] & 1:
        raise _refusal(queue_tx, proof)
    return found


def _record_failure(
    queue_tx: QueueTransaction, message: StoredMessage, outcome: str, **reported: Unpack[Reported]
) -> QueuePolicy:
    """Count and store a failure that its consumer reported; returns the policy of the queue."""
    queue_tx.counters.failed += 1
    policy = policy_of(queue_tx.tx, queue_tx.queue)
    failures.record(queue_tx, policy, message, outcome, failed_ms=queue_tx.tx.now_ms, **reported)
    return policy
