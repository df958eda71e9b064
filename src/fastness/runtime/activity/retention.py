"""Retention of session logs in the object store, by age and by bytes.

The oldest files go first, whole. A file's body is deleted before its manifest entry, so an interrupted deletion is
found and repeated; a reader skips an entry without a body. Files that are not yet rotated are kept.
"""

import logging
from collections.abc import Iterator

from fastness.backends.objects import ObjectStore
from fastness.errors import HashMismatch, ObjectNotFound
from fastness.runtime.activity import format as log_format
from fastness.runtime.activity import rotation

_log = logging.getLogger("fastness.activity")


def trim(
    objects: ObjectStore, universe: str, *, now_ms: int, keep_seconds: float | None, bytes_max: int | None
) -> tuple[int, int]:
    """Delete the oldest session logs of a universe; how many files and bytes.

    A file whose last record is older than `keep_seconds` goes, and the oldest ones while all have over `bytes_max`.
    """
    if keep_seconds is None and bytes_max is None:
        return 0, 0
    oldest_ms = None if keep_seconds is None else now_ms - round(keep_seconds * 1_000)
    excess = 0 if bytes_max is None else size(objects, universe)[1] - bytes_max
    files = freed = 0
    for path, opened_ms in _manifests(objects, universe):
        if excess <= 0 and (oldest_ms is None or opened_ms >= oldest_ms):
            break  # The entries are in the order of these times.
        try:
            manifest = rotation.read_manifest(objects, path)
        except (HashMismatch, ObjectNotFound) as error:
            _log.warning("a session log is kept whatever its age: %s; run: fastness doctor", error)
            continue
        if excess <= 0 and (oldest_ms is None or manifest.last_at_ms >= oldest_ms):
            continue
        objects.delete(manifest.path)
        objects.delete(path)
        files, freed, excess = files + 1, freed + manifest.bytes, excess - manifest.bytes
    return files, freed


def size(objects: ObjectStore, universe: str) -> tuple[int, int]:
    """How many session logs a universe has in the object store, and their bytes."""
    count = total = 0
    for meta, _ in objects.times(f"activity/{universe}"):
        count, total = count + 1, total + meta.size
    return count, total


def universes(objects: ObjectStore) -> set[str]:
    """The universes that have session logs in the object store."""
    return {
        meta.path.split("/")[1] for folder in ("activity", "activity-manifest") for meta, _ in objects.times(folder)
    }


def _manifests(objects: ObjectStore, universe: str) -> Iterator[tuple[str, int]]:
    """The manifest entries, oldest first, with the time at which each file was opened."""
    for entry in rotation.entries_since(objects, universe):
        name = log_format.parse_name(rotation.name_of(entry))
        if name is not None:
            yield entry, name.opened_ms
