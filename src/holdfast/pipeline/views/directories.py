"""A view of a data directory that nobody has open: opened for a moment, to make a checkpoint, and free again.

DATA/.view-<id>/kv/         the key space at one moment, from hard links; only this process opens it
DATA/.view-<id>/activity/   session logs that are not in the object store: hard links too
"""

import time
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from holdfast.backends.rocksdb import RocksDatabase
from holdfast.errors import DirectoryInUse
from holdfast.limits import VIEW_PATIENCE_SECONDS
from holdfast.names import folder_at
from holdfast.pipeline.config import Config
from holdfast.pipeline.journal_chunks import Stores
from holdfast.pipeline.views import folders
from holdfast.pipeline.views.view import View
from holdfast.plane.formats import check_marker
from holdfast.runtime.maintenance.checkpoints import link_all

_LOOK_SECONDS: Final = 0.05


def open_directory(config: Config) -> View:
    """A view of the directory of a `dir:` URL.

    Raises:
        NotFound: it is no data directory.
        DirectoryInUse: a process has it open.
        SchemaMismatch: a newer Holdfast wrote it.
        DamagedDatabase: what it holds is damaged.
    """
    path = folder_at(config.data).absolute()
    check_marker(path)
    stores = Stores(config.storage)
    with ExitStack() as resources:
        folder = resources.enter_context(folders.temporary(path))
        _checkpoint(path, folder / "kv")
        logs = folder_at(config.activity) if config.activity else path / "activity"
        link_all(logs, folder / "activity")
        database = resources.enter_context(RocksDatabase(folder / "kv"))
        url = config.objects or f"dir:{path / 'objects'}"
        return View(
            database,
            objects=stores(url),
            objects_url=url,
            logs=folder / "activity",
            stores=stores,
            place=url,
            universes=config.universes,
            resources=resources.pop_all(),
        )


def _checkpoint(path: Path, target: Path) -> None:
    """Open the key space for as long as a checkpoint takes, one view at a time."""
    until = time.monotonic() + VIEW_PATIENCE_SECONDS
    with folders.turn(path):
        while True:
            try:
                with RocksDatabase(path / "kv") as database:
                    database.checkpoint(target)
                return
            except DirectoryInUse as error:
                # Commands hold a directory for moments; a server does not let go of it.
                if time.monotonic() > until:
                    raise DirectoryInUse(
                        f"{path} is open in another process, most likely a server; give its URL instead "
                        "(--data http://HOST:PORT), or close it"
                    ) from error
                time.sleep(_LOOK_SECONDS)
