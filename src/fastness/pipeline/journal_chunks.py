"""A world as a view shows it, and the chunks of its journal that executors read independently."""

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, TypeAlias

import msgspec
from obstore.store import LocalStore, MemoryStore

from fastness.backends.objects import ObjectStore, open_objects
from fastness.errors import PathUnusable, Unreachable
from fastness.layers.snapshots import SnapshotRecord
from fastness.names import folder_at
from fastness.wire.worlds import Segment

OpenStore: TypeAlias = Callable[[str], ObjectStore]


class WorldView(msgspec.Struct, frozen=True):
    """A world at one point in time."""

    universe: str
    name: str
    head: int  # The next height, which is the number of records.
    first_hot: int
    baseline: SnapshotRecord | None  # None: damaged, because every world is created with one.
    snapshots: list[SnapshotRecord]
    segments: list[Segment]
    state: str = "active"
    incarnation: int = 1


class JournalChunk(msgspec.Struct, frozen=True):
    """Consecutive records of one world in one object: a cold segment, or hot records staged in the same format.

    A chunk without a path stands for missing records.
    """

    universe: str
    world: str
    start: int
    end: int  # Inclusive, as in a Segment.
    store: str  # A URL for `Stores`.
    path: str
    checksum: str
    size: int
    hot: bool
    first: int = 0  # Only records from this height on are wanted; earlier ones were read before.
    last: int | None = None  # The last wanted height; None: `end`.
    staged: bool = False  # Written for this read only; if it is missing, the plane is not damaged.

    @property
    def span(self) -> tuple[int, int]:
        """The first and the last wanted height, inclusive."""
        return max(self.start, self.first), self.end if self.last is None else min(self.last, self.end)

    @property
    def rows(self) -> int:
        """The number of wanted records."""
        first, last = self.span
        return max(last + 1 - first, 0)


def staged_object_missing(path: str, store: str) -> Unreachable:
    """The error for a staged object that is missing."""
    return Unreachable(
        f"{path} was staged in {store} and is missing; use a staging location that all executors can reach and "
        "that nothing else cleans up"
    )


class Stores(msgspec.Struct, frozen=True):
    """Opens object stores with the options of a Config. It is sent to executors; open stores are not."""

    storage: dict[str, str] = {}

    def __call__(self, url: str) -> ObjectStore:
        """The store at `url`, for reading. A local folder that does not exist is an empty store, and is not created.

        So is the store with the empty URL, which missing chunks have.
        """
        if not url:
            return ObjectStore(MemoryStore())
        if (folder := _folder(url)) is not None:
            return ObjectStore(LocalStore(folder) if folder.is_dir() else MemoryStore())
        return _remote(url, tuple(sorted(self.storage.items())))

    def staging(self, url: str) -> ObjectStore:
        """The store at `url`, for staging. A local folder is created; writes to it are not synced.

        Raises:
            PathUnusable: the folder cannot be created.
        """
        if (folder := _folder(url)) is not None:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise PathUnusable(
                    f"{folder} cannot be created ({error.strerror}); use another staging location, or make it writable"
                ) from error
            return ObjectStore(LocalStore(folder))
        return _remote(url, tuple(sorted(self.storage.items())))


def _folder(url: str) -> Path | None:
    scheme, _, rest = url.partition(":")
    return folder_at(rest).absolute() if scheme == "dir" and rest else None


@lru_cache(maxsize=64)
def _remote(url: str, storage: tuple[tuple[str, str], ...]) -> ObjectStore:
    options: dict[str, Any] = {key.lower(): value for key, value in storage}
    # The lake is opened with the same options; it knows more of them, and spells allow_http differently.
    for name in _OF_THE_LAKE:
        options.pop(name, None)
    allow_http = [options.pop(name, "") for name in ("allow_http", "aws_allow_http")]
    if "true" in map(str.lower, allow_http):
        options["client_options"] = {"allow_http": True}
    return open_objects(url, **options)


_OF_THE_LAKE: Final = ("aws_s3_allow_unsafe_rename", "aws_s3_locking_provider", "delta_dynamo_table_name")
