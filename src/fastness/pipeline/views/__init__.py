"""Read-only snapshots of a plane, for jobs.

dir:PATH            a checkpoint of the key space (hard links), taken while no process has the directory open
http(s)://…         the files of an online backup, which the server takes while it runs
postgresql://…      read transactions: each world is consistent

with open_view(config) as view:
    for world in view.worlds("main"):
        chunks = view.chunks(world, start, staging)
"""

from collections.abc import Iterator
from contextlib import contextmanager

from fastness.errors import InvalidUrl
from fastness.layers.migrations import check_complete
from fastness.pipeline import tombstones
from fastness.pipeline.config import Config
from fastness.pipeline.journal_chunks import JournalChunk, WorldView
from fastness.pipeline.lake import Lake
from fastness.pipeline.tombstones import Hidden
from fastness.pipeline.views import directory, postgres, server
from fastness.pipeline.views.view import View
from fastness.tiers import Tier

__all__ = ["JournalChunk", "View", "WorldView", "open_view", "shared_view"]


def open_view(config: Config) -> View:
    """A snapshot of the plane at `config.data`. Close it: it uses disk space, and a server's checkpoint.

    Raises:
        InvalidUrl: the URL does not name a plane.
        NotFound: the data directory does not exist.
        DirectoryInUse: another process has the directory open.
        MigrationUnfinished: the plane is the target of a migration that has not finished.
        Unreachable: the server or PostgreSQL cannot be reached.
    """
    view = _open(config)
    try:
        view.database.read(check_complete, tier=Tier.IMPORTANT)
    except BaseException:
        view.close()
        raise
    return view


@contextmanager
def shared_view(config: Config, view: View | None = None, *, with_forgotten: bool = False) -> Iterator[View]:
    """The given view, which stays open; or a new one, which is closed at the end.

    It lacks what `forget` has removed from the lake, unless that is wanted.
    """
    hidden = Hidden() if with_forgotten else tombstones.load(Lake(config.lake, config.storage), config.key_file)
    if view is not None:
        yield view.without(hidden)
        return
    with open_view(config) as opened:
        yield opened.without(hidden)


def _open(config: Config) -> View:
    scheme, _, rest = config.data.partition(":")
    if scheme == "dir" and rest:
        return directory.open_directory(config)
    if scheme in ("http", "https") and rest.startswith("//"):
        return server.open_server(config)
    if scheme in ("postgresql", "postgres") and rest.startswith("//"):
        return postgres.open_postgres(config)
    raise InvalidUrl(
        f"{config.data.rpartition('@')[2]!r} is not the URL of a plane; "  # Before the @ there may be a password.
        "use dir:PATH, postgresql://user@host/database or http://HOST:PORT"
    )
