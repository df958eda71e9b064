"""The object store over `obstore`. What event loops use has an async form, too."""

import os
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import msgspec
import obstore
from obstore.store import GCSStore, LocalStore, MemoryStore, S3Store

from fastness.backends.objects.bodies import Body, check_bytes
from fastness.backends.objects.failures import ignore_range_after_end, object_error, translate_errors
from fastness.backends.objects.paths import check_path
from fastness.errors import InvalidArgument, ObjectExists, ObjectNotFound
from fastness.limits import OBJECT_LIST_MAX, OBJECT_PART_BYTES, OBJECT_PARTS_IN_FLIGHT

if TYPE_CHECKING:
    from obstore import Attributes, GetOptions, ListStream, PutMode, PutResult
    from obstore import ObjectMeta as StoredMeta
    from obstore.store import ObjectStore as Store

_IN_PARTS: Final[dict[str, Any]] = {"chunk_size": OBJECT_PART_BYTES, "max_concurrency": OBJECT_PARTS_IN_FLIGHT}
_OFFSET_MAX: Final = (1 << 63) - 1


class ObjectMeta(msgspec.Struct, frozen=True):
    """An object's path, size and etag. The etag identifies this version of it, for `replace`."""

    path: str
    size: int
    etag: str


Page: TypeAlias = list[ObjectMeta]
Names: TypeAlias = list[str]


class ObjectStore:
    """An open object store. Safe to use from many threads and from event loops at once; there is nothing to close.

    A write whose answer is lost raises CommitUnknown: check before repeating it. When obstore's own retry follows a
    lost answer, `create` may raise ObjectExists, or `replace` ObjectChanged, for the object that it stored itself.
    """

    _read_bytes = OBJECT_PART_BYTES

    def __init__(self, store: "Store") -> None:
        self._store = store
        self._in_memory = isinstance(store, MemoryStore)
        # These stores list in path order. The others are sorted here, which reads every path.
        self._in_order = isinstance(store, MemoryStore | S3Store | GCSStore)

    def put(self, path: str, data: bytes, *, content_type: str | None = None) -> ObjectMeta:
        """Store `data` under `path`, replacing any object. The content type is for browsers that read a bucket."""
        return self._put(path, data, "overwrite", content_type)

    async def put_async(self, path: str, data: bytes) -> ObjectMeta:
        return await self._put_async(path, data, "overwrite")

    def create(self, path: str, data: bytes) -> ObjectMeta:
        """Store `data` under a path that has no object.

        Raises:
            ObjectExists: it has one, which was not changed.
        """
        return self._put(path, data, "create")

    def replace(self, path: str, data: bytes, *, etag: str) -> ObjectMeta:
        """Store `data` over the version of the object with this `etag`.

        Raises:
            ObjectChanged: the object has another version or does not exist; it was not changed.
        """
        return self._put(path, data, _version(etag))

    def write(self, path: str, chunks: Iterable[bytes], *, create_only: bool = False) -> ObjectMeta:
        """Store a stream under `path`, holding a few parts of OBJECT_PART_BYTES in memory at most.

        When `chunks` raises, its exception propagates, no object is stored and uploaded parts are discarded.
        A cancelled `write_async` stores no object either, but leaves its parts to the bucket's rule for incomplete
        uploads. A memory store holds the whole body. S3 takes 10,000 parts, which is 78 GiB.

        `create_only` is exact in memory, in a local folder, and for a body of less than one part. Remote stores have no
        create-only form of a larger upload: it is refused if the path has an object when its first part is full, but
        overwrites one that is created after that.

        Raises:
            ObjectExists: `create_only`, and the path has an object, which was not changed.
        """
        check_path(path)
        body, rest = Body(), iter(chunks)
        if not any(body.fill_first_part(chunk) for chunk in rest):
            return self._put(path, bytes(body.first), put_mode(create_only=create_only))
        if create_only and not self._in_memory:
            with suppress(ObjectNotFound):
                self.head(path)
                raise object_error(ObjectExists, path)
        with body.raise_stream_error(), translate_errors(path, writes=True):
            stored = obstore.put(self._store, path, body.read(rest), **self._upload(create_only))
        return _stored_meta(path, body.size, stored)

    async def write_async(self, path: str, chunks: AsyncIterable[bytes], *, create_only: bool = False) -> ObjectMeta:
        check_path(path)
        body, rest = Body(), aiter(chunks)
        async for chunk in rest:
            if body.fill_first_part(chunk):
                break
        else:
            return await self._put_async(path, bytes(body.first), put_mode(create_only=create_only))
        if create_only and not self._in_memory:
            with suppress(ObjectNotFound):
                await self.head_async(path)
                raise object_error(ObjectExists, path)
        with body.raise_stream_error(), translate_errors(path, writes=True):
            stored = await obstore.put_async(self._store, path, body.read_async(rest), **self._upload(create_only))
        return _stored_meta(path, body.size, stored)

    def get(self, path: str) -> bytes:
        """All bytes of the object, in memory at once; `open` reads a large one in parts."""
        with translate_errors(check_path(path)):
            return bytes(obstore.get(self._store, path).bytes())

    async def get_async(self, path: str) -> bytes:
        with translate_errors(check_path(path)):
            result = await obstore.get_async(self._store, path)
            return bytes(await result.bytes_async())

    def get_range(self, path: str, start: int, length: int) -> bytes:
        """What `get(path)[start : start + length]` would be: a range beyond the end is short or empty."""
        if _is_empty_range(start, length):
            self.head(path)
            return b""
        with translate_errors(check_path(path)), ignore_range_after_end():
            return bytes(obstore.get_range(self._store, path, start=start, length=length))
        return b""

    def open(self, path: str, start: int = 0, length: int | None = None) -> Iterator[bytes]:
        """The object's bytes in parts of at most OBJECT_PART_BYTES, one in memory at a time.

        With `start` and `length`, the bytes of `get_range`; the rest of the object is not read. Each part is a
        separate request, so a slow reader causes no timeout. All parts are of one version.

        Raises:
            ObjectChanged: while iterating, if the object was replaced; open it again.
        """
        _is_empty_range(start, length or 0)
        return self._parts(self.head(path), start, length)

    async def open_async(self, path: str, start: int = 0, length: int | None = None) -> AsyncIterator[bytes]:
        _is_empty_range(start, length or 0)
        return self._parts_async(await self.head_async(path), start, length)

    def head(self, path: str) -> ObjectMeta:
        """The object's size and etag, without its bytes."""
        with translate_errors(check_path(path)):
            return _meta(obstore.head(self._store, path))

    async def head_async(self, path: str) -> ObjectMeta:
        with translate_errors(check_path(path)):
            return _meta(await obstore.head_async(self._store, path))

    def list(self, prefix: str = "", *, after: str | None = None, limit: int = OBJECT_LIST_MAX) -> Page:
        """At most `limit` objects below `prefix`, in path order, the first one after the path `after`.

        A prefix is whole segments: `a` holds `a/b`, but neither `ab` nor `a` itself. Only S3's directory buckets (S3
        Express) do not keep the order.
        """
        page: Page = []
        # A prefix below an object, not a folder, is not found: the page is empty.
        with suppress(ObjectNotFound), translate_errors(prefix or "/"):
            for batch in self._listing(prefix, after, limit):
                page = _merge(page, batch, limit)
                if self._in_order and len(page) == limit:
                    break
        return page

    def names(self, folder: str) -> Names:
        """The names of all objects in a folder, but not in those below it, sorted.

        It reads nothing but names: of a local folder with 100,000 objects, in an eighth of the time of `list`.
        """
        local = self._local_folder(folder)
        with suppress(ObjectNotFound), translate_errors(folder):
            if local is not None:
                with suppress(FileNotFoundError, NotADirectoryError), os.scandir(local) as entries:
                    # obstore writes an object as NAME#1, and then renames it.
                    return sorted(entry.name for entry in entries if entry.is_file() and "#" not in entry.name)
                return []
            start = len(folder) + 1
            paths = [stored["path"] for batch in self._listing(folder, None, OBJECT_LIST_MAX) for stored in batch]
            return sorted(path[start:] for path in paths if "/" not in path[start:])
        return []

    def folders(self, prefix: str) -> Names:
        """The names of the folders in a folder, sorted."""
        with suppress(ObjectNotFound), translate_errors(prefix):
            found = obstore.list_with_delimiter(self._store, check_path(prefix))["common_prefixes"]
            return sorted(path.rstrip("/").rpartition("/")[2] for path in found)
        return []

    def times(self, prefix: str = "") -> Iterator[tuple[ObjectMeta, int]]:
        """Every object below `prefix`, in any order, and when it was written, in milliseconds since 1970."""
        with suppress(ObjectNotFound), translate_errors(prefix or "/"):
            for batch in self._listing(prefix, None, OBJECT_LIST_MAX):
                for stored in batch:
                    yield _meta(stored), round(stored["last_modified"].timestamp() * 1_000)

    def delete(self, path: str) -> None:
        """Remove the object. Succeeds if there is none."""
        with translate_errors(check_path(path), writes=True), suppress(FileNotFoundError):
            obstore.delete(self._store, path)

    async def delete_async(self, path: str) -> None:
        with translate_errors(check_path(path), writes=True), suppress(FileNotFoundError):
            await obstore.delete_async(self._store, path)

    def _put(self, path: str, data: bytes, mode: "PutMode", content_type: str | None = None) -> ObjectMeta:
        size = len(check_bytes(data))
        attributes: Attributes | None = None if content_type is None else {"Content-Type": content_type}
        with translate_errors(check_path(path), writes=True):
            stored = obstore.put(self._store, path, data, mode=mode, attributes=attributes, **_IN_PARTS)
            return _stored_meta(path, size, stored)

    async def _put_async(self, path: str, data: bytes, mode: "PutMode") -> ObjectMeta:
        size = len(check_bytes(data))
        with translate_errors(check_path(path), writes=True):
            return _stored_meta(path, size, await obstore.put_async(self._store, path, data, mode=mode, **_IN_PARTS))

    def _upload(self, create_only: bool) -> dict[str, Any]:
        # obstore buffers a create-only body in memory, where a memory store has it anyway.
        return {"mode": put_mode(create_only=create_only and self._in_memory), **_IN_PARTS}

    def _local_folder(self, folder: str) -> Path | None:
        """The path of a folder in the local file system; None if the store is elsewhere."""
        if not isinstance(self._store, LocalStore) or self._store.prefix is None:
            return None
        return Path(self._store.prefix, check_path(folder))

    def _listing(self, prefix: str, after: str | None, limit: int) -> "ListStream[Sequence[StoredMeta]]":
        if not 1 <= limit <= OBJECT_LIST_MAX:
            raise InvalidArgument(f"The limit is {limit}; give 1 to OBJECT_LIST_MAX, which is {OBJECT_LIST_MAX}")
        folder = check_path(prefix.removesuffix("/")) if prefix else None
        offset = check_path(after) if after else None
        return obstore.list(self._store, folder, offset=offset, chunk_size=limit)

    def _parts(self, meta: ObjectMeta, start: int, length: int | None) -> Iterator[bytes]:
        for options in _part_requests(meta, self._read_bytes, start, length):
            with translate_errors(meta.path):
                part = bytes(obstore.get(self._store, meta.path, options=options).bytes())
            yield part

    async def _parts_async(self, meta: ObjectMeta, start: int, length: int | None) -> AsyncIterator[bytes]:
        for options in _part_requests(meta, self._read_bytes, start, length):
            with translate_errors(meta.path):
                result = await obstore.get_async(self._store, meta.path, options=options)
                part = bytes(await result.bytes_async())
            yield part


def put_mode(*, create_only: bool) -> "PutMode":
    return "create" if create_only else "overwrite"


def _version(etag: str) -> "PutMode":
    if etag in ("", "*"):
        raise InvalidArgument(f"The etag {etag!r} is not a version of an object; pass the etag of an ObjectMeta")
    return {"e_tag": etag}


def _is_empty_range(start: int, length: int) -> bool:
    if not (0 <= start <= _OFFSET_MAX and 0 <= length <= _OFFSET_MAX):
        raise InvalidArgument(f"The range is {length} bytes from {start}; give 0 to {_OFFSET_MAX} for both")
    return length == 0


def _part_requests(meta: ObjectMeta, part_bytes: int, start: int, length: int | None) -> "Iterator[GetOptions]":
    end = meta.size if length is None else min(start + length, meta.size)
    for begin in range(start, end, part_bytes):
        yield {"range": (begin, min(begin + part_bytes, end)), "if_match": meta.etag}


def _meta(stored: "StoredMeta") -> ObjectMeta:
    return ObjectMeta(stored["path"], stored["size"], stored["e_tag"] or "")


def _stored_meta(path: str, size: int, result: "PutResult") -> ObjectMeta:
    return ObjectMeta(path, size, result["e_tag"] or "")


def _merge(page: Page, batch: "Sequence[StoredMeta]", limit: int) -> Page:
    return sorted([*page, *map(_meta, batch)], key=lambda meta: meta.path)[:limit]
