"""One moment of a plane, to be read by jobs; nobody writes to it.

dir:PATH            a checkpoint of the key space (hard links), made while nobody has the directory open
http(s)://…         the files of an online backup, which the server makes while it goes on
postgresql://…      read transactions: each world at one moment

with open_view(config) as view:
    for world in view.worlds("main"):
        pieces = view.pieces(world, start, staging)
"""

from holdfast.errors import InvalidUrl
from holdfast.layers.migrations import check_complete
from holdfast.pipeline.config import Config
from holdfast.pipeline.journal_chunks import Piece, WorldView
from holdfast.pipeline.views import directories, postgres, servers
from holdfast.pipeline.views.view import View
from holdfast.tiers import Tier

__all__ = ["Piece", "View", "WorldView", "open_view"]


def open_view(config: Config) -> View:
    """The plane at `config.data` as it is now. Close it: it holds on to disk, and to a checkpoint of a server.

    Raises:
        InvalidUrl: the data are no plane's.
        NotFound: there is no data directory.
        DirectoryInUse: a process has the directory open, and only that one can read it.
        MigrationUnfinished: not all of a plane is there yet.
        Unreachable: the server, or PostgreSQL, does not answer.
    """
    view = _opened(config)
    try:
        view.database.read(check_complete, tier=Tier.IMPORTANT)
    except BaseException:
        view.close()
        raise
    return view


def _opened(config: Config) -> View:
    scheme, _, rest = config.data.partition(":")
    if scheme == "dir" and rest:
        return directories.open_directory(config)
    if scheme in ("http", "https") and rest.startswith("//"):
        return servers.open_server(config)
    if scheme in ("postgresql", "postgres") and rest.startswith("//"):
        return postgres.open_postgres(config)
    raise InvalidUrl(
        f"{config.data.rpartition('@')[2]!r} is no plane; "  # What is in front may be a password.
        "give dir:PATH, postgresql://user@host/database or http://HOST:PORT"
    )
