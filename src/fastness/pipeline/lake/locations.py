"""The location of a lake: a local folder or an object store. It opens both Delta tables and single files."""

import os
from pathlib import Path

import msgspec
import pyarrow as pa

from fastness.errors import InvalidUrl, ObjectNotFound
from fastness.names import folder_at
from fastness.pipeline.journal_chunks import Stores


class Location(msgspec.Struct, frozen=True):
    """A folder of the lake. It is sent to executors."""

    url: str  # A path, or s3://bucket/prefix
    storage: dict[str, str] = {}

    @property
    def is_local(self) -> bool:
        return "://" not in self.url

    @property
    def store_url(self) -> str:
        """The same location as a URL for `Stores`."""
        return f"dir:{self.url}" if self.is_local else self.url

    def child(self, name: str) -> "Location":
        return Location(f"{self.url}/{name}", self.storage)

    def read(self, path: str) -> pa.Buffer:
        """The bytes of a file; a local one is memory-mapped.

        Raises:
            ObjectNotFound: the file does not exist.
        """
        if not self.is_local:
            return pa.py_buffer(Stores(self.storage)(self.url).get(path))
        try:
            with pa.memory_map(f"{self.url}/{path}") as file:
                return file.read_buffer()
        except FileNotFoundError as error:
            raise ObjectNotFound(
                f"{self.url}/{path} does not exist; was the lake vacuumed with too few --keep-hours?"
            ) from error

    def size(self, path: str) -> int | None:
        """The size of a file in bytes; None if it does not exist."""
        if not self.is_local:
            try:
                return Stores(self.storage)(self.url).head(path).size
            except ObjectNotFound:
                return None
        try:
            return os.stat(f"{self.url}/{path}").st_size
        except (FileNotFoundError, NotADirectoryError):
            return None

    def sync(self, path: str) -> None:
        """Sync a local file and its folder entry to disk. Object stores are durable without it."""
        if self.is_local:
            for target in (Path(self.url, path), Path(self.url, path).parent):
                descriptor = os.open(target, os.O_RDONLY)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)


def parse_location(url: str, storage: dict[str, str]) -> Location:
    """The location that a Config names.

    Raises:
        InvalidUrl: it is neither a folder nor an object store.
    """
    scheme, separator, rest = url.partition("://")
    if separator and scheme in ("s3", "az", "gs") and rest:
        return Location(url.rstrip("/"), dict(storage))
    if separator and scheme == "file":
        return Location(str(Path(rest).absolute()))
    if not separator and url:
        return Location(str(folder_at(url).absolute()))
    raise InvalidUrl(f"{url!r} cannot be a lake; use a folder, s3://bucket/prefix, az://… or gs://…")
