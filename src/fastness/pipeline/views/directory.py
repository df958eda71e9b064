"""A view of a data directory that is not in use: opened briefly to take a checkpoint, then closed again.

DATA/.view-<id>/kv/         the checkpoint of the key space, hard links; only this process opens it
DATA/.view-<id>/activity/   session logs that are not rotated: hard links too
"""

import time
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from fastness.backends.rocksdb import RocksDatabase
from fastness.backends.rocksdb.lock_holder import describe_holder
from fastness.errors import DirectoryInUse
from fastness.limits import VIEW_RETRY_SECONDS
from fastness.names import folder_at
from fastness.pipeline.config import Config
from fastness.pipeline.journal_chunks import Stores
from fastness.pipeline.views import folders
from fastness.pipeline.views.view import View
from fastness.plane.formats import check_marker
from fastness.runtime.maintenance.checkpoints import link_all

_POLL_SECONDS: Final = 0.05


def open_directory(config: Config) -> View:
    """A view of the directory of a `dir:` URL.

    Raises:
        NotFound: it is not a data directory.
        DirectoryInUse: another process has it open.
        SchemaMismatch: a newer Fastness wrote it.
        DamagedDatabase: the database is damaged.
        EncryptionKeyMissing: it has encrypted universes, and the master key is missing.
    """
    path = folder_at(config.data).absolute()
    check_marker(path)
    stores = Stores(config.storage)
    with ExitStack() as resources:
        folder = resources.enter_context(folders.temporary(path))
        _checkpoint(path, folder / "kv", config)
        for logs in map(folder_at, config.activity_folders or [str(path / "activity")]):
            link_all(logs, folder / "activity")
        database = resources.enter_context(RocksDatabase(folder / "kv", cipher=config.cipher()))
        url = config.objects or f"dir:{path / 'objects'}"
        return View(
            database,
            objects=stores(url),
            objects_url=url,
            logs=(folder / "activity",),
            stores=stores,
            store_id=url,
            universes=config.universes,
            resources=resources.pop_all(),
        )


def _checkpoint(path: Path, target: Path, config: Config) -> None:
    """Take a checkpoint of the key space; one view at a time opens it."""
    until = time.monotonic() + VIEW_RETRY_SECONDS
    with folders.exclusive(path):
        while True:
            try:
                with RocksDatabase(path / "kv", cipher=config.cipher()) as database:
                    database.checkpoint(target)
                return
            except DirectoryInUse as error:
                # Commands release the directory quickly; a server does not.
                if time.monotonic() > until:
                    raise DirectoryInUse(
                        f"{path} is open in {describe_holder(path / 'kv')}, most likely a server; use its URL instead "
                        "(--data http://HOST:PORT), or close it"
                    ) from error
                time.sleep(_POLL_SECONDS)
