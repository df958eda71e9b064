"""Staging folders in the lake for data that executors read: one for each run, named after its start time.

    <lake>/_staging/20261115T112300-5f3a…/hot/<sha256>.log

A run removes its own folder at the end. `delete_stale` removes those of killed runs, by the time in their name.
"""

import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from fastness.pipeline.journal_chunks import Stores
from fastness.pipeline.lake.locations import Location

FOLDER: Final = "_staging"
_FORMAT: Final = "%Y%m%dT%H%M%S"


@contextmanager
def temporary_folder(location: Location) -> Iterator[Location]:
    """A new staging folder for a run, removed when the run ends."""
    folder = location.child(f"{FOLDER}/{datetime.now(UTC).strftime(_FORMAT)}-{uuid.uuid4().hex[:12]}")
    try:
        yield folder
    finally:
        clear(folder)


def clear(folder: Location) -> None:
    """Remove everything in a folder."""
    if folder.is_local:
        shutil.rmtree(folder.url, ignore_errors=True)
        return
    store = Stores(folder.storage)(folder.url)
    while page := store.list():
        for meta in page:
            store.delete(meta.path)


def delete_stale(location: Location, *, keep_hours: int) -> int:
    """Remove the folders of runs that began more than `keep_hours` ago; returns their number."""
    before = datetime.now(UTC) - timedelta(hours=keep_hours)
    stale = [run for run in _runs(location) if _start_time(run) < before]
    for run in stale:
        clear(location.child(f"{FOLDER}/{run}"))
    return len(stale)


def _runs(location: Location) -> set[str]:
    if location.is_local:
        folder = Path(location.url, FOLDER)
        return {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    store, after, found = Stores(location.storage)(location.url), None, set[str]()
    while page := store.list(FOLDER, after=after):
        found |= {meta.path.split("/")[1] for meta in page}
        after = page[-1].path
    return found


def _start_time(run: str) -> datetime:
    with suppress(ValueError):
        return datetime.strptime(run.partition("-")[0], _FORMAT).replace(tzinfo=UTC)
    return datetime.now(UTC)  # Not a run's folder; keep it.
