"""What a view tells of a world, and the pieces of its history that executors read, each by itself."""

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, TypeAlias

import msgspec
from obstore.store import LocalStore, MemoryStore

from holdfast.backends.objects import ObjectStore, open_objects
from holdfast.errors import PathUnusable, Unreachable
from holdfast.layers.segments import SegmentRecord
from holdfast.layers.snapshots import SnapshotRecord
from holdfast.names import folder_at

OpenStore: TypeAlias = Callable[[str], ObjectStore]


class WorldView(msgspec.Struct, frozen=True):
    """A world at one moment."""

    universe: str
    name: str
    head: int  # The next height; how many records there are.
    first_hot: int
    baseline: SnapshotRecord | None  # None: it is damaged, because every world is made with one.
    snapshots: list[SnapshotRecord]
    segments: list[SegmentRecord]
    state: str = "active"


class Piece(msgspec.Struct, frozen=True):
    """A run of records of one world in one object: a cold segment, or hot records that were staged as if they were one.

    Nothing holds the records of a piece without a path: they are missing.
    """

    universe: str
    world: str
    start: int
    end: int  # Included, as in a SegmentRecord.
    store: str  # For `Stores`.
    path: str
    checksum: str
    size: int
    hot: bool
    first: int = 0  # Only records from this height on are wanted; those before it were read earlier.
    last: int | None = None  # And up to this one, if it is not the end.
    staged: bool = False  # The object was written for this read alone; that it is not there says nothing of the plane.

    @property
    def span(self) -> tuple[int, int]:
        """The first and the last height that are wanted, both included."""
        return max(self.start, self.first), self.end if self.last is None else min(self.last, self.end)

    @property
    def rows(self) -> int:
        """How many records are wanted."""
        first, last = self.span
        return max(last + 1 - first, 0)


def not_staged(path: str, store: str) -> Unreachable:
    """The error of whoever does not find what was staged for it."""
    return Unreachable(
        f"{path} was staged in {store} and is not there; name a place for staging that all executors reach, and that "
        "nobody clears meanwhile"
    )


class Stores(msgspec.Struct, frozen=True):
    """Opens object stores with the options of a Config; it travels to executors, and what it opened stays behind."""

    storage: dict[str, str] = {}

    def __call__(self, url: str) -> ObjectStore:
        """The store at `url`, to read from: a local folder is not made, and one that is not there has no objects.

        Nor has the store without a name, which is that of missing pieces.
        """
        if not url:
            return ObjectStore(MemoryStore())
        if (folder := _folder(url)) is not None:
            return ObjectStore(LocalStore(folder) if folder.is_dir() else MemoryStore())
        return _remote(url, tuple(sorted(self.storage.items())))

    def staging(self, url: str) -> ObjectStore:
        """The store at `url`, to write what is read soon: a local folder is made, but nothing in it is synced.

        Raises:
            PathUnusable: the folder cannot be made.
        """
        if (folder := _folder(url)) is not None:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise PathUnusable(
                    f"{folder} cannot be made ({error.strerror}); name another place for staging, or let it be written"
                ) from error
            return ObjectStore(LocalStore(folder))
        return _remote(url, tuple(sorted(self.storage.items())))


def _folder(url: str) -> Path | None:
    scheme, _, rest = url.partition(":")
    return folder_at(rest).absolute() if scheme == "dir" and rest else None


@lru_cache(maxsize=64)
def _remote(url: str, storage: tuple[tuple[str, str], ...]) -> ObjectStore:
    options: dict[str, Any] = {key.lower(): value for key, value in storage}
    # The same options open the lake, which takes more of them, and calls this one by another name.
    for name in _OF_THE_LAKE:
        options.pop(name, None)
    allow_http = [options.pop(name, "") for name in ("allow_http", "aws_allow_http")]
    if "true" in map(str.lower, allow_http):
        options["client_options"] = {"allow_http": True}
    return open_objects(url, **options)


_OF_THE_LAKE: Final = ("aws_s3_allow_unsafe_rename", "aws_s3_locking_provider", "delta_dynamo_table_name")
