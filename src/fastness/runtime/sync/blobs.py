"""Generated from runtime/blobs.py by tools/make_twins.py; change that file instead."""

import hashlib
import random
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import IO

from fastness import limits
from fastness.backends.objects import ObjectStore
from fastness.errors import (
    BlobNotFound,
    DiskFull,
    FastnessError,
    HashMismatch,
    InvalidValue,
    MissingObject,
    ObjectNotFound,
    SizeMismatch,
    Unsupported,
)
from fastness.kv import Database, Transaction
from fastness.layers import blobs
from fastness.layers.blobs import Blob, Verify
from fastness.wire.blobs import Body, Stored


class BlobStore:
    """Stores and reads the blobs of a plane."""

    def __init__(self, database: Database, objects: ObjectStore | None, *, verify: Verify = Verify.ALWAYS) -> None:
        self._database = database
        self._objects = objects
        self._verify = verify
        self._sample = random.Random()

    def put(self, universe: str, data: bytes, *, pinned: bool = True) -> Stored:
        """Store `data`; its hash and size. Storing it again changes nothing.

        Without `pinned` it is deleted some time after nothing names it any more.

        Raises:
            Unsupported: it is too large for the key space, and the plane has no object store.
        """
        if not isinstance(data, bytes):
            raise InvalidValue(f"A blob must be bytes, not {type(data).__name__}; encode it first")
        digest = hashlib.sha256(data).digest()
        if len(data) <= limits.BLOB_INLINE_BYTES_MAX:
            blob = Blob(len(data), data, pinned=pinned)
            self._database.transact(blobs.record, universe, digest, blob)
        else:
            upload = self._begin(universe, digest, len(data), pinned=pinned)
            if upload is not None:
                self._store().put(blobs.object_path(universe, digest, upload), data)
                blob = Blob(len(data), upload=upload, pinned=pinned, named=blobs.named_in(data))
                self._record(universe, digest, blob)
        return Stored(digest.hex(), len(data))

    def write(self, universe: str, chunks: Iterable[bytes], *, pinned: bool = True) -> Stored:
        """Store a stream in bounded memory; its hash and size."""
        with tempfile.SpooledTemporaryFile(limits.BLOB_SPOOL_BYTES) as spool:
            sha, size, search = hashlib.sha256(), 0, blobs.NameSearch()
            for chunk in chunks:
                if not isinstance(chunk, bytes):
                    raise InvalidValue(f"A blob stream must yield bytes, not {type(chunk).__name__}; encode it first")
                sha.update(chunk)
                search.feed(chunk)
                size += len(chunk)
                spool.write(chunk)
            spool.seek(0)
            if size <= limits.BLOB_INLINE_BYTES_MAX:
                return self.put(universe, spool.read(), pinned=pinned)
            digest = sha.digest()
            upload = self._begin(universe, digest, size, pinned=pinned)
            if upload is not None:
                self._store().write(blobs.object_path(universe, digest, upload), _chunks(spool))
                self._record(universe, digest, Blob(size, upload=upload, pinned=pinned, named=search.result()))
            return Stored(digest.hex(), size)

    def _begin(self, universe: str, digest: bytes, size: int, *, pinned: bool) -> str | None:
        """A name for the upload of a body; None if the blob is recorded, which then counts as put again."""
        known, is_fresh, upload = self._database.read(blobs.find_for_put, universe, digest, pinned=pinned)
        if known is not None and not is_fresh:
            again = Blob(size, pinned=pinned)
            if not self._database.transact(_renew_recorded, universe, digest, again):
                return upload  # Deleted since it was read.
        size_max = self._database.object_bytes_max
        if known is None and size_max is not None and size > size_max:
            raise DiskFull(
                f"The blob has {size} bytes, and the disk has {size_max} above its reserve (disk_reserve_bytes); "
                "nothing was stored. Free some space, then try again"
            )
        return None if known is not None else upload

    def _record(self, universe: str, digest: bytes, blob: Blob) -> None:
        """Record an uploaded body, or delete it if another put of the same content was recorded first."""
        recorded = self._database.transact(blobs.record, universe, digest, blob)
        if recorded.upload != blob.upload:
            with suppress(FastnessError):  # `fastness gc` deletes it later.
                self._store().delete(blobs.object_path(universe, digest, blob.upload))

    def get(self, universe: str, hash: str) -> Body:
        """All bytes of a blob, in memory.

        Raises:
            BlobNotFound: it is not stored.
            Corrupt: it is stored and cannot be read back completely.
        """
        digest, blob = self._find(universe, hash)
        if blob.inline is not None:
            data = blob.inline
        else:
            try:
                data = self._store().get(blobs.object_path(universe, digest, blob.upload))
            except ObjectNotFound as error:
                raise _missing(hash) from error
        self._check(hash, digest, blob, data)
        return Body(data)

    def open(self, universe: str, hash: str, start: int = 0, length: int | None = None) -> Iterator[bytes]:
        """The bytes of a blob in chunks; a hash mismatch is raised after the last chunk.

        Only the requested range of a large blob is read. A range has no hash to verify: an error is raised only if it
        has fewer bytes than it should.
        """
        digest, blob = self._find(universe, hash)
        start = min(start, blob.size)
        end = blob.size if length is None else min(start + length, blob.size)
        if blob.inline is not None:
            self._check(hash, digest, blob, blob.inline)
            return _single_chunk(blob.inline[start:end])
        path = blobs.object_path(universe, digest, blob.upload)
        try:
            if (start, end) == (0, blob.size):
                return self._verified(self._store().open(path), hash, digest, blob)
            parts = self._store().open(path, start, end - start)
        except ObjectNotFound as error:
            raise _missing(hash) from error
        return _length_checked(parts, hash, blob, end - start)

    def _find(self, universe: str, hash: str) -> tuple[bytes, Blob]:
        digest = blobs.digest_of(hash)
        blob = self._database.read(blobs.find, universe, digest)
        if blob is None:
            raise BlobNotFound(f"No blob {hash} is stored in {universe}; put it first")
        return digest, blob

    def _check(self, hash: str, digest: bytes, blob: Blob, data: bytes) -> None:
        """Raise unless `data` is the content of the blob."""
        _check_size(hash, blob, len(data))
        if self._should_verify() and hashlib.sha256(data).digest() != digest:
            raise _mismatch(hash)

    def _verified(self, parts: Iterator[bytes], hash: str, digest: bytes, blob: Blob) -> Iterator[bytes]:
        sha, size, verify = hashlib.sha256(), 0, self._should_verify()
        for part in parts:
            size += len(part)
            if verify:
                sha.update(part)
            yield part
        _check_size(hash, blob, size)
        if verify and sha.digest() != digest:
            raise _mismatch(hash)

    def _should_verify(self) -> bool:
        if self._verify is Verify.SAMPLED:
            return self._sample.random() < limits.BLOB_VERIFY_SAMPLE
        return self._verify is Verify.ALWAYS

    def _store(self) -> ObjectStore:
        if self._objects is None:
            raise Unsupported(
                f"A blob of over {limits.BLOB_INLINE_BYTES_MAX} bytes needs an object store that all nodes reach; "
                "configure one with fastness.open(url, objects=...)"
            )
        return self._objects


def _renew_recorded(tx: Transaction, universe: str, digest: bytes, again: Blob) -> bool:
    """Count a put of a recorded blob; whether it is still recorded."""
    if blobs.find(tx, universe, digest) is None:
        return False
    blobs.record(tx, universe, digest, again)
    return True


def _single_chunk(data: bytes) -> Iterator[bytes]:
    yield data


def _length_checked(parts: Iterator[bytes], hash: str, blob: Blob, expected: int) -> Iterator[bytes]:
    size = 0
    for part in parts:
        size += len(part)
        yield part
    if size != expected:
        raise SizeMismatch(f"Blob {hash} is shorter than its recorded {blob.size} bytes; restore it from a backup")


def _chunks(file: IO[bytes]) -> Iterator[bytes]:
    while chunk := file.read(limits.BLOB_PART_BYTES):
        yield chunk


def _check_size(hash: str, blob: Blob, size: int) -> None:
    if size != blob.size:
        raise SizeMismatch(f"Blob {hash} has {size} bytes, but {blob.size} were recorded; restore it from a backup")


def _mismatch(hash: str) -> HashMismatch:
    return HashMismatch(f"Blob {hash} does not match its hash; restore it from a backup")


def _missing(hash: str) -> MissingObject:
    return MissingObject(f"The body of blob {hash} is not in the object store; restore it from a backup")
