"""The wire form of a stored message.

`delivery_of` passes the 23 fields by position: 2.4 µs instead of 5.5 µs per message (median of 9 runs). Without it a
receive of 256 messages from memory takes 10 to 13 % longer. A test checks that it is the same with keywords.
"""

from fastness.wire.queues import Delivery, Failure, PackedLease, SidecarState
from fastness.wire.stored_messages import StoredMessage, decode, format_id


def delivery_of(
    message: StoredMessage, state: SidecarState | None = None, failures: list[Failure] | None = None
) -> Delivery:
    """The wire form of a message. The lease fields are empty unless it is leased."""
    is_leased = message.owner is not None
    return Delivery(
        format_id(message.id),
        message.payload,
        message.blob,
        message.size,
        message.content_type,
        message.attributes,
        message.correlation_id,
        message.priority,
        message.group,
        message.created_ms,
        message.attempts,
        message.failures,
        message.max_attempts,
        message.last_error,
        message.origin,
        message.died_ms,
        message.lease_id if is_leased else "",
        message.fence,
        message.due_ms if is_leased else 0,
        message.visibility_ms,
        state,
        failures or [],
        message.tags,
    )


def message_at(lease: PackedLease, position: int) -> StoredMessage:
    """A message of a packed lease, with its payload."""
    message = decode(lease.stored_at(position))
    message.fence, message.attempts = lease.fence_at(position), lease.attempt_at(position)
    message.payload = lease.bodies.get(position, message.payload)
    message.owner, message.due_ms, message.lease_ref = "", lease.expires_ms, lease.ref_at(position)
    return message


def delivery_at(lease: PackedLease, position: int) -> Delivery:
    """The delivery of one message of a packed lease."""
    return delivery_of(message_at(lease, position), lease.states.get(position), lease.failures.get(position))
