"""Leases of messages: one for all messages of a delivery.

    "t" | ends at | lease  ->  the lease: owner, fences, ids, and the messages as they were stored
    "m" | lease            ->  the messages, if they are more than LEASE_INLINE_BYTES_MAX
    "d" | lease            ->  which of several messages are acknowledged, and which have left the lease
    "x" | lease            ->  when the lease ends, if it was extended
    "a", minute | lease    ->  the messages that were acknowledged, so that a repeated ack succeeds

A delivery takes the messages out of the ready ones and writes one lease, with the messages copied as they are. An ack
marks a message as acknowledged; the last one removes the lease. A message that is returned, rejected or extended alone
leaves the lease. When the lease ends, everything that is left in it expires.

A lease is identified by when it was first to end and by its first message, so it is found without an index. A message
in it is identified by its position: `lease_ref` is the lease and that position. A message that was extended alone, or
leased again after its lease had ended, has a lease of its own, identified by the same `lease_ref`.
"""

import struct
from collections.abc import Collection, Iterator, Sequence
from itertools import accumulate
from typing import Final

import msgspec

from fastness.kv import Transaction, fence_floor, pages
from fastness.layers.queues.counters import QueueTransaction
from fastness.layers.queues.keys import QueueKeys
from fastness.limits import ACK_MEMORY_SECONDS, LEASE_INLINE_BYTES_MAX, MESSAGES_MAX
from fastness.wire.queues import LEASE_BYTES, MessageLease, PackedLease, lease_mismatch
from fastness.wire.stored_messages import (
    ID_BYTES,
    StoredHead,
    StoredMessage,
    decode,
    encode,
    format_id,
    format_lease_id,
    parse_id,
)

_ARRAY: Final = 0x90  # A lease is an array in MessagePack, which begins with this byte or a higher one.
_TIME_BYTES: Final = 6
_NONE: Final[list[int]] = []
_END: Final = struct.Struct(">I")


class LeaseRecord(msgspec.Struct, frozen=True, array_like=True):
    """A lease as it is stored."""

    owner: str
    txn_id: str | None
    leased_ms: int
    due_ms: int
    lasts_ms: int  # How long it was to last when it was granted or extended.
    with_state: bool
    is_plain: bool  # Nothing but the messages has to be removed with them, and no one gave them correlation ids.
    fence: int
    fences: list[int]  # Of each message, if they differ.
    attempt: int  # The number of this delivery.
    attempts: list[int]  # Of each message, if they differ.
    ids: bytes
    ends: bytes  # Where each message ends in `content`.
    content: bytes | None  # The messages; None: in a record of their own.

    @property
    def count(self) -> int:
        return len(self.ids) // ID_BYTES

    def id_at(self, position: int) -> bytes:
        return self.ids[position * ID_BYTES : (position + 1) * ID_BYTES]

    def fence_at(self, position: int) -> int:
        return self.fences[position] if self.fences else self.fence

    def attempt_at(self, position: int) -> int:
        return self.attempts[position] if self.attempts else self.attempt


class _Acked(msgspec.Struct, frozen=True, array_like=True):
    """The messages of a lease that were acknowledged."""

    fences: list[int]  # One for all, or one for each.
    ids: bytes
    mask: bytes  # Empty: all of them.
    correlation_ids: list[str]  # Empty: those are the ids of the messages.

    @property
    def positions(self) -> int:
        """The acknowledged messages, as bits."""
        return int.from_bytes(self.mask, "big") if self.mask else (1 << len(self.ids) // ID_BYTES) - 1


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(LeaseRecord).decode
_decode_acked = msgspec.msgpack.Decoder(_Acked).decode


class HeldLease:
    """A lease inside one transaction: what is left in it. `save` writes what has changed."""

    __slots__ = ("_content", "_has_settled", "_is_moved", "_keys", "_tx", "acked", "id", "left", "record")

    def __init__(
        self,
        tx: Transaction,
        keys: QueueKeys,
        id: bytes,
        record: LeaseRecord,
        *,
        content: bytes | None,
        settled: bytes | None = None,
        is_moved: bool = False,
    ) -> None:
        self._tx = tx
        self._keys = keys
        self.id = id
        self.record = record
        self.acked = self.left = 0  # A bit for each position.
        if settled is not None:
            size = len(settled) // 2
            self.acked = int.from_bytes(settled[:size], "big")
            self.left = int.from_bytes(settled[size:], "big")
        self._content = content
        self._has_settled = settled is not None  # There is a record of which messages are settled.
        self._is_moved = is_moved

    def key(self) -> bytes:
        """Its key in the due index."""
        return self._keys.due_key(self.record.due_ms, self.id)

    def remaining(self) -> list[int]:
        """The positions of the messages that are neither acknowledged nor gone."""
        settled = self.acked | self.left
        return [position for position in range(self.record.count) if not settled >> position & 1]

    def ref(self, position: int) -> bytes:
        return self.id + bytes((position,)) if len(self.id) == LEASE_BYTES else self.id

    def correlation_id(self, position: int) -> str:
        record = self.record
        return format_id(record.id_at(position)) if record.is_plain else self.message(position).correlation_id

    def messages(self) -> list[StoredMessage]:
        """The messages that are left in the lease."""
        return [self.message(position) for position in self.remaining()]

    def message(self, position: int) -> StoredMessage:
        """A message of the lease, as it is while it is leased."""
        record = self.record
        message = decode(self.stored(position))
        message.fence, message.attempts = record.fence_at(position), record.attempt_at(position)
        if record.with_state:
            message.stateful = message.is_special = True
        message.first_leased_ms = message.first_leased_ms or record.leased_ms
        message.leased_ms, message.due_ms = record.leased_ms, record.due_ms
        message.owner, message.txn_id, message.lease_ref = record.owner, record.txn_id, self.ref(position)
        return message

    def stored(self, position: int) -> bytes:
        """A message as it was before it was delivered."""
        content, ends = self.content(), self.record.ends
        begin = _END.unpack_from(ends, (position - 1) * 4)[0] if position else 0
        return content[begin : _END.unpack_from(ends, position * 4)[0]]

    def content(self) -> bytes:
        """The messages, one after the other."""
        if self._content is None:
            self._content = self._tx.get(self._keys.contents + self.id) or b""
        return self._content

    def packed(self) -> PackedLease:
        """The wire form of the lease with the messages that are left in it."""
        record = self.record
        return PackedLease(
            self.id,
            record.fence,
            record.fences,
            record.attempt,
            record.attempts,
            record.leased_ms,
            record.due_ms,
            record.ids,
            record.ends,
            self.content(),
            self.remaining() if self.acked | self.left else [],
        )

    def take(self, queue_tx: QueueTransaction, positions: Sequence[int] | None = None) -> list[StoredMessage]:
        """Take messages out of the lease: those at these positions, or all that are left, so that it ends."""
        positions = self.remaining() if positions is None else positions
        messages = [self.message(position) for position in positions]
        self.leave(queue_tx, positions)
        return messages

    def leave(self, queue_tx: QueueTransaction, positions: Collection[int]) -> None:
        """Note that the messages at these positions are not in the lease any more."""
        for position in positions:
            self.left |= 1 << position
        self.save(queue_tx)
        queue_tx.counters.leased -= len(positions)

    def save(self, queue_tx: QueueTransaction) -> None:
        """Write which messages are settled. If all are, remove the lease, and remember the acknowledged ones."""
        tx, keys = queue_tx.tx, queue_tx.keys
        count = self.record.count
        if count > 1 and (self.acked | self.left) != (1 << count) - 1:
            size = (count + 7) // 8
            tx.put(keys.settled + self.id, self.acked.to_bytes(size, "big") + self.left.to_bytes(size, "big"))
            self._has_settled = True
            return
        if self.acked:
            tx.put(keys.ack_key(tx.now_ms // 60_000, self.id), _encode(self._acked_messages()))
        tx.delete(self.key())
        if self._has_settled:
            tx.delete(keys.settled + self.id)
        if self.record.content is None:
            tx.delete(keys.contents + self.id)
        if self._is_moved:
            tx.delete(keys.moved + self.id)

    def move(self, queue_tx: QueueTransaction, due_ms: int) -> None:
        """Let the lease end at another time."""
        tx, keys = queue_tx.tx, queue_tx.keys
        tx.delete(self.key())
        self.record = msgspec.structs.replace(self.record, due_ms=due_ms, lasts_ms=due_ms - tx.now_ms)
        tx.put(self.key(), _encode(self.record))
        self._is_moved = _is_moved(self.id, due_ms)
        if self._is_moved:
            tx.put(keys.moved + self.id, due_ms.to_bytes(8, "big"))
        else:  # The clock was set back by as much as the lease had been extended.
            tx.delete(keys.moved + self.id)
        _note_due(queue_tx, due_ms)

    def separate(self, queue_tx: QueueTransaction, position: int, due_ms: int) -> None:
        """Give a message a lease of its own, which ends at another time. The caller saves this one."""
        tx, keys, record = queue_tx.tx, queue_tx.keys, self.record
        stored = self.stored(position)
        self.left |= 1 << position
        record = msgspec.structs.replace(
            record,
            fence=record.fence_at(position),
            fences=[],
            attempt=record.attempt_at(position),
            attempts=[],
            ids=record.id_at(position),
        )
        own = _of_one(tx, keys, self.ref(position), record, stored)
        own.move(queue_tx, due_ms)

    def _acked_messages(self) -> _Acked:
        record, count = self.record, self.record.count
        mask = b"" if not self.left else self.acked.to_bytes((count + 7) // 8, "big")
        known = [] if record.is_plain else [self.correlation_id(position) for position in range(count)]
        return _Acked(record.fences or [record.fence], record.ids, mask, known)


def grant(
    queue_tx: QueueTransaction,
    heads: Sequence[StoredHead],
    stored: Sequence[bytes],
    *,
    owner: str,
    txn_id: str | None,
    lasts_ms: int,
    with_state: bool,
) -> HeldLease:
    """Lease messages that were removed from the ready ones, and count the deliveries; `stored` are their records."""
    tx, keys, now_ms, count = queue_tx.tx, queue_tx.keys, queue_tx.tx.now_ms, len(heads)
    is_plain = not with_state
    for head in heads:
        head.fence = fence_floor.next_fence(tx, head.fence)
        head.attempts += 1
        is_plain = is_plain and not head.is_special
    first, due_ms = heads[0], now_ms + lasts_ms
    content = stored[0] if count == 1 else b"".join(stored)
    fences = attempts = _NONE
    if count > 1:
        fences = _if_different([head.fence for head in heads])
        attempts = _if_different([head.attempts for head in heads])
    is_inline = len(content) <= LEASE_INLINE_BYTES_MAX
    record = LeaseRecord(
        owner,
        txn_id,
        now_ms,
        due_ms,
        lasts_ms,
        with_state,
        is_plain,
        first.fence,
        fences,
        first.attempts,
        attempts,
        first.id if count == 1 else b"".join([head.id for head in heads]),
        _END.pack(len(content)) if count == 1 else struct.pack(f">{count}I", *accumulate(map(len, stored))),
        content if is_inline else None,
    )
    # No other lease has this id: it would have to begin with the same message and fence, and end at the same time.
    id = due_ms.to_bytes(_TIME_BYTES, "big") + (first.fence & 0xFFFF).to_bytes(2, "big") + first.id[8:]
    held = HeldLease(tx, keys, id, record, content=content)
    if not is_inline:
        tx.put(keys.contents + id, content)
    tx.put(keys.due_key(due_ms, id), _encode(record))
    _note_due(queue_tx, due_ms)
    queue_tx.counters.leased += count
    queue_tx.counters.delivered += count
    return held


def grant_again(queue_tx: QueueTransaction, message: StoredMessage, ref: bytes, *, owner: str) -> HeldLease:
    """Lease a message that waited, and was taken out, with the `lease_ref` and the fence of its last delivery.

    The lease ends now: the caller moves its end.
    """
    tx = queue_tx.tx
    record = LeaseRecord(
        owner,
        txn_id=None,
        leased_ms=tx.now_ms,
        due_ms=tx.now_ms,
        lasts_ms=0,
        with_state=False,
        is_plain=False,
        fence=message.fence,
        fences=_NONE,
        attempt=message.attempts,
        attempts=_NONE,
        ids=message.id,
        ends=b"",
        content=None,
    )
    queue_tx.counters.leased += 1
    return _of_one(tx, queue_tx.keys, ref, record, encode(message))


def _of_one(tx: Transaction, keys: QueueKeys, ref: bytes, record: LeaseRecord, stored: bytes) -> HeldLease:
    """A lease of one message that is identified by its `lease_ref`. The caller moves its end, which writes it."""
    is_inline = len(stored) <= LEASE_INLINE_BYTES_MAX
    if not is_inline:
        tx.put(keys.contents + ref, stored)
    record = msgspec.structs.replace(record, ends=_END.pack(len(stored)), content=stored if is_inline else None)
    return HeldLease(tx, keys, ref, record, content=stored)


def _if_different(values: list[int]) -> list[int]:
    return values if any(value != values[0] for value in values) else _NONE


def load_all(tx: Transaction, keys: QueueKeys, id: bytes) -> list[HeldLease]:
    """A lease, and those of the messages that left it and were extended alone."""
    prefix = keys.moved + id
    moved = [key[len(keys.moved) :] for key, _ in tx.scan(prefix, prefix + b"\xff\xff", limit=MESSAGES_MAX + 1)]
    return [held for each in dict.fromkeys([id, *moved]) if (held := load(tx, keys, each)) is not None]


class HeldLeases:
    """The leases that a transaction uses, each loaded once and saved once."""

    __slots__ = ("_changed", "_loaded", "_queue_tx")

    def __init__(self, queue_tx: QueueTransaction) -> None:
        self._queue_tx = queue_tx
        self._loaded: dict[bytes, HeldLease | None] = {}
        self._changed: dict[bytes, HeldLease] = {}

    def find(self, proof: MessageLease) -> tuple[HeldLease, int] | None:
        """The lease that `proof` names, and the position of its message there, acknowledged or not."""
        id, ref = ref_of(proof)
        held, position = self.load(ref[:LEASE_BYTES]), ref[LEASE_BYTES]
        if held is None or held.left >> position & 1:
            held, position = self.load(ref), 0
            if held is None:
                return None
        record = held.record
        begin = position * ID_BYTES
        is_same = record.ids[begin : begin + ID_BYTES] == id and record.fence_at(position) == proof.fence
        return (held, position) if is_same else None

    def load(self, id: bytes) -> HeldLease | None:
        """A lease by its id."""
        loaded = self._loaded
        if id not in loaded:
            loaded[id] = load(self._queue_tx.tx, self._queue_tx.keys, id)
        return loaded[id]

    def add(self, held: HeldLease) -> None:
        """Let `find` and `load` find a lease that was granted in this transaction."""
        self._loaded[held.id] = held

    def change(self, held: HeldLease) -> None:
        """Let `save` write the lease."""
        self._changed[held.id] = held

    def save(self) -> bool:
        """Save the changed leases; whether there were any."""
        for held in self._changed.values():
            held.save(self._queue_tx)
        return bool(self._changed)


def load(tx: Transaction, keys: QueueKeys, id: bytes) -> HeldLease | None:
    """A lease by its id."""
    stored = None
    if len(id) == LEASE_BYTES:
        stored = tx.get(keys.due_key(int.from_bytes(id[:_TIME_BYTES], "big"), id))
    is_moved = stored is None
    if stored is None:
        moved = tx.get(keys.moved + id)
        stored = None if moved is None else tx.get(keys.due_key(int.from_bytes(moved, "big"), id))
    return None if stored is None else _held(tx, keys, id, stored, is_moved=is_moved)


def entry_of(tx: Transaction, keys: QueueKeys, ref: bytes) -> tuple[bytes, int]:
    """The entry in the due index of the lease that a `lease_ref` names, and the position after the one it names."""
    id, position = ref[:LEASE_BYTES], ref[LEASE_BYTES]
    held = load(tx, keys, id)
    if held is None or held.left >> position & 1:
        held = load(tx, keys, ref) or held
    if held is None:
        return keys.due_key(int.from_bytes(id[:_TIME_BYTES], "big"), id)[len(keys.due) :], position + 1
    return held.key()[len(keys.due) :], position + 1 if len(held.id) == LEASE_BYTES else 1


def ref_of(proof: MessageLease) -> tuple[bytes, bytes]:
    """The id of the message, and the lease and the position that a proof names.

    Raises:
        InvalidArgument: the message id is invalid.
        QueueMessageLeaseMismatch: the lease id is not one of this message and fence.
    """
    id = parse_id(proof.id)
    try:
        ref = bytes.fromhex(proof.lease_id[-2 * LEASE_BYTES - 2 :])
    except ValueError:
        ref = b""
    if len(ref) != LEASE_BYTES + 1 or proof.lease_id != format_lease_id(id, proof.fence, ref):
        raise lease_mismatch(proof)
    return id, ref


def acked_before(tx: Transaction, keys: QueueKeys, proof: MessageLease) -> str | None:
    """The correlation id of a message that was acknowledged under the same lease; None if that is not remembered."""
    wanted, ref = ref_of(proof)
    for lease, position in ((ref[:LEASE_BYTES], ref[LEASE_BYTES]), (ref, 0)):
        found = _acked_under(tx, keys, lease)
        if found is None or not found.positions >> position & 1:
            continue
        id = found.ids[position * ID_BYTES : (position + 1) * ID_BYTES]
        if id == wanted and proof.fence == found.fences[position if len(found.fences) > 1 else 0]:
            return found.correlation_ids[position] if found.correlation_ids else format_id(id)
    return None


def remember_ack(queue_tx: QueueTransaction, ref: bytes, message: StoredMessage) -> None:
    """Let a repeated ack of a message succeed that was acknowledged after its lease had ended."""
    tx = queue_tx.tx
    acked = _Acked([message.fence], message.id, b"", [message.correlation_id])
    tx.put(queue_tx.keys.ack_key(tx.now_ms // 60_000, ref), _encode(acked))


def acked_positions(tx: Transaction, keys: QueueKeys, lease: bytes, fences: list[int]) -> int:
    """The remembered acks of an ended lease, as bits. `fences` has one for all of its messages, or one for each."""
    found = _acked_under(tx, keys, lease)
    return found.positions if found is not None and found.fences == fences else 0


def _acked_under(tx: Transaction, keys: QueueKeys, lease: bytes) -> _Acked | None:
    minute = tx.now_ms // 60_000
    for ago in range(ACK_MEMORY_SECONDS // 60 + 1):
        stored = tx.get(keys.ack_key(minute - ago, lease))
        if stored is not None:
            return _decode_acked(stored)
    return None


def is_lease(value: bytes) -> bool:
    """Whether an entry of the due index is a lease."""
    return bool(value) and value[0] >= _ARRAY


def held_at(tx: Transaction, keys: QueueKeys, key: bytes, value: bytes) -> HeldLease | None:
    """The lease in an entry of the due index; None if the entry is of another kind."""
    if not is_lease(value):
        return None
    id = key[len(keys.due) + 8 :]
    return _held(tx, keys, id, value, is_moved=_is_moved(id, keys.due_at(key)))


def messages_at(tx: Transaction, keys: QueueKeys, key: bytes, value: bytes) -> list[StoredMessage]:
    """The messages that are left in the lease of an entry of the due index; none if the entry is of another kind."""
    held = held_at(tx, keys, key, value)
    return [] if held is None else held.messages()


def leased_messages(tx: Transaction, keys: QueueKeys) -> Iterator[StoredMessage]:
    """Every leased message of a queue."""
    for page in pages(tx, *keys.due_range(0)):
        for key, value in page:
            yield from messages_at(tx, keys, key, value)


def _held(tx: Transaction, keys: QueueKeys, id: bytes, stored: bytes, *, is_moved: bool) -> HeldLease:
    record = _decode(stored)
    settled = tx.get(keys.settled + id) if len(record.ids) > ID_BYTES else None
    return HeldLease(tx, keys, id, record, content=record.content, settled=settled, is_moved=is_moved)


def _is_moved(id: bytes, due_ms: int) -> bool:
    """Whether a lease ends at another time than its id says."""
    return len(id) != LEASE_BYTES or due_ms != int.from_bytes(id[:_TIME_BYTES], "big")


def _note_due(queue_tx: QueueTransaction, due_ms: int) -> None:
    queue_tx.counters.clock_ms = max(queue_tx.counters.clock_ms, queue_tx.tx.now_ms)
    queue_tx.counters.add_due(due_ms)
