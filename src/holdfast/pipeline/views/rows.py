"""What a plane holds at the moment, thing by thing: messages, mail, entities, blobs, and what names a blob.

Each function walks over one universe in bounded memory. In a PostgreSQL that others write to, a message that moves
meanwhile may be seen in both of its places, or in neither; a checkpoint stands still.
"""

import string
from collections.abc import Iterator
from typing import Final

import msgspec

from holdfast.kv import Database, Subspace, Transaction
from holdfast.layers import entities
from holdfast.layers.blobs import Blob
from holdfast.layers.entities import Entity, EntityKey
from holdfast.layers.mailboxes import keys as mailrooms
from holdfast.layers.mailboxes.keys import Address
from holdfast.layers.queues import keys as queue_keys
from holdfast.layers.queues import schedules_of
from holdfast.layers.queues.keys import QueueKey, StoredMessage, text_of
from holdfast.limits import PAGE_ITEMS
from holdfast.runtime.maintenance.scan import names, walk
from holdfast.wire.entities import Fields
from holdfast.wire.queues import Schedule

HASH_CHARACTERS: Final = 64


class MessageRow(msgspec.Struct, frozen=True):
    """A message that is in a queue."""

    universe: str
    queue: str
    id: str
    state: str  # ready, leased, delayed, or blocked: behind another message of its group
    priority: int
    group: str | None
    created_ms: int
    due_ms: int  # When its lease or its delay ends; 0: neither.
    ttl_at_ms: int  # 0: it has no end.
    attempts: int
    failures: int
    max_attempts: int
    correlation_id: str
    content_type: str
    attributes: dict[str, str]
    payload: bytes | None  # None: the blob has it.
    blob: str | None
    size: int
    last_error: str | None
    origin: str | None  # The queue that a dead letter died in.
    died_ms: int


class MailRow(msgspec.Struct, frozen=True):
    """A mail that waits, or was delivered and is not confirmed."""

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


class EntityRow(msgspec.Struct, frozen=True):
    """An entity as it is. A deleted one has no fields, and keeps its version."""

    universe: str
    kind: str
    id: str
    version: int
    created_ms: int
    updated_ms: int
    deleted: bool
    fields: Fields  # Canonical CBOR by name.


class ChangeRow(msgspec.Struct, frozen=True):
    """What one version of an entity changed."""

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
    """A blob that is recorded."""

    universe: str
    hash: str
    size: int
    inline: bool  # The key space has its bytes, not the object store.


class Reference(msgspec.Struct, frozen=True):
    """Something that names a blob, or has text in it that could be the name of one."""

    universe: str
    hash: str
    place: str  # The kind of thing, such as `q` for queues and `w` for worlds.


def messages(database: Database, universe: str) -> Iterator[MessageRow]:
    """Every message of every queue, dead letters too."""
    for name in names(database, queue_keys.queues(universe)):
        queue = QueueKey(universe, name)
        keys = queue_keys.keys_of(queue)
        places = (
            (keys.ready_range(), "ready"),
            ((keys.parked, keys.parked + b"\xff" * (queue_keys.ID_BYTES + 1)), "parked"),
            (keys.waiting.range(), "blocked"),
        )
        for (begin, end), state in places:
            for _, value in walk(database, begin, end):
                message = queue_keys.decode(value)
                if message.has_body:
                    message.payload = database.read(_get, keys.body_key(message.id))
                yield _message(queue, message, state)


def dead_letters(database: Database, universe: str) -> Iterator[MessageRow]:
    """Every message that died and is still there, with the error that it died of."""
    return (message for message in messages(database, universe) if message.origin is not None)


def schedules(database: Database, universe: str) -> Iterator[tuple[str, Schedule]]:
    """Every schedule, with its queue."""
    for name in names(database, queue_keys.queues(universe)):
        for schedule in database.read(schedules_of, QueueKey(universe, name)):
            yield name, schedule


def mails(database: Database, universe: str) -> Iterator[MailRow]:
    """Every mail of every mailbox, in the order in which each box has them."""
    for agent in names(database, Subspace("u", universe, "mail")):
        address = Address(universe, agent)
        keys = mailrooms.keys_of(address)
        box = database.read(mailrooms.box_of, keys)
        for key, value in walk(database, *keys.mails_from(box.first)):
            sequence = int.from_bytes(key[-mailrooms.SEQUENCE_BYTES :], "big")
            mail = mailrooms.decode_mail(value)
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


def all_entities(database: Database, universe: str) -> Iterator[EntityRow]:
    """Every entity, deleted ones too."""
    for kind in names(database, Subspace("u", universe, "entities")):
        keys = Subspace("u", universe, "entities", kind)
        for key, value in walk(database, *keys.range()):
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
    """Every change of every entity that its history still has, entity by entity, in the order of versions."""
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
    """Every blob that is recorded."""
    keys = Subspace("u", universe, "cas")
    for key, value in walk(database, *keys.range()):
        blob = _decode_blob(value)
        yield BlobRow(universe, keys.unpack(key)[0].hex(), blob.size, blob.inline is not None)


def references(database: Database, universe: str) -> Iterator[Reference]:
    """Whatever in the key space names a blob.

    A hash is looked for in every value, because callers keep theirs anywhere. Blobs that name other blobs are not among
    these, nor are records in segments; `hashes_in` looks into their bytes.
    """
    everything = Subspace("u", universe)
    for place in names(database, everything):
        if place == "cas":
            continue
        for _, value in walk(database, *everything.range(place)):
            for hash in hashes_in(value):
                yield Reference(universe, hash, place)


def hashes_in(data: bytes) -> set[str]:
    """Everything in these bytes that could be the name of a blob: 64 hexadecimal digits, wherever they begin."""
    found: set[str] = set()
    for digits in digit_runs(data):
        run = digits.decode().lower()
        found.update(run[n : n + HASH_CHARACTERS] for n in range(len(run) - HASH_CHARACTERS + 1))
    return found


def digit_runs(data: bytes) -> Iterator[bytes]:
    """Hexadecimal digits that stand together, where they are enough for a hash."""
    # Ten times as fast as a regular expression, which would look at every byte by itself.
    digits = data.translate(_DIGITS)
    begin = digits.find(_RUN)
    while begin >= 0:
        end = digits.find(b"\0", begin)
        end = end if end >= 0 else len(data)
        yield data[begin:end]
        begin = digits.find(_RUN, end)


def _get(tx: Transaction, key: bytes) -> bytes | None:
    return tx.get(key)


def _message(queue: QueueKey, message: StoredMessage, state: str) -> MessageRow:
    if state == "parked":
        state = "leased" if message.owner is not None else "delayed"
    return MessageRow(
        queue.universe,
        queue.name,
        text_of(message.id),
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


_RUN: Final = b"\1" * HASH_CHARACTERS
_DIGITS: Final = bytes(chr(byte) in string.hexdigits for byte in range(256))  # 1 for a hexadecimal digit.
_decode_blob: Final = msgspec.msgpack.Decoder(Blob).decode
_decode_entity: Final = msgspec.msgpack.Decoder(Entity).decode
