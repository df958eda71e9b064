"""Iterates over a plane's messages, mail, entities, blobs and references to blobs.

Each function reads one universe in bounded memory. In a live PostgreSQL, a message that changes state meanwhile may be
seen twice, or not at all; a checkpoint does not change.
"""

from collections.abc import Iterator
from typing import Final

import msgspec

from fastness.kv import Database, Subspace, Transaction
from fastness.layers import entities, leases
from fastness.layers.blobs import AREAS, Blob, hashes_in
from fastness.layers.entities import Entity, EntityKey
from fastness.layers.leases import Grant
from fastness.layers.mailboxes import keys as mailbox_keys
from fastness.layers.mailboxes.keys import Address
from fastness.layers.mailboxes.receipts import decode as _decode_receipt
from fastness.layers.queues import keys as queue_keys
from fastness.layers.queues import message_leases, schedules_of
from fastness.layers.queues.keys import QueueKey, QueueKeys
from fastness.layers.states import State
from fastness.limits import PAGE_ITEMS
from fastness.runtime.maintenance.scan import names, scan_range
from fastness.wire import stored_messages
from fastness.wire.entities import Fields
from fastness.wire.queues import Schedule
from fastness.wire.stored_messages import StoredMessage, format_id


class MessageRow(msgspec.Struct, frozen=True):
    """A message in a queue."""

    universe: str
    queue: str
    id: str
    state: str  # ready, leased, delayed, or blocked: behind another message of its group
    priority: int
    group: str | None
    created_ms: int
    due_ms: int  # The end of its lease or delay; 0: none.
    ttl_at_ms: int  # 0: none.
    attempts: int
    failures: int
    max_attempts: int
    correlation_id: str
    content_type: str
    attributes: dict[str, str]
    payload: bytes | None  # None: in the blob.
    blob: str | None
    size: int
    last_error: str | None
    origin: str | None  # The queue that a dead letter comes from.
    died_ms: int


class MailRow(msgspec.Struct, frozen=True):
    """A mail that is waiting, or delivered and not confirmed."""

    universe: str
    recipient: str
    sequence: int
    id: str
    sender: str
    sent_ms: int
    expires_ms: int
    delivered: bool
    content_type: str
    correlation_id: str
    body: bytes


class ReceiptRow(msgspec.Struct, frozen=True):
    """A receipt that its sender may still read."""

    universe: str
    sender: str
    sequence: int
    mail_id: str
    recipient: str
    state: str
    at_ms: int


class StateRow(msgspec.Struct, frozen=True):
    """A state document."""

    universe: str
    key: str
    version: int
    etag: str
    updated_ms: int
    correlation_id: str | None
    value: bytes


class LeaseRow(msgspec.Struct, frozen=True):
    """The latest grant of a lease."""

    universe: str
    key: str
    owner: str
    fence: int
    held: bool  # At the time of the read.
    acquired_ms: int
    expires_ms: int


class EntityRow(msgspec.Struct, frozen=True):
    """The current state of an entity. A deleted one has no fields, and keeps its version."""

    universe: str
    kind: str
    id: str
    version: int
    created_ms: int
    updated_ms: int
    deleted: bool
    fields: Fields  # Canonical CBOR by name.


class ChangeRow(msgspec.Struct, frozen=True):
    """The change of one version of an entity."""

    universe: str
    kind: str
    id: str
    version: int
    at_ms: int
    durability: str
    fields: Fields
    removed: list[str]
    deleted: bool


class BlobRow(msgspec.Struct, frozen=True):
    """A recorded blob."""

    universe: str
    hash: str
    size: int
    inline: bool  # The bytes are in the key space, not in the object store.
    upload: str = ""  # The name of its body in the object store.


class Reference(msgspec.Struct, frozen=True):
    """A reference to a blob, or text that looks like one."""

    universe: str
    hash: str
    area: str  # The part of the key space, such as `q` for queues and `w` for worlds.


def messages(database: Database, universe: str, *, with_payloads: bool = True) -> Iterator[MessageRow]:
    """Every message of every queue, dead letters too."""
    for name in names(database, queue_keys.queues(universe)):
        queue = QueueKey(universe, name)
        keys = queue_keys.keys_of(queue)
        for message, state in _messages_of(database, keys):
            if message.has_body and with_payloads:
                message.payload = database.read(_get, keys.body_key(message.id))
            yield _message(queue, message, state)


def _messages_of(database: Database, keys: QueueKeys) -> Iterator[tuple[StoredMessage, str]]:
    """The messages of a queue with their states."""
    ranges = ((keys.ready_range(), "ready"), (keys.delayed_range(), "delayed"), (keys.waiting.range(), "blocked"))
    for (begin, end), state in ranges:
        for _, value in scan_range(database, begin, end):
            yield stored_messages.decode(value), state
    for key, value in scan_range(database, *keys.due_range(0)):
        for message in database.read(message_leases.messages_at, keys, key, value):
            yield message, "leased"


def dead_letters(database: Database, universe: str) -> Iterator[MessageRow]:
    """Every dead letter, with its last error."""
    return (message for message in messages(database, universe) if message.origin is not None)


def schedules(database: Database, universe: str) -> Iterator[tuple[str, Schedule]]:
    """Every schedule, with its queue."""
    for name in names(database, queue_keys.queues(universe)):
        for schedule in database.read(schedules_of, QueueKey(universe, name)):
            yield name, schedule


def mails(database: Database, universe: str) -> Iterator[MailRow]:
    """Every mail of every mailbox, in mailbox order."""
    for agent in names(database, Subspace("u", universe, "mail")):
        address = Address(universe, agent)
        keys = mailbox_keys.keys_of(address)
        box = database.read(mailbox_keys.box_of, keys)
        for key, value in scan_range(database, *keys.mails_from(box.first)):
            sequence = int.from_bytes(key[-mailbox_keys.SEQUENCE_BYTES :], "big")
            mail = mailbox_keys.decode_mail(value)
            yield MailRow(
                universe,
                str(address),
                sequence,
                mail.id,
                mail.sender,
                mail.sent_ms,
                mail.expires_ms,
                sequence < box.delivered,
                mail.content_type,
                mail.correlation_id,
                mail.body,
            )


def receipts(database: Database, universe: str) -> Iterator[ReceiptRow]:
    """Every receipt of every sender, in order."""
    for agent in names(database, Subspace("u", universe, "mail")):
        address = Address(universe, agent)
        for _, value in scan_range(database, *mailbox_keys.keys_of(address).receipts_from(0)):
            receipt = _decode_receipt(value)
            yield ReceiptRow(
                universe, str(address), receipt.sequence, receipt.id, receipt.to, receipt.state, receipt.at_ms
            )


def states(database: Database, universe: str) -> Iterator[StateRow]:
    """Every state document, by key."""
    keys = Subspace("u", universe, "states")
    for key, value in scan_range(database, *keys.range()):
        state = _decode_state(value)
        yield StateRow(
            universe,
            keys.unpack(key)[0],
            state.version,
            state.etag,
            state.updated_ms,
            state.correlation_id,
            state.value,
        )


def all_leases(database: Database, universe: str) -> Iterator[LeaseRow]:
    """The latest grant of every lease, by key."""
    after = ""
    while True:
        now_ms, page = database.read(_leases, universe, after)
        for after, grant in page:
            held = grant.holds_at(now_ms)
            yield LeaseRow(universe, after, grant.owner, grant.fence, held, grant.acquired_ms, grant.expires_ms)
        if len(page) < PAGE_ITEMS:
            return


def all_entities(database: Database, universe: str) -> Iterator[EntityRow]:
    """Every entity, deleted ones too."""
    for kind in names(database, Subspace("u", universe, "entities")):
        keys = Subspace("u", universe, "entities", kind)
        for key, value in scan_range(database, *keys.range()):
            entity = _decode_entity(value)
            yield EntityRow(
                universe,
                kind,
                keys.unpack(key)[0],
                entity.version,
                entity.created_ms,
                entity.updated_ms,
                entity.deleted,
                entity.fields,
            )


def entity_changes(database: Database, universe: str) -> Iterator[ChangeRow]:
    """Every change in every entity's history, by entity and version."""
    for entity in all_entities(database, universe):
        key, after = EntityKey(universe, entity.kind, entity.id), 0
        while page := database.read(entities.history, key, after=after, limit=PAGE_ITEMS):
            for change in page:
                yield ChangeRow(
                    universe,
                    entity.kind,
                    entity.id,
                    change.version,
                    change.at_ms,
                    change.durability,
                    change.fields,
                    change.removed,
                    change.deleted,
                )
            after = page[-1].version


def blobs(database: Database, universe: str) -> Iterator[BlobRow]:
    """Every recorded blob."""
    keys = Subspace("u", universe, "cas")
    for key, value in scan_range(database, *keys.range()):
        blob = _decode_blob(value)
        yield BlobRow(universe, keys.unpack(key)[0].hex(), blob.size, blob.inline is not None, blob.upload)


def references(database: Database, universe: str) -> Iterator[Reference]:
    """Every reference to a blob in the key space.

    Every value is searched, because callers may keep hashes anywhere. References in segments and in blobs are not
    included; `hashes_in` finds those in their bytes.
    """
    everything = Subspace("u", universe)
    for area in names(database, everything):
        if area in AREAS:
            continue
        for _, value in scan_range(database, *everything.range(area)):
            for hash in hashes_in(value):
                yield Reference(universe, hash, area)


def _leases(tx: Transaction, universe: str, after: str) -> tuple[int, list[tuple[str, Grant]]]:
    return tx.now_ms, leases.page(tx, universe, after=after, limit=PAGE_ITEMS)


def _get(tx: Transaction, key: bytes) -> bytes | None:
    return tx.get(key)


def _message(queue: QueueKey, message: StoredMessage, state: str) -> MessageRow:
    return MessageRow(
        queue.universe,
        queue.name,
        format_id(message.id),
        state,
        message.priority,
        message.group,
        message.created_ms,
        message.due_ms if state in ("leased", "delayed") else 0,
        message.ttl_at_ms,
        message.attempts,
        message.failures,
        message.max_attempts,
        message.correlation_id,
        message.content_type,
        message.attributes,
        message.payload,
        message.blob,
        message.size,
        message.last_error,
        message.origin,
        message.died_ms,
    )


_decode_blob: Final = msgspec.msgpack.Decoder(Blob).decode
_decode_state: Final = msgspec.msgpack.Decoder(State).decode
_decode_entity: Final = msgspec.msgpack.Decoder(Entity).decode
