"""Blobs: immutable bytes named by their SHA-256, shared by a universe.

    (u, universe, "cas", hash)                   ->  a Blob: its size, and the bytes themselves if they are small
    (u, universe, "cas-unreferenced", hash)      ->  a Mark: a message that named it is gone, or a search found no name
    (u, universe, "cas-deleted", hash, upload)   ->  when the record was deleted; the body is still in the object store

A larger body is in the object store, at `cas/<universe>/sha256/<hash>.<upload>`. It is written there before it is
recorded here: a body without a record is harmless; a record without a body would be data loss. Every upload has a path
of its own, so deleting a body never removes the one that another put of the same content has just written.

    stored ──a search finds no name──► marked ──a grace period, another search──► record deleted
       ▲                                 │                                          └──a grace period──► body deleted
       └────────put again or named───────┘

Two searches that are a grace period apart must find no name. Between them, a put of the same content, or a message,
inbox item or snapshot that names the blob, removes the mark; and when such a message is gone, the blob needs two
searches again. The deletion checks, in one transaction, that mark and record are those that the search saw. A message
that names a deleted blob is refused. The body stays for a grace period after its record, for readers and backups that
found the record before. A pinned blob is never deleted.
"""

import string
from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import Final, NamedTuple

import msgspec

from fastness.errors import BlobNotFound, Busy, InvalidArgument, SizeMismatch
from fastness.kv import Subspace, Transaction, pages
from fastness.layers.quotas import quotas_of
from fastness.limits import BLOB_NAMED_MAX, BLOB_TOUCH_SECONDS, BLOB_UPLOAD_SECONDS_MAX


class Verify(StrEnum):
    """How often a body's hash is verified when it is read."""

    ALWAYS = "always"
    SAMPLED = "sampled"
    NEVER = "never"


class Blob(msgspec.Struct, frozen=True, array_like=True):
    """The record of a blob; `inline` is None if the body is in the object store."""

    size: int
    inline: bytes | None = None
    upload: str = ""  # Names the body in the object store; empty if it is inline.
    put_ms: int = 0  # The last put of this content; `record` sets it.
    pinned: bool = True  # Kept although nothing names it.
    named: list[bytes] | None = None  # Digests that its content may name. None: not known, or too many.


class Mark(NamedTuple):
    """Why a blob may be unreferenced."""

    at_ms: int
    is_found: bool  # A search found no name. False: a message that named it is gone, so a search is needed.


class DeletedBody(NamedTuple):
    """A body whose record was deleted."""

    digest: bytes
    upload: str
    deleted_ms: int


SHA256_BYTES: Final = 32
HASH_CHARACTERS: Final = 64
UNREFERENCED: Final = "cas-unreferenced"
DELETED: Final = "cas-deleted"
AREAS: Final = ("cas", UNREFERENCED, DELETED)  # The areas of a universe whose keys are those of blobs.

_MS_BYTES: Final = 8
_FOUND: Final = b"\x01"
_TIME_BITS_BELOW: Final = 80  # Of a UUIDv7, below its milliseconds.
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Blob).decode


def find(tx: Transaction, universe: str, digest: bytes) -> Blob | None:
    """The record of the blob with this SHA-256; None if there is none."""
    stored = tx.get(_key(universe, digest))
    return None if stored is None else _decode(stored)


def find_for_put(tx: Transaction, universe: str, digest: bytes, *, pinned: bool) -> tuple[Blob | None, bool, str]:
    """The record of a blob, whether another put of it changes nothing, and a name for a new upload of its body."""
    known = find(tx, universe, digest)
    fresh = known is not None and is_fresh(tx, universe, digest, known, pinned=pinned)
    return known, fresh, tx.new_id().hex


def record(tx: Transaction, universe: str, digest: bytes, blob: Blob) -> Blob:
    """Record a blob whose body is stored or inline; the record, which has another upload if one was recorded before.

    A blob that is recorded already stays as it is, except that its time is renewed, and that it becomes pinned if
    `blob` is.

    Raises:
        SizeMismatch: it is recorded with another size.
        Busy: the upload took so long that its body may have been deleted as abandoned.
        QuotaExceeded: the universe has no room for the body; it is deleted as abandoned.
    """
    known = find(tx, universe, digest)
    if known is None:
        if blob.upload and tx.now_ms - _upload_ms(blob.upload) > BLOB_UPLOAD_SECONDS_MAX * 1_000:
            raise Busy(f"Storing blob {digest.hex()} took more than {BLOB_UPLOAD_SECONDS_MAX} s; store it again")
        if tx.usage is not None and blob.inline is None:
            quotas_of(tx).admit_bytes(universe, blob.size)
        stored = msgspec.structs.replace(blob, put_ms=tx.now_ms)
        tx.put(_key(universe, digest), _encode(stored))
        return stored
    if known.size != blob.size:
        raise SizeMismatch(
            f"Blob {digest.hex()} is recorded with {known.size} bytes but has {blob.size}; restore it from a backup"
        )
    renew(tx, universe, digest, known, pinned=blob.pinned)
    return known


def body_bytes(tx: Transaction, universe: str) -> int:
    """The bytes of the bodies that a universe has in the object store. Reads the record of every blob."""
    size = 0
    for page in pages(tx, *Subspace("u", universe, "cas").range()):
        for _, value in page:
            blob = _decode(value)
            size += blob.size if blob.inline is None else 0
    return size


def renew(tx: Transaction, universe: str, digest: bytes, known: Blob, *, pinned: bool) -> None:
    """Count a put of content that is recorded: its grace period starts again."""
    if not is_fresh(tx, universe, digest, known, pinned=pinned):
        renewed = msgspec.structs.replace(known, put_ms=tx.now_ms, pinned=known.pinned or pinned)
        tx.put(_key(universe, digest), _encode(renewed))
        tx.delete(_mark_key(universe, digest))


def is_fresh(tx: Transaction, universe: str, digest: bytes, known: Blob, *, pinned: bool) -> bool:
    """Whether another put of a recorded blob need not be recorded."""
    if pinned and not known.pinned:
        return False
    if known.pinned:
        return True
    return tx.now_ms - known.put_ms < BLOB_TOUCH_SECONDS * 1_000 and tx.get(_mark_key(universe, digest)) is None


def use(tx: Transaction, universe: str, hash: str) -> None:
    """Name a blob in a message, an inbox item or a snapshot: it is not deleted while that exists.

    Raises:
        BlobNotFound: it is not stored.
    """
    digest = digest_of(hash)
    if find(tx, universe, digest) is None:
        raise BlobNotFound(f"No blob {hash} is stored in {universe}; put it first")
    if tx.get(_mark_key(universe, digest)) is not None:
        tx.delete(_mark_key(universe, digest))


def release(tx: Transaction, universe: str, hash: str) -> None:
    """Note that a message which names this blob is gone. It is deleted later, if nothing else names it."""
    tx.put(_mark_key(universe, digest_of(hash)), _encode_mark(Mark(tx.now_ms, is_found=False)))


def set_pinned(tx: Transaction, universe: str, hash: str, *, pinned: bool) -> None:
    """Pin a blob: it is kept although nothing names it. Or unpin it.

    Raises:
        BlobNotFound: it is not stored.
    """
    digest = digest_of(hash)
    known = find(tx, universe, digest)
    if known is None:
        raise BlobNotFound(f"No blob {hash} is stored in {universe}; put it first")
    if pinned != known.pinned:
        tx.put(_key(universe, digest), _encode(msgspec.structs.replace(known, pinned=pinned)))
        tx.delete(_mark_key(universe, digest))


def mark_of(tx: Transaction, universe: str, digest: bytes) -> Mark | None:
    """The mark of a blob; None if it has none."""
    stored = tx.get(_mark_key(universe, digest))
    return None if stored is None else decode_mark(stored)


def unmark(tx: Transaction, universe: str, digest: bytes, mark: Mark) -> None:
    """Remove the mark of a blob that is referenced, unless the mark has changed."""
    if mark_of(tx, universe, digest) == mark:
        tx.delete(_mark_key(universe, digest))


def due_ms(blob: Blob, mark: Mark | None, *, grace_ms: int) -> int | None:
    """From when on the record of an unreferenced blob can be deleted; None if no search has found it so yet."""
    if mark is None or not mark.is_found:
        return None
    return max(mark.at_ms, blob.put_ms + BLOB_TOUCH_SECONDS * 1_000) + grace_ms


def is_due(blob: Blob, mark: Mark | None, *, now_ms: int, grace_ms: int) -> bool:
    """Whether the record of an unreferenced blob with this mark can be deleted."""
    at_ms = due_ms(blob, mark, grace_ms=grace_ms)
    return at_ms is not None and at_ms <= now_ms


def mark_or_delete(
    tx: Transaction, universe: str, digest: bytes, *, seen: Blob, mark: Mark | None, grace_ms: int
) -> bool:
    """Mark a blob that a search found unreferenced, or delete its record after the grace period; whether it did that.

    `seen` and `mark` are what the search saw. If they have changed, the blob was put, pinned or named since, and stays.
    """
    known = find(tx, universe, digest)
    if known is None or without_body(known) != seen or mark_of(tx, universe, digest) != mark:
        return False
    if mark is None or not mark.is_found:
        tx.put(_mark_key(universe, digest), _encode_mark(Mark(tx.now_ms, is_found=True)))
        return False
    if not is_due(known, mark, now_ms=tx.now_ms, grace_ms=grace_ms):
        return False
    tx.delete(_key(universe, digest))
    tx.delete(_mark_key(universe, digest))
    if known.inline is None:
        tx.put(Subspace("u", universe, DELETED).key(digest, known.upload), _ms(tx.now_ms))
    return True


def without_body(blob: Blob) -> Blob:
    """A record for comparison: bodies of one hash are equal."""
    return msgspec.structs.replace(blob, inline=None)


def is_known_body(tx: Transaction, universe: str, digest: bytes, upload: str) -> bool:
    """Whether a body is that of a recorded blob, or of a deleted one whose body is deleted later."""
    known = find(tx, universe, digest)
    if known is not None and known.upload == upload:
        return True
    return tx.get(Subspace("u", universe, DELETED).key(digest, upload)) is not None


def drop_mark(tx: Transaction, universe: str, digest: bytes) -> None:
    """Remove a mark whose blob is not recorded."""
    if find(tx, universe, digest) is None:
        tx.delete(_mark_key(universe, digest))


def deleted_bodies(tx: Transaction, universe: str, *, after: bytes, limit: int) -> list[tuple[bytes, DeletedBody]]:
    """At most `limit` bodies without a record that are to be deleted, with their keys, after the key `after`."""
    keys = Subspace("u", universe, DELETED)
    begin, end = keys.range()
    found = []
    for key, value in tx.scan(max(begin, after), end, limit=limit):
        digest, upload = keys.unpack(key)
        found.append((key, DeletedBody(digest, upload, int.from_bytes(value, "big"))))
    return found


def forget_bodies(tx: Transaction, keys: Iterable[bytes]) -> None:
    """Remove the keys of bodies that were deleted from the object store."""
    for key in keys:
        tx.delete(key)


def digest_of(hash: str) -> bytes:
    """The SHA-256 digest that a blob hash encodes.

    Raises:
        InvalidArgument: it is not a blob hash.
    """
    try:
        digest = bytes.fromhex(hash)
    except (TypeError, ValueError):
        digest = b""
    if len(digest) != SHA256_BYTES:
        raise InvalidArgument(f"{hash!r} is not a blob hash; use the 64 hex digits that put returned")
    return digest


def object_path(universe: str, digest: bytes, upload: str) -> str:
    """The object store path of a large blob's body."""
    return f"{folder(universe)}/{digest.hex()}.{upload}"


def folder(universe: str) -> str:
    """The object store folder of a universe's bodies."""
    return f"cas/{universe}/sha256"


def parse_path(path: str) -> tuple[str, str]:
    """The hash and the upload in the path of a body."""
    hash, _, upload = path.rpartition("/")[2].partition(".")
    return hash, upload


def is_abandoned(upload: str, *, now_ms: int, after_ms: int) -> bool:
    """Whether an upload without a record began so long ago that it is never recorded."""
    try:
        return now_ms - _upload_ms(upload) > after_ms
    except ValueError:
        return False


def hashes_in(data: bytes) -> set[str]:
    """All possible blob hashes in these bytes: 64 hexadecimal digits, at any offset."""
    found: set[str] = set()
    for digits in digit_runs(data):
        run = digits.decode().lower()
        found.update(run[n : n + HASH_CHARACTERS] for n in range(len(run) - HASH_CHARACTERS + 1))
    return found


def digit_runs(data: bytes) -> Iterator[bytes]:
    """The runs of hexadecimal digits that are long enough for a hash."""
    # Ten times as fast as a regular expression.
    digits = data.translate(_DIGITS)
    begin = digits.find(_RUN)
    while begin >= 0:
        end = digits.find(b"\0", begin)
        end = end if end >= 0 else len(data)
        yield data[begin:end]
        begin = digits.find(_RUN, end)


class HashSearch:
    """Collects the possible blob hashes in content that arrives in parts."""

    def __init__(self) -> None:
        self._end = b""
        self.found: set[str] = set()

    def feed(self, part: bytes) -> None:
        """Search the next part, and where it joins the one before."""
        data = self._end + part
        self.found |= hashes_in(data)
        self._end = data[-(HASH_CHARACTERS - 1) :]


class NameSearch:
    """`HashSearch` for the record of a blob: bounded, because content may be one long run of digits."""

    def __init__(self) -> None:
        self._search = HashSearch()

    def feed(self, part: bytes) -> None:
        """Search the next part, unless too many were found."""
        if len(self._search.found) <= BLOB_NAMED_MAX:
            self._search.feed(part)

    def result(self) -> list[bytes] | None:
        """The digests that the content may name; None if there are too many to record."""
        found = self._search.found
        return sorted(map(bytes.fromhex, found)) if len(found) <= BLOB_NAMED_MAX else None


def named_in(data: bytes) -> list[bytes] | None:
    """The digests that this content may name; None if there are too many to record."""
    search = NameSearch()
    search.feed(data)
    return search.result()


def _upload_ms(upload: str) -> int:
    """When an upload began: the time of its UUIDv7."""
    return int(upload, 16) >> _TIME_BITS_BELOW


def decode_mark(stored: bytes) -> Mark:
    """The mark that a value encodes."""
    return Mark(int.from_bytes(stored[:_MS_BYTES], "big"), stored[_MS_BYTES:] == _FOUND)


def _encode_mark(mark: Mark) -> bytes:
    return _ms(mark.at_ms) + (_FOUND if mark.is_found else b"")


def _ms(at_ms: int) -> bytes:
    return at_ms.to_bytes(_MS_BYTES, "big")


def _key(universe: str, digest: bytes) -> bytes:
    return Subspace("u", universe, "cas").key(digest)


def _mark_key(universe: str, digest: bytes) -> bytes:
    return Subspace("u", universe, UNREFERENCED).key(digest)


_RUN: Final = b"\1" * HASH_CHARACTERS
_DIGITS: Final = bytes(chr(byte) in string.hexdigits for byte in range(256))  # 1 for a hexadecimal digit.
