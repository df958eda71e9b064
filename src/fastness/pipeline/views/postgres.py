"""A view of a live PostgreSQL: every read has its own snapshot, so each world is consistent.

Worlds that are read later may be newer. No job depends on a snapshot across worlds.
"""

import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from fastness.errors import Unsupported
from fastness.extras import how_to_install
from fastness.names import folder_at
from fastness.pipeline.config import Config
from fastness.pipeline.journal_chunks import Stores
from fastness.pipeline.views.view import View


def open_postgres(config: Config) -> View:
    """A view of the PostgreSQL at a `postgresql:` URL.

    Raises:
        Unreachable: PostgreSQL cannot be reached.
        NotFound: there is no plane in this database.
        Unsupported: the driver is not installed.
        EncryptionKeyMissing: it has encrypted universes, and the master key is missing.
    """
    try:
        from fastness.backends.postgres import PostgresDatabase
    except ImportError as error:
        raise Unsupported(f"PostgreSQL needs its driver; {how_to_install('postgres')}") from error
    stores = Stores(config.storage)
    with ExitStack() as resources:
        database = resources.enter_context(PostgresDatabase(config.data, create=False, cipher=config.cipher()))
        return View(
            database,
            objects=stores(config.objects) if config.objects else None,
            objects_url=config.objects,
            logs=_logs(config.activity_folders),
            stores=stores,
            store_id=config.objects or "",
            universes=config.universes,
            is_live=True,
            resources=resources.pop_all(),
        )


def _logs(activity: Sequence[str]) -> tuple[Path, ...]:
    """The given folders of session logs: one for each node. Without any, the default one of this machine."""
    if activity:
        return tuple(map(folder_at, activity))
    return (folder_at(os.environ.get("XDG_STATE_HOME") or "~/.local/state") / "fastness" / "activity",)
