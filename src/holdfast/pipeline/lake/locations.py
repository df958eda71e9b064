"""Where a lake is: a local folder, or an object store. The same words open Delta tables and single files."""

import os
from pathlib import Path

import msgspec
import pyarrow as pa

from holdfast.errors import InvalidUrl, ObjectNotFound
from holdfast.names import folder_at
from holdfast.pipeline.journal_chunks import Stores


class Place(msgspec.Struct, frozen=True):
    """A folder of the lake. It travels to executors."""

    url: str  # A path, or s3://bucket/prefix
    storage: dict[str, str] = {}

    @property
    def is_local(self) -> bool:
        return "://" not in self.url

    @property
    def store_url(self) -> str:
        """The same place for `Stores`."""
        return f"dir:{self.url}" if self.is_local else self.url

    def below(self, name: str) -> "Place":
        return Place(f"{self.url}/{name}", self.storage)

    def read(self, path: str) -> pa.Buffer:
        """All bytes of a file; a local one is mapped, not copied.

        Raises:
            ObjectNotFound: it is not there.
        """
        if not self.is_local:
            return pa.py_buffer(Stores(self.storage)(self.url).get(path))
        try:
            with pa.memory_map(f"{self.url}/{path}") as file:
                return file.read_buffer()
        except FileNotFoundError as error:
            raise ObjectNotFound(f"{self.url}/{path} is not there; was the lake vacuumed too early?") from error

    def sync(self, path: str) -> None:
        """Have a local file, and that it is there, survive a loss of power. Object stores do so by themselves."""
        if self.is_local:
            for target in (Path(self.url, path), Path(self.url, path).parent):
                descriptor = os.open(target, os.O_RDONLY)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)


def place(url: str, storage: dict[str, str]) -> Place:
    """The place that a Config names.

    Raises:
        InvalidUrl: it is neither a folder nor an object store.
    """
    scheme, separator, rest = url.partition("://")
    if separator and scheme in ("s3", "az", "gs") and rest:
        return Place(url.rstrip("/"), dict(storage))
    if separator and scheme == "file":
        return Place(str(Path(rest).absolute()))
    if not separator and url:
        return Place(str(folder_at(url).absolute()))
    raise InvalidUrl(f"{url!r} is no place for a lake; give a folder, s3://bucket/prefix, az://… or gs://…")
