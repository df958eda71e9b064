"""Big bytes under a path: in memory, in a local folder, or in S3, Azure or Google Cloud through `obstore`.

    put      stores, over whatever is there        get, get_range   the bytes, or a slice of them
    create   stores only where nothing is          head, list       path, size and etag
    replace  stores only over the etag it names    open             the bytes, a part at a time
    write    `put` or `create` of a stream         delete           fine when nothing is there

What every store promises, and `holdfast.testing.objects` proves:

- An object is there whole or not at all; a body that fails half-way leaves what was there before.
- Of many who `create` one path, or `replace` one etag, exactly one wins.
- What has returned is as durable as the store is. obstore never syncs a local folder, so `FolderStore` does.
- `list` is in path order, and goes on from the last path of the page before.

Every operation has an async form, `<name>_async`. Paths are the same everywhere: relative, `/` between segments.
"""

import asyncio
import errno
import itertools
import os
import re
import secrets
import threading
import time
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, TypeAlias

import msgspec
import obstore
from obstore import exceptions
from obstore.store import GCSStore, LocalStore, MemoryStore, S3Store, from_url

from holdfast import errors
from holdfast.errors import HoldfastError, InvalidArgument, InvalidUrl, InvalidValue, ObjectExists, ObjectNotFound
from holdfast.limits import OBJECT_LIST_MAX, OBJECT_PART_BYTES, OBJECT_PATH_BYTES_MAX

if TYPE_CHECKING:
    from obstore import GetOptions, ListStream, PutMode, PutResult
    from obstore import ObjectMeta as StoredMeta
    from obstore.store import ObjectStore as Store

_IN_PARTS: Final[dict[str, Any]] = {"chunk_size": OBJECT_PART_BYTES, "max_concurrency": 4}  # Bounds a stream's memory.
_OFFSET_MAX: Final = (1 << 63) - 1
_STAGED_SECONDS_MAX: Final = 86_400  # A staged file that nobody wrote to for a day is what a crash left behind.


class ObjectMeta(msgspec.Struct, frozen=True):
    """What a store knows of an object. The etag names this version of it, for `replace`."""

    path: str
    size: int
    etag: str


Page: TypeAlias = list[ObjectMeta]


def open_objects(url: str, **config: Any) -> "ObjectStore":
    """Open `memory:`, `dir:PATH` (created when missing), `s3://bucket/prefix`, `az://...` or `gs://bucket/prefix`.

    Credentials and endpoints come from the environment (`AWS_ACCESS_KEY_ID`, `AWS_ENDPOINT`, ...) or from `config`,
    which goes to obstore's `from_url` as it is. Nothing is asked of a remote store before its first use.

    Raises:
        InvalidUrl: the scheme is unknown, or the rest of the URL and the configuration make no store.
        PathUnusable: the folder cannot be created or written.
    """
    scheme, _, rest = url.partition(":")
    if scheme in ("memory", "dir") and config:
        raise InvalidArgument(f"{scheme}: takes no configuration; remove {', '.join(sorted(config))}")
    if url == "memory:":
        return ObjectStore(MemoryStore())
    if scheme == "dir" and rest:
        return FolderStore(Path(rest))
    if scheme in ("s3", "az", "gs"):
        try:
            return ObjectStore(from_url(url, **config))
        except (exceptions.BaseError, ValueError, TypeError) as error:
            raise InvalidUrl(f"{url!r} opens no object store; correct it or its options: {_headline(error)}") from error
    raise InvalidUrl(f"{url!r} names no object store; use memory:, dir:PATH, s3://, az:// or gs://")


class ObjectStore:
    """An open object store. Safe to use from many threads and from event loops at once; there is nothing to close.

    A write whose answer is lost raises CommitUnknown: look before repeating it. When obstore's own retry follows a
    lost answer, `create` may raise ObjectExists, or `replace` ObjectChanged, over the very object it stored.
    """

    _read_bytes = OBJECT_PART_BYTES

    def __init__(self, store: "Store") -> None:
        self._store = store
        self._in_memory = isinstance(store, MemoryStore)
        # These list in path order by themselves; the others are sorted here, at the price of a look at every path.
        self._in_order = isinstance(store, MemoryStore | S3Store | GCSStore)

    def put(self, path: str, data: bytes) -> ObjectMeta:
        """Store `data` under `path`, over whatever is there."""
        return self._put(path, data, "overwrite")

    async def put_async(self, path: str, data: bytes) -> ObjectMeta:
        return await self._put_async(path, data, "overwrite")

    def create(self, path: str, data: bytes) -> ObjectMeta:
        """Store `data` under a path that has no object.

        Raises:
            ObjectExists: it has one, which was left as it is.
        """
        return self._put(path, data, "create")

    async def create_async(self, path: str, data: bytes) -> ObjectMeta:
        return await self._put_async(path, data, "create")

    def replace(self, path: str, data: bytes, *, etag: str) -> ObjectMeta:
        """Store `data` over the version of the object that `etag` names.

        Raises:
            ObjectChanged: another version is there, or none; it was left as it is.
        """
        return self._put(path, data, _version(etag))

    async def replace_async(self, path: str, data: bytes, *, etag: str) -> ObjectMeta:
        return await self._put_async(path, data, _version(etag))

    def write(self, path: str, chunks: Iterable[bytes], *, create_only: bool = False) -> ObjectMeta:
        """Store a stream under `path`, holding a few parts of OBJECT_PART_BYTES in memory at most.

        When `chunks` raises, its exception comes out as it is, no object is stored and what was uploaded is discarded.
        A cancelled `write_async` stores no object either, but leaves its parts to the bucket's rule for incomplete
        uploads. A memory store holds the whole body. S3 takes 10,000 parts, which is 78 GiB.

        `create_only` is exact in memory, in a local folder, and for a body of less than one part. Remote stores have no
        create-only form of a larger upload: it is refused if the path has an object when its first part is full, but
        overwrites one that is created after that.

        Raises:
            ObjectExists: `create_only`, and the path has an object, which was left as it is.
        """
        check_path(path)
        body, rest = _Body(), iter(chunks)
        if not any(body.fills_a_part(chunk) for chunk in rest):
            return self._put(path, bytes(body.first), _mode(create_only))
        if create_only and not self._in_memory:
            with suppress(ObjectNotFound):
                raise _failure(ObjectExists, self.head(path).path)
        with _translated(path, writes=True, body=body):
            stored = obstore.put(self._store, path, body.read(rest), **self._upload(create_only))
        return _stored(path, body.size, stored)

    async def write_async(self, path: str, chunks: AsyncIterable[bytes], *, create_only: bool = False) -> ObjectMeta:
        check_path(path)
        body, rest = _Body(), aiter(chunks)
        async for chunk in rest:
            if body.fills_a_part(chunk):
                break
        else:
            return await self._put_async(path, bytes(body.first), _mode(create_only))
        if create_only and not self._in_memory:
            with suppress(ObjectNotFound):
                raise _failure(ObjectExists, (await self.head_async(path)).path)
        with _translated(path, writes=True, body=body):
            stored = await obstore.put_async(self._store, path, body.read_async(rest), **self._upload(create_only))
        return _stored(path, body.size, stored)

    def get(self, path: str) -> bytes:
        """All bytes of the object, in memory at once; `open` reads a large one in parts."""
        with _translated(check_path(path)):
            return bytes(obstore.get(self._store, path).bytes())

    async def get_async(self, path: str) -> bytes:
        with _translated(check_path(path)):
            result = await obstore.get_async(self._store, path)
            return bytes(await result.bytes_async())

    def get_range(self, path: str, start: int, length: int) -> bytes:
        """What `get(path)[start : start + length]` would be: a range beyond the end is short or empty."""
        if _is_empty(start, length):
            self.head(path)
            return b""
        with _translated(check_path(path)):
            try:
                return bytes(obstore.get_range(self._store, path, start=start, length=length))
            except exceptions.GenericError as error:
                return _nothing_after_the_end(error)

    async def get_range_async(self, path: str, start: int, length: int) -> bytes:
        if _is_empty(start, length):
            await self.head_async(path)
            return b""
        with _translated(check_path(path)):
            try:
                return bytes(await obstore.get_range_async(self._store, path, start=start, length=length))
            except exceptions.GenericError as error:
                return _nothing_after_the_end(error)

    def open(self, path: str) -> Iterator[bytes]:
        """The object's bytes in parts of at most OBJECT_PART_BYTES, one in memory at a time.

        Each part is a request of its own, so a slow reader runs into no timeout. All parts are of one version.

        Raises:
            ObjectChanged: while iterating, when the object was written over; open it again.
        """
        return self._parts(self.head(path))

    async def open_async(self, path: str) -> AsyncIterator[bytes]:
        return self._parts_async(await self.head_async(path))

    def head(self, path: str) -> ObjectMeta:
        """The object's size and etag, without its bytes."""
        with _translated(check_path(path)):
            return _meta(obstore.head(self._store, path))

    async def head_async(self, path: str) -> ObjectMeta:
        with _translated(check_path(path)):
            return _meta(await obstore.head_async(self._store, path))

    def list(self, prefix: str = "", *, after: str | None = None, limit: int = OBJECT_LIST_MAX) -> Page:
        """At most `limit` objects below `prefix`, in path order, the first one after the path `after`.

        A prefix is whole segments: `a` holds `a/b`, but neither `ab` nor `a` itself. Only S3's directory buckets (S3
        Express) do not keep the order.
        """
        page: Page = []
        with suppress(ObjectNotFound), _translated(prefix):  # A folder's way to say that nothing is below an object.
            for batch in self._listing(prefix, after, limit):
                page = _merge(page, batch, limit)
                if self._in_order and len(page) == limit:
                    break
        return page

    async def list_async(self, prefix: str = "", *, after: str | None = None, limit: int = OBJECT_LIST_MAX) -> Page:
        page: Page = []
        with suppress(ObjectNotFound), _translated(prefix):  # A folder's way to say that nothing is below an object.
            async for batch in self._listing(prefix, after, limit):
                page = _merge(page, batch, limit)
                if self._in_order and len(page) == limit:
                    break
        return page

    def delete(self, path: str) -> None:
        """Remove the object; fine when there is none."""
        with _translated(check_path(path), writes=True), suppress(FileNotFoundError):
            obstore.delete(self._store, path)

    async def delete_async(self, path: str) -> None:
        with _translated(check_path(path), writes=True), suppress(FileNotFoundError):
            await obstore.delete_async(self._store, path)

    def _put(self, path: str, data: bytes, mode: "PutMode") -> ObjectMeta:
        size = len(_checked(data))
        with _translated(check_path(path), writes=True):
            return _stored(path, size, obstore.put(self._store, path, data, mode=mode, **_IN_PARTS))

    async def _put_async(self, path: str, data: bytes, mode: "PutMode") -> ObjectMeta:
        size = len(_checked(data))
        with _translated(check_path(path), writes=True):
            return _stored(path, size, await obstore.put_async(self._store, path, data, mode=mode, **_IN_PARTS))

    def _upload(self, create_only: bool) -> dict[str, Any]:
        # obstore gathers a create-only body in memory, which is where a memory store has it anyway.
        return {"mode": _mode(create_only and self._in_memory), **_IN_PARTS}

    def _listing(self, prefix: str, after: str | None, limit: int) -> "ListStream[Sequence[StoredMeta]]":
        if not 1 <= limit <= OBJECT_LIST_MAX:
            raise InvalidArgument(f"limit is {limit}; it may be 1 to OBJECT_LIST_MAX, which is {OBJECT_LIST_MAX}")
        folder = check_path(prefix.removesuffix("/")) if prefix else None
        offset = check_path(after) if after else None
        return obstore.list(self._store, folder, offset=offset, chunk_size=limit)

    def _parts(self, meta: ObjectMeta) -> Iterator[bytes]:
        for options in _part_requests(meta, self._read_bytes):
            with _translated(meta.path):
                part = bytes(obstore.get(self._store, meta.path, options=options).bytes())
            yield part

    async def _parts_async(self, meta: ObjectMeta) -> AsyncIterator[bytes]:
        for options in _part_requests(meta, self._read_bytes):
            with _translated(meta.path):
                result = await obstore.get_async(self._store, meta.path, options=options)
                part = bytes(await result.bytes_async())
            yield part


class FolderStore(ObjectStore):
    """Objects as files below a local folder, durable when a write returns.

    obstore reads and lists here, but does not write: its LocalStore never syncs a file or a folder and has no if-match.
    A write fills a staged file, syncs it, gives it its name in one step (a hard link for create-only, otherwise a
    rename) and syncs the folder. A power loss therefore leaves the old object, the new one or none, never half of one.
    A reader may see a new object in the moment before it is durable; `create` syncs before it reports ObjectExists.

    Staged files have names that no path may have and that listings skip; what a crash left is swept a day later.

    If-match is a comparison under a lock of this process, for a Holdfast data directory belongs to one process.
    Create-only is exact between processes too.

    A folder cannot hold both `a` and `a/b`, nor a segment of over 255 bytes; writing them raises InvalidArgument.
    """

    _read_bytes = 1_048_576  # A request to a local disk is cheap; a small one keeps memory small.

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()
        self._staging = self._root / ".staging"
        try:
            _make_folder(self._staging)
            _sweep(self._staging)
            _discard(self._stage("opening"))  # Shows now, not at the first write, whether the folder can be written.
            super().__init__(LocalStore(self._root))
        except (OSError, exceptions.BaseError, HoldfastError) as error:
            raise errors.PathUnusable(
                f"{self._root} cannot hold objects; make it writable or choose another: {_headline(error)}"
            ) from error

    def write(self, path: str, chunks: Iterable[bytes], *, create_only: bool = False) -> ObjectMeta:
        return self._write(path, chunks, _mode(create_only))

    async def write_async(self, path: str, chunks: AsyncIterable[bytes], *, create_only: bool = False) -> ObjectMeta:
        staged = self._stage(path)
        try:
            async for chunk in chunks:
                await asyncio.to_thread(self._append, staged, path, chunk)
        except BaseException:
            _discard(staged)
            raise
        return await asyncio.to_thread(self._publish, staged, path, _mode(create_only))

    def delete(self, path: str) -> None:
        target = self._root / check_path(path)
        with _translated(path, writes=True):
            with _NAMING, suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError):
                target.unlink()
            if target.parent.is_dir():
                _sync_folder(target.parent)

    async def delete_async(self, path: str) -> None:
        await asyncio.to_thread(self.delete, path)

    def _put(self, path: str, data: bytes, mode: "PutMode") -> ObjectMeta:
        return self._write(path, (data,), mode)

    async def _put_async(self, path: str, data: bytes, mode: "PutMode") -> ObjectMeta:
        return await asyncio.to_thread(self._put, path, data, mode)

    def _write(self, path: str, chunks: Iterable[bytes], mode: "PutMode") -> ObjectMeta:
        staged = self._stage(path)
        try:
            for chunk in chunks:
                self._append(staged, path, chunk)
        except BaseException:
            _discard(staged)
            raise
        return self._publish(staged, path, mode)

    def _stage(self, path: str) -> IO[bytes]:
        with _translated(check_path(path), writes=True):
            return open(self._staging / f"{secrets.token_hex(16)}#0", "xb")

    def _append(self, staged: IO[bytes], path: str, chunk: bytes) -> None:
        with _translated(path, writes=True):
            staged.write(_checked(chunk))

    def _publish(self, staged: IO[bytes], path: str, mode: "PutMode") -> ObjectMeta:
        target = self._root / path
        try:
            with _translated(path, writes=True):
                staged.flush()
                _STAMPS.put_on(staged)
                os.fsync(staged.fileno())
                with _NAMING:
                    meta = self._name(staged.name, target, path, mode)
                _sync_folder(target.parent)
                return meta
        finally:
            _discard(staged)

    def _name(self, staged: str, target: Path, path: str, mode: "PutMode") -> ObjectMeta:
        if isinstance(mode, dict) and not self._is_at(path, mode["e_tag"]):
            raise _failure(errors.ObjectChanged, path)
        _make_folder(target.parent)
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, "a folder has this name")
        if mode == "create":
            try:
                os.link(staged, target)
            except FileExistsError:
                # Whoever is told that the object is there may rely on it, so it must not be lost any more.
                _sync_folder(target.parent)
                raise
        else:
            os.replace(staged, target)
        return _meta(obstore.head(self._store, path))

    def _is_at(self, path: str, etag: str | None) -> bool:
        with suppress(ObjectNotFound):
            return self.head(path).etag == etag
        return False


def check_path(path: str) -> str:
    """The path itself, if every store can hold it; it then stays below the store's root.

    Raises:
        InvalidArgument: it names what is wrong.
    """
    if _CONTROL.search(path):
        raise InvalidArgument(f"the path {path!r} has a control character or a lone surrogate; remove it")
    if len(path.encode()) > OBJECT_PATH_BYTES_MAX:
        raise InvalidArgument(
            f"a path may have OBJECT_PATH_BYTES_MAX, {OBJECT_PATH_BYTES_MAX}, bytes: shorten {path!r}"
        )
    for segment in path.split("/"):
        if segment in ("", ".", ".."):
            raise InvalidArgument(f"the path {path!r} has the segment {segment!r}; paths are relative, like 'a/b.bin'")
        if _STAGED.search(segment):
            raise InvalidArgument(f"the path {path!r} has a segment that ends in '#' and digits, like a staged file's")
    return path


_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
_STAGED: Final = re.compile(r"#[0-9]+\Z")  # obstore's local listing skips such names, which hides staged files.


class _Body:
    """A stream on its way to a store: its first part, its size, and its own failure, which is not the store's."""

    def __init__(self) -> None:
        self.first = bytearray()
        self.size = 0
        self.failure: Exception | None = None

    def fills_a_part(self, chunk: bytes) -> bool:
        self.first += _checked(chunk)
        return len(self.first) >= OBJECT_PART_BYTES

    def read(self, rest: Iterator[bytes]) -> Iterator[bytes]:
        yield self._take_first()
        with self._noting_failure():
            for chunk in rest:
                yield self._count(chunk)

    async def read_async(self, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        yield self._take_first()
        with self._noting_failure():
            async for chunk in rest:
                yield self._count(chunk)

    def _take_first(self) -> bytes:
        first, self.first = bytes(self.first), bytearray()
        return self._count(first)

    def _count(self, chunk: bytes) -> bytes:
        self.size += len(_checked(chunk))
        return chunk

    @contextmanager
    def _noting_failure(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.failure = error
            raise


def _checked(data: bytes) -> bytes:
    # Without this check, obstore would take a string for the name of a file to upload.
    if not isinstance(data, bytes | bytearray | memoryview):
        raise InvalidValue(f"an object's data is bytes, not {type(data).__name__}; encode it")
    return data


def _is_empty(start: int, length: int) -> bool:
    if not (0 <= start <= _OFFSET_MAX and 0 <= length <= _OFFSET_MAX):
        raise InvalidArgument(f"a range of {length} bytes from {start}; both may be 0 to {_OFFSET_MAX}")
    return length == 0


def _nothing_after_the_end(error: exceptions.GenericError) -> bytes:
    if not re.search("StartTooLarge|416 Range Not Satisfiable", str(error)):
        raise error
    return b""


def _version(etag: str) -> "PutMode":
    if etag in ("", "*"):
        raise InvalidArgument(f"{etag!r} names no version of an object; pass the etag of an ObjectMeta")
    return {"e_tag": etag}


def _mode(create_only: bool) -> "PutMode":
    return "create" if create_only else "overwrite"


def _meta(stored: "StoredMeta") -> ObjectMeta:
    return ObjectMeta(stored["path"], stored["size"], stored["e_tag"] or "")


def _stored(path: str, size: int, result: "PutResult") -> ObjectMeta:
    return ObjectMeta(path, size, result["e_tag"] or "")


def _merge(page: Page, batch: "Sequence[StoredMeta]", limit: int) -> Page:
    return sorted([*page, *map(_meta, batch)], key=lambda meta: meta.path)[:limit]


def _part_requests(meta: ObjectMeta, part_bytes: int) -> "Iterator[GetOptions]":
    for start in range(0, meta.size, part_bytes):
        yield {"range": (start, min(start + part_bytes, meta.size)), "if_match": meta.etag}


class _Stamps:
    """Gives every file of this process a time of its own.

    A local etag is inode, microsecond and size. Inodes are used again and a kernel's clock may stand still for
    milliseconds, so without this a new version could have an old one's etag.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last_us = 0

    def put_on(self, file: IO[bytes]) -> None:
        with self._lock:
            self._last_us = max(self._last_us + 1, time.time_ns() // 1_000)
            stamp_ns = self._last_us * 1_000
        os.utime(file.fileno(), ns=(stamp_ns, stamp_ns))


_STAMPS: Final = _Stamps()
_NAMING: Final = threading.Lock()  # Makes a comparison and a rename one step, in every local folder of the process.


def _discard(staged: IO[bytes]) -> None:
    with suppress(OSError):  # Closing writes what is buffered, and fails again on a full disk.
        staged.close()
    Path(staged.name).unlink(missing_ok=True)


def _sweep(staging: Path) -> None:
    for leftover in staging.glob("*#0"):
        with suppress(FileNotFoundError):
            if leftover.stat().st_mtime < time.time() - _STAGED_SECONDS_MAX:
                leftover.unlink()


def _make_folder(folder: Path) -> None:
    """Create the folder and what is missing above it, each durable before anything goes into it."""
    missing = list(itertools.takewhile(lambda each: not each.is_dir(), (folder, *folder.parents)))
    for each in reversed(missing):
        try:
            each.mkdir()
        except FileExistsError:
            if not each.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, "an object has the name of a folder", str(each)) from None
        _sync_folder(each.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _translated(path: str, *, writes: bool = False, body: _Body | None = None) -> Iterator[None]:
    try:
        yield
    except (exceptions.BaseError, OSError, NotImplementedError) as error:
        if body is not None and body.failure is not None:
            raise body.failure from None
        raise _failure(_kind(error, writes=writes), path, _headline(error)) from error


def _failure(kind: type[HoldfastError], path: str, detail: str = "") -> HoldfastError:
    return kind(f"{path!r}: {_ADVICE[kind]}" + (f": {detail}" if detail else ""))


def _headline(error: Exception) -> str:
    return str(error).partition("\n\nDebug source")[0]


def _kind(error: Exception, *, writes: bool) -> type[HoldfastError]:
    text = str(error)
    if re.search("NoSuchBucket|ContainerNotFound|specified bucket does not exist", text):
        return errors.PathUnusable
    for types, kind in _BY_TYPE:
        if isinstance(error, types):
            return kind
    if no_answer := _NO_ANSWER.search(text):
        # A connection refused at once has sent nothing; after a retry, the attempt before may have arrived.
        sent = no_answer["kind"] != "Connect" or no_answer["retries"] != "0"
        return errors.CommitUnknown if writes and sent else errors.Unreachable
    os_error = re.search(r"\(os error ([0-9]+)\)", text)
    number = getattr(error, "errno", None) or (int(os_error[1]) if os_error else 0)
    if number == errno.ENOTDIR and not writes:
        return ObjectNotFound
    return _BY_ERRNO.get(number, errors.Backend)


# obstore tells these failures apart in its debugging text alone.
_NO_ANSWER: Final = re.compile(
    r"retries: (?P<retries>[0-9]+),.*HttpError \{\s*kind: (?P<kind>Connect|Timeout|Request|Interrupted|Decode)",
    re.DOTALL,
)
_BY_TYPE: Final[tuple[tuple[Any, type[HoldfastError]], ...]] = (
    (exceptions.AlreadyExistsError | FileExistsError, ObjectExists),
    (exceptions.PreconditionError, errors.ObjectChanged),
    (FileNotFoundError, ObjectNotFound),
    (exceptions.PermissionDeniedError | exceptions.UnauthenticatedError, errors.PathUnusable),
    (NotImplementedError, errors.Unsupported),
)
_BY_ERRNO: Final[dict[int, type[HoldfastError]]] = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), errors.DiskFull),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), errors.PathUnusable),
    **dict.fromkeys((errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG), InvalidArgument),
}
_ADVICE: Final[dict[type[HoldfastError], str]] = {
    ObjectExists: "an object is there and was left as it is; read it, or choose another path",
    errors.ObjectChanged: "another version is there, or none; read it, then decide",
    ObjectNotFound: "there is no such object; list what is there",
    errors.PathUnusable: "the store refuses; check that its bucket or folder exists and that you may use it",
    errors.Unsupported: "this store does not offer the operation; use another",
    errors.DiskFull: "the device is full and nothing was stored; free some space, then repeat it",
    InvalidArgument: "a local folder cannot hold this path beside what it has; choose another",
    errors.Unreachable: "the store does not answer and nothing was written; check its endpoint, then repeat it",
    errors.CommitUnknown: "the answer was lost, so the write may or may not be there; look before repeating it",
    errors.Backend: "the store failed; repeat it later",
}
