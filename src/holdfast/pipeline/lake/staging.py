"""Where hot records wait for executors: a folder of the lake for each run, named after when it began.

    <lake>/_staging/20261115T112300-5f3a…/hot/<sha256>.log

A run removes its own in the end. What killed ones left is removed by `sweep`, by the time in its name.
"""

import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from holdfast.pipeline.journal_chunks import Stores
from holdfast.pipeline.lake.locations import Place

FOLDER: Final = "_staging"
_FORMAT: Final = "%Y%m%dT%H%M%S"


@contextmanager
def staged(place: Place) -> Iterator[Place]:
    """A place of its own for a run, which is gone when it ends."""
    folder = place.below(f"{FOLDER}/{datetime.now(UTC).strftime(_FORMAT)}-{uuid.uuid4().hex[:12]}")
    try:
        yield folder
    finally:
        clear(folder)


def clear(folder: Place) -> None:
    """Remove everything in a folder."""
    if folder.is_local:
        shutil.rmtree(folder.url, ignore_errors=True)
        return
    store = Stores(folder.storage)(folder.url)
    while page := store.list():
        for meta in page:
            store.delete(meta.path)


def sweep(place: Place, *, keep_hours: int) -> int:
    """Remove what runs that began longer ago have left; how many of them."""
    before = datetime.now(UTC) - timedelta(hours=keep_hours)
    stale = [run for run in _runs(place) if _begun(run) < before]
    for run in stale:
        clear(place.below(f"{FOLDER}/{run}"))
    return len(stale)


def _runs(place: Place) -> set[str]:
    if place.is_local:
        folder = Path(place.url, FOLDER)
        return {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    store, after, found = Stores(place.storage)(place.url), None, set[str]()
    while page := store.list(FOLDER, after=after):
        found |= {meta.path.split("/")[1] for meta in page}
        after = page[-1].path
    return found


def _begun(run: str) -> datetime:
    with suppress(ValueError):
        return datetime.strptime(run.partition("-")[0], _FORMAT).replace(tzinfo=UTC)
    return datetime.now(UTC)  # Nothing that a run has made; it is left alone.
