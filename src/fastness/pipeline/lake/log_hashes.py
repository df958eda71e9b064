"""The SHA-256 of every file of a table's Delta log, recorded after each commit.

    <lake>/_hashes/activity/00000000000000000042.json                  sha256 and size of that commit
    <lake>/_hashes/activity/00000000000000000050.checkpoint.parquet    and of that checkpoint

A commit names the files of the table, and each of them has its hash in its name. So everything that readers use can be
verified. A run that is killed after a commit leaves it unrecorded; the next commit records it.
"""

import hashlib
import re
from collections.abc import Iterator
from typing import Final

import msgspec

from fastness.errors import ObjectNotFound
from fastness.limits import OBJECT_LIST_MAX
from fastness.pipeline.journal_chunks import Stores
from fastness.pipeline.lake.locations import Location

FOLDER: Final = "_hashes"
CHECKPOINT_INTERVAL: Final = 50  # Commits.
_LOG: Final = "_delta_log"
_NAME: Final = re.compile(r"(\d{20})\.(json|checkpoint\.parquet)\Z")
_LAST: Final = "_last_checkpoint"


class RecordedHash(msgspec.Struct, frozen=True):
    """What was recorded of a log file."""

    sha256: str
    size: int


class _LastCheckpoint(msgspec.Struct, frozen=True):
    version: int


class LogHashes:
    """The recorded hashes of one table's log."""

    def __init__(self, location: Location) -> None:
        """`location` is that of the table."""
        self._table = location
        lake, _, name = location.url.rpartition("/")
        self._records = Location(lake, location.storage).child(f"{FOLDER}/{name}")
        self._recorded_below: int | None = None

    def record(self, version: int) -> None:
        """Record the commits up to `version` that are not recorded yet, and their checkpoints."""
        if self._recorded_below is None:
            commits = [_version(name) for name in self._names() if name.endswith(".json")]
            self._recorded_below = max(commits, default=self._latest_checkpoint() - 1) + 1
        for number in range(self._recorded_below, version + 1):
            self._record(f"{number:020}.json")
            if {number % CHECKPOINT_INTERVAL, (number + 1) % CHECKPOINT_INTERVAL} & {0}:
                self._record(f"{number:020}.checkpoint.parquet")
        self._recorded_below = max(self._recorded_below, version + 1)

    def record_checkpoint(self, version: int) -> None:
        """Record the hash of a checkpoint that was written out of turn."""
        self._record(f"{version:020}.checkpoint.parquet")

    def delete_stale(self) -> None:
        """Delete the records of log files that Delta has removed because a later checkpoint replaces them."""
        store = Stores(self._records.storage)(self._records.store_url)
        latest = self._latest_checkpoint()
        for name in list(self._names()):
            if _version(name) < latest and self._table.size(f"{_LOG}/{name}") is None:
                store.delete(name)

    def damage(self) -> Iterator[tuple[str, str]]:
        """The log files that are damaged or missing, each with the reason."""
        latest = self._latest_checkpoint()
        for name in self._names():
            path = f"{_LOG}/{name}"
            try:
                data: bytes | None = bytes(self._table.read(path))
            except ObjectNotFound:
                data = None
            if data is None and _version(name) < latest:
                continue  # Removed by Delta.
            if reason := self._difference(name, data):
                yield path, reason
        if reason := self._last_checkpoint_fault(latest):
            yield f"{_LOG}/{_LAST}", reason

    def _difference(self, name: str, data: bytes | None) -> str | None:
        if data is None:
            return "it is missing"
        try:
            recorded = msgspec.json.decode(self._records.read(name), type=RecordedHash)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return f"its recorded hash in {self._records.url}/{name} is damaged"
        if (len(data), hashlib.sha256(data).hexdigest()) != (recorded.size, recorded.sha256):
            return "it does not match its recorded hash"
        return None

    def _last_checkpoint_fault(self, latest: int) -> str | None:
        """Delta starts at the checkpoint that this file names. It is overwritten, so it has no recorded hash."""
        try:
            found = msgspec.json.decode(self._table.read(f"{_LOG}/{_LAST}"), type=_LastCheckpoint).version
        except ObjectNotFound:
            return None
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return "it is not valid JSON"
        return None if found == latest else f"it names version {found}, and the latest checkpoint is {latest}"

    def _record(self, name: str) -> None:
        try:
            data = bytes(self._table.read(f"{_LOG}/{name}"))
        except ObjectNotFound:
            return  # The checkpoint is not written yet, or Delta has removed the commit.
        recorded = RecordedHash(hashlib.sha256(data).hexdigest(), len(data))
        Stores(self._records.storage).staging(self._records.store_url).put(name, msgspec.json.encode(recorded))

    def _latest_checkpoint(self) -> int:
        """The version of the latest checkpoint, recorded or not; 0 if there is none."""
        store, after, latest = Stores(self._table.storage)(self._table.store_url), None, 0
        while page := store.list(_LOG, after=after, limit=OBJECT_LIST_MAX):
            for meta in page:
                found = _NAME.match(meta.path.rpartition("/")[2])
                if found is not None and found[2] != "json":
                    latest = max(latest, int(found[1]))
            after = page[-1].path
        return latest

    def _names(self) -> Iterator[str]:
        store, after = Stores(self._records.storage)(self._records.store_url), None
        while page := store.list(after=after, limit=OBJECT_LIST_MAX):
            for meta in page:
                if _NAME.match(meta.path):
                    yield meta.path
            after = page[-1].path


def _version(name: str) -> int:
    return int(name.partition(".")[0])
