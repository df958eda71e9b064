"""A view of a PostgreSQL that goes on: every read is a snapshot of its own, so each world is of one moment.

Worlds that are told later may be of a later moment. Nothing depends on their being of the same one.
"""

import os
from contextlib import ExitStack
from pathlib import Path

from holdfast.errors import Unsupported
from holdfast.names import folder_at
from holdfast.pipeline.config import Config
from holdfast.pipeline.journal_chunks import Stores
from holdfast.pipeline.views.view import View


def open_postgres(config: Config) -> View:
    """A view of the PostgreSQL at a `postgresql:` URL.

    Raises:
        Unreachable: it does not answer.
        NotFound: there is no plane in this database.
        Unsupported: the driver is not installed.
    """
    try:
        from holdfast.backends.postgres import PostgresDatabase
    except ImportError as error:
        raise Unsupported("PostgreSQL needs its driver; run: pip install 'holdfast[postgres]'") from error
    stores = Stores(config.storage)
    with ExitStack() as resources:
        database = resources.enter_context(PostgresDatabase(config.data, create=False))
        return View(
            database,
            objects=stores(config.objects) if config.objects else None,
            objects_url=config.objects,
            logs=_logs(config.activity),
            stores=stores,
            place=config.objects or "",
            universes=config.universes,
            resources=resources.pop_all(),
        )


def _logs(activity: str | None) -> Path:
    """Where nodes of this machine keep session logs, if nothing else is said."""
    if activity is not None:
        return folder_at(activity)
    return folder_at(os.environ.get("XDG_STATE_HOME") or "~/.local/state") / "holdfast" / "activity"
