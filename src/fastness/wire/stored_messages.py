"""Messages as they are stored. A delivery by the batch passes them on undecoded, and its consumer decodes them."""

from functools import lru_cache

import msgspec

from fastness.errors import InvalidArgument
from fastness.limits import PAYLOAD_CARRIED_BYTES_MAX

ID_BYTES = 16
_SHARED_ID_BYTES = 10  # The part of an id that ids of one millisecond mostly share: timestamp and counter.


UNIQUE_UNTIL_DONE = 0
UNIQUE_UNTIL_LEASED = -1


class JobOptions(msgspec.Struct, array_like=True, frozen=True):
    """What few messages have: a key, a result that is kept, and so on. Such a message is found by its id at once."""

    key: str | None = None  # Messages with the same key share limits, and take turns with those of other keys.
    keep_result: bool = False  # Its outcome is kept when it is done, dead or cancelled.
    unique_key: str | None = None  # While the message has it, a put with the same key adds nothing.
    unique_until: int = UNIQUE_UNTIL_DONE  # Until it is done, or leased, or for this many milliseconds.
    debounce_key: str | None = None  # While the message is delayed, a put with the same key replaces it.


class StoredHead(msgspec.Struct, array_like=True):
    """The first fields of a stored message: what a delivery needs to know of it. The rest is passed on undecoded."""

    id: bytes
    fence: int  # Of its last delivery. It grows with every delivery; a redrive does not reset it.
    attempts: int  # Deliveries.
    ttl_at_ms: int  # 0: no TTL.
    visibility_ms: int
    group: str | None
    blob: str | None
    size: int
    has_failures: bool  # It has a record of its failed attempts.
    stateful: bool  # It was delivered with its workflow state.
    # Whether more than its record has to be removed with it, or its correlation id is not its id.
    is_special: bool
    correlation_id: str
    job: JobOptions | None

    @property
    def key(self) -> str | None:
        """The key whose limits it shares."""
        return None if self.job is None else self.job.key

    @property
    def has_body(self) -> bool:
        """Whether the payload has a record of its own."""
        return self.blob is None and self.size > PAYLOAD_CARRIED_BYTES_MAX


class StoredMessage(StoredHead, array_like=True):
    """A message as it is stored. Not frozen: each state change decodes, changes and rewrites it."""

    payload: bytes | None
    content_type: str
    attributes: dict[str, str]
    priority: int
    created_ms: int
    max_attempts: int
    failures: int = 0
    last_error: str | None = None
    origin: str | None = None  # For a dead letter: the queue it comes from.
    died_ms: int = 0
    due_ms: int = 0  # When its lease or delay ends.
    delayed_for_ms: int = 0  # How long its delay was to last when it began.
    leased_ms: int = 0  # When it was last delivered; 0: never.
    retry_delay_ms: int | None = None  # The back-off after its first failure; None: that of the queue's policy.
    origin_job: JobOptions | None = None  # For a dead letter: `job` in the queue it comes from.
    # Only while it is leased. A lease has these, and they are not stored with the message.
    owner: str | None = None
    txn_id: str | None = None
    lease_ref: bytes = b""
    kept_from_ms: int = 0  # When it was last redriven or moved, or became a dead letter of a FIFO queue; 0: never.
    first_leased_ms: int = 0  # When it was first delivered; 0: not before this delivery.
    tags: list[str] = []

    @property
    def lease_id(self) -> str:
        """Identifies one delivery."""
        return format_lease_id(self.id, self.fence, self.lease_ref)


encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(StoredMessage).decode
decode_head = msgspec.msgpack.Decoder(StoredHead).decode


def parse_id(text: str) -> bytes:
    """The 16 bytes of a message id.

    Raises:
        InvalidArgument: `text` is not a message id.
    """
    try:
        id = bytes.fromhex(text.replace("-", ""))
    except (ValueError, AttributeError, TypeError):
        id = b""
    if len(id) != ID_BYTES:
        raise InvalidArgument(f"{text!r} is not a message id; use the id from the message's receipt")
    return id


def put_at_ms(id: bytes) -> int:
    """When the message with this id was put: ids are UUIDv7. After a clock was set back it may be later than that."""
    return int.from_bytes(id[:6], "big")


def format_lease_id(id: bytes, fence: int, ref: bytes) -> str:
    """The text that identifies the delivery of a message. `ref` is the lease, and the number of the message in it."""
    return f"{id.hex()}-{fence}-{ref.hex()}"


def format_id(id: bytes) -> str:
    """A message id as text, in UUID form."""
    return _format_shared(id[:_SHARED_ID_BYTES]) + id[_SHARED_ID_BYTES:].hex()


@lru_cache(maxsize=256)
def _format_shared(shared: bytes) -> str:
    """The first part of an id as text. Cached, because consecutive ids share it."""
    text = shared.hex()
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:]}-"
