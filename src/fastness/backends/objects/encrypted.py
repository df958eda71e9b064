"""An object store whose blobs and segments are encrypted, if their universe is.

    cas/<universe>/…, segments/<universe>/…        encrypted; all other objects, such as session logs, are plain

    header 32:  c1 "fnobj" 00 01 | key id 8 | salt 16      then frames of 64 KiB, each with a tag of 16 bytes more

Each object has a salt, and so a key of its own. The nonce of a frame is its number and whether it is the last one, and
the path is authenticated with it: frames cannot be exchanged, left out or moved to another object, and an object cannot
be cut off at its end. A range reads only its frames.

An object without the header was written before its universe was encrypted. Its content is checked by the hash or the
checksums in the key space. `list` and `times` return the sizes of the stored objects, which are a little larger.
"""

import asyncio
import os
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator
from contextlib import suppress
from itertools import chain
from typing import TYPE_CHECKING, Final, NamedTuple

from fastness.backends.objects.store import Names, ObjectMeta, ObjectStore, Page
from fastness.errors import DecryptionFailed, ObjectChanged, ObjectNotFound
from fastness.kv import Database, Transaction
from fastness.kv.value_cipher import GENERATION, KEY_ID_BYTES, SALT_BYTES, TAG_BYTES, ValueCipher, cipher_of
from fastness.limits import ENCRYPTION_FRAME_BYTES, OBJECT_LIST_MAX, OBJECT_PART_BYTES

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    from obstore import PutMode

_MARK: Final = b"\xc1fnobj\x00\x01"
_HEADER_BYTES: Final = len(_MARK) + KEY_ID_BYTES + SALT_BYTES
_FRAME: Final = ENCRYPTION_FRAME_BYTES
_STORED_FRAME: Final = _FRAME + TAG_BYTES
_FRAMES_PER_READ: Final = OBJECT_PART_BYTES // _STORED_FRAME
_FOLDERS: Final = ("cas", "segments")
_ATTEMPTS_MAX: Final = 5  # Of a read whose object is rewritten meanwhile.


class _Sealed(NamedTuple):
    """A version of an encrypted object."""

    meta: ObjectMeta  # As it is stored.
    sealing: "AESGCM"
    size: int  # Of its content.

    @property
    def last(self) -> int:
        """The number of the last frame."""
        return max(0, (self.size - 1) // _FRAME)


class EncryptedObjects(ObjectStore):
    """The objects of another store, encrypted with the keys of their universes."""

    def __init__(self, stored: ObjectStore, cipher: ValueCipher, refresh: Callable[[], None]) -> None:
        """`stored` has the objects as they are stored. `refresh` loads keys that another process has changed."""
        super().__init__(stored._store)
        self.stored = stored
        self._cipher = cipher
        self._refresh = refresh

    def write(self, path: str, chunks: Iterable[bytes], *, create_only: bool = False) -> ObjectMeta:
        writer = self._writer(path)
        if writer is None:
            return self.stored.write(path, chunks, create_only=create_only)
        stored = self.stored.write(path, writer.frames(chunks), create_only=create_only)
        return ObjectMeta(path, writer.size, stored.etag)

    async def write_async(self, path: str, chunks: AsyncIterable[bytes], *, create_only: bool = False) -> ObjectMeta:
        writer = await asyncio.to_thread(self._writer, path)
        if writer is None:
            return await self.stored.write_async(path, chunks, create_only=create_only)
        stored = await self.stored.write_async(path, writer.frames_async(chunks), create_only=create_only)
        return ObjectMeta(path, writer.size, stored.etag)

    def get(self, path: str) -> bytes:
        return self.stored.get(path) if self._is_plain(path) else b"".join(self._parts_of(path, 0, None))

    async def get_async(self, path: str) -> bytes:
        return await (self.stored.get_async(path) if self._is_plain(path) else asyncio.to_thread(self.get, path))

    def get_range(self, path: str, start: int, length: int) -> bytes:
        if self._is_plain(path):
            return self.stored.get_range(path, start, length)
        return b"".join(self._parts_of(path, start, length))

    def open(self, path: str, start: int = 0, length: int | None = None) -> Iterator[bytes]:
        if self._is_plain(path):
            return self.stored.open(path, start, length)
        self.stored.head(path)  # Raises now, and not with the first part.
        return self._parts_of(path, start, length)

    async def open_async(self, path: str, start: int = 0, length: int | None = None) -> AsyncIterator[bytes]:
        if self._is_plain(path):
            return await self.stored.open_async(path, start, length)
        return _in_threads(await asyncio.to_thread(self.open, path, start, length))

    def head(self, path: str) -> ObjectMeta:
        if self._is_plain(path):
            return self.stored.head(path)
        found, sealed = self._find(path)
        return found if sealed is None else ObjectMeta(path, sealed.size, found.etag)

    async def head_async(self, path: str) -> ObjectMeta:
        return await asyncio.to_thread(self.head, path)

    def list(self, prefix: str = "", *, after: str | None = None, limit: int = OBJECT_LIST_MAX) -> Page:
        return self.stored.list(prefix, after=after, limit=limit)

    def names(self, folder: str) -> Names:
        return self.stored.names(folder)

    def folders(self, prefix: str) -> Names:
        return self.stored.folders(prefix)

    def times(self, prefix: str = "") -> Iterator[tuple[ObjectMeta, int]]:
        return self.stored.times(prefix)

    def delete(self, path: str) -> None:
        self.stored.delete(path)

    async def delete_async(self, path: str) -> None:
        await self.stored.delete_async(path)

    def rewrite(self, universe: str, after: str | None, limit: int) -> tuple[str | None, int]:
        """Encrypt those of the next `limit` objects of a universe that do not have its newest key.

        Returns the path after which to go on, and how many were written; None after the last one.
        """
        page: Page = []
        for folder in _FOLDERS:
            prefix = f"{folder}/{universe}"
            if len(page) < limit and (after is None or after < f"{prefix}/\U0010ffff"):
                position = after if after is not None and after.startswith(f"{prefix}/") else None
                page += self.stored.list(prefix, after=position, limit=limit - len(page))
        written = sum(self.encrypt_again(meta.path) for meta in page)
        return (page[-1].path if len(page) == limit else None), written

    def encrypt_again(self, path: str) -> bool:
        """Encrypt an object with the newest key of its universe, if it has another one or none; whether it had."""
        universe = universe_of_path(path)
        newest = None if universe is None else self._cipher.newest_key(universe)
        if newest is None:
            return False
        try:
            meta = self.stored.head(path)
            if self.stored.get_range(path, 0, _HEADER_BYTES).startswith(_MARK + newest[0]):
                return False
            self._rewrite(meta)
        except (ObjectChanged, ObjectNotFound):
            return False  # It was deleted meanwhile.
        return True

    def _rewrite(self, meta: ObjectMeta) -> None:
        if meta.size > OBJECT_PART_BYTES:
            # There is no conditional form of a large upload. A body that comes back after it was deleted has no record,
            # and is deleted like one whose upload was not finished.
            self.stored.head(meta.path)
            self.write(meta.path, self._parts_of(meta.path, 0, None))
            return
        etag = self.stored.head(meta.path).etag
        self.replace(meta.path, self.get(meta.path), etag=etag)

    def _put(self, path: str, data: bytes, mode: "PutMode", content_type: str | None = None) -> ObjectMeta:
        writer = self._writer(path)
        if writer is None:
            return self.stored._put(path, data, mode, content_type)
        stored = self.stored._put(path, b"".join(writer.frames((data,))), mode, content_type)
        return ObjectMeta(path, writer.size, stored.etag)

    async def _put_async(self, path: str, data: bytes, mode: "PutMode") -> ObjectMeta:
        writer = await asyncio.to_thread(self._writer, path)
        if writer is None:
            return await self.stored._put_async(path, data, mode)
        stored = await self.stored._put_async(path, b"".join(writer.frames((data,))), mode)
        return ObjectMeta(path, writer.size, stored.etag)

    def _is_plain(self, path: str) -> bool:
        universe = universe_of_path(path)
        return universe is None or self._cipher.newest_key(universe) is None

    def _writer(self, path: str) -> "_Writer | None":
        universe = universe_of_path(path)
        if universe is None:
            return None
        self._refresh()
        newest = self._cipher.newest_key(universe)
        if newest is None:
            return None
        salt = os.urandom(SALT_BYTES)
        sealing = self._cipher.derive(newest[1], salt, b"object\0" + universe.encode())
        return _Writer(_MARK + newest[0] + salt, sealing, path.encode())

    def _header(self, path: str) -> tuple[ObjectMeta, bytes]:
        """The stored object, and its first bytes."""
        for _ in range(_ATTEMPTS_MAX):
            meta = self.stored.head(path)
            with suppress(ObjectChanged):
                return meta, b"".join(self.stored._parts(meta, 0, _HEADER_BYTES))
        raise ObjectChanged(f"The object at {path!r} is replaced again and again; read it later")

    def _find(self, path: str) -> tuple[ObjectMeta, _Sealed | None]:
        """The stored object, and how to read it; None if it is plain."""
        universe = universe_of_path(path)
        assert universe is not None
        meta, header = self._header(path)
        if not header.startswith(_MARK):
            return meta, None
        key = self._cipher.key_of(universe, header[len(_MARK) : len(_MARK) + KEY_ID_BYTES])
        if key is None:
            return meta, None  # It looks like an encrypted object by chance.
        body = meta.size - _HEADER_BYTES
        frames = -(-body // _STORED_FRAME)
        size = body - frames * TAG_BYTES
        if size < 0 or not frames:
            raise _damaged(path)
        salt = header[len(_MARK) + KEY_ID_BYTES :]
        return meta, _Sealed(meta, self._cipher.derive(key, salt, b"object\0" + universe.encode()), size)

    def _parts_of(self, path: str, start: int, length: int | None) -> Iterator[bytes]:
        """The content of an object from `start` on. If it is rewritten meanwhile, the rest is of the new version."""
        position, attempts = start, 0
        while True:
            meta, sealed = self._find(path)
            size = meta.size if sealed is None else sealed.size
            end = size if length is None else min(start + length, size)
            parts = (
                self.stored._parts(meta, position, end - position)
                if sealed is None
                else _opened(self.stored, sealed, position, end)
            )
            try:
                for part in parts if position < end else ():
                    position += len(part)
                    yield part
                return
            except ObjectChanged:
                attempts += 1
                if attempts == _ATTEMPTS_MAX:
                    raise


def encrypted(stored: ObjectStore, database: Database) -> ObjectStore:
    """The objects of a plane, whose key space is `database`."""
    cipher = cipher_of(database)
    return stored if cipher is None else EncryptedObjects(stored, cipher, lambda: database.read(_load_keys))


def decrypted(cipher: ValueCipher, path: str, stored: Iterable[bytes]) -> Iterator[bytes]:
    """The content of an object, from all of its stored bytes in order.

    Raises:
        DecryptionFailed: it was changed, or is the object of another path.
    """
    universe, parts, rest, number = universe_of_path(path), iter(stored), bytearray(), 0
    while len(rest) < _HEADER_BYTES and (part := next(parts, None)) is not None:
        rest += part
    id_end = len(_MARK) + KEY_ID_BYTES
    is_sealed = universe is not None and rest.startswith(_MARK)
    key = cipher.key_of(universe, bytes(rest[len(_MARK) : id_end])) if is_sealed and universe is not None else None
    if key is None or universe is None:
        yield bytes(rest)
        yield from parts
        return
    sealing = cipher.derive(key, bytes(rest[id_end:_HEADER_BYTES]), b"object\0" + universe.encode())
    del rest[:_HEADER_BYTES]

    def opened(*, is_last: bool) -> bytes:
        try:
            return sealing.decrypt(_nonce(number, is_last=is_last), bytes(rest[:_STORED_FRAME]), path.encode())
        except Exception as error:  # InvalidTag, or ValueError where it is too short.
            raise _damaged(path) from error

    for part in chain((b"",), parts):
        rest += part
        while len(rest) > _STORED_FRAME:  # Which frame is the last is known when the object ends.
            yield opened(is_last=False)
            del rest[:_STORED_FRAME]
            number += 1
    yield opened(is_last=True)


def as_stored(objects: ObjectStore) -> ObjectStore:
    """The objects as they are stored."""
    return objects.stored if isinstance(objects, EncryptedObjects) else objects


class _Writer:
    """Encrypts the content of one object."""

    def __init__(self, header: bytes, sealing: "AESGCM", path: bytes) -> None:
        self.size = 0
        self._header = header
        self._sealing = sealing
        self._path = path
        self._number = 0
        self._rest = bytearray()

    def frames(self, chunks: Iterable[bytes]) -> Iterator[bytes]:
        yield self._header
        for chunk in chunks:
            yield self._add(chunk)
        yield self._finish()

    async def frames_async(self, chunks: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
        yield self._header
        async for chunk in chunks:
            yield self._add(chunk)
        yield self._finish()

    def _add(self, chunk: bytes) -> bytes:
        """The frames that are complete, and not the last one."""
        self.size += len(chunk)
        self._rest += chunk
        sealed = []
        while len(self._rest) > _FRAME:
            sealed.append(self._seal(bytes(self._rest[:_FRAME]), is_last=False))
            del self._rest[:_FRAME]
        return b"".join(sealed)

    def _finish(self) -> bytes:
        return self._seal(bytes(self._rest), is_last=True)

    def _seal(self, content: bytes, *, is_last: bool) -> bytes:
        number, self._number = self._number, self._number + 1
        return self._sealing.encrypt(_nonce(number, is_last=is_last), content, self._path)


def universe_of_path(path: str) -> str | None:
    """The universe whose key encrypts the object; None if it is plain."""
    folder, _, rest = path.partition("/")
    universe, slash, _ = rest.partition("/")
    return universe if folder in _FOLDERS and slash else None


def _opened(store: ObjectStore, sealed: _Sealed, start: int, end: int) -> Iterator[bytes]:
    """The content from `start` to before `end`, which is after it, in parts."""
    path, last = sealed.meta.path.encode(), sealed.last
    for first in range(start // _FRAME, (end - 1) // _FRAME + 1, _FRAMES_PER_READ):
        past = min(first + _FRAMES_PER_READ, (end - 1) // _FRAME + 1)
        offset = _HEADER_BYTES + first * _STORED_FRAME
        stored = b"".join(store._parts(sealed.meta, offset, (past - first) * _STORED_FRAME))
        part = bytearray()
        for number in range(first, past):
            at = (number - first) * _STORED_FRAME
            try:
                nonce = _nonce(number, is_last=number == last)
                part += sealed.sealing.decrypt(nonce, stored[at : at + _STORED_FRAME], path)
            except Exception as error:  # InvalidTag, or ValueError where it is too short.
                raise _damaged(sealed.meta.path) from error
        base = first * _FRAME
        yield bytes(part[max(start - base, 0) : end - base])


def _load_keys(tx: Transaction) -> None:
    tx.get(GENERATION)  # A transaction begins with the newest keys.


def _nonce(number: int, *, is_last: bool) -> bytes:
    return number.to_bytes(8, "big") + bytes((0, 0, 0, is_last))


def _damaged(path: str) -> DecryptionFailed:
    return DecryptionFailed(
        f"The object {path!r} cannot be decrypted: it was changed, or moved from another path; restore a backup"
    )


async def _in_threads(parts: Iterator[bytes]) -> AsyncIterator[bytes]:
    while (part := await asyncio.to_thread(next, parts, None)) is not None:
        yield part
