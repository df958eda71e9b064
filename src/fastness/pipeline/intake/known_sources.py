"""Checks that the sources which a user names exist: in the plane, in the lake, or among what was forgotten."""

from collections.abc import Iterator, Sequence
from typing import Final

import pyarrow.compute as pc

from fastness.errors import NotFound
from fastness.pipeline import tombstones
from fastness.pipeline.config import Config
from fastness.pipeline.lake import Lake
from fastness.pipeline.schemas import ACTIVITY, ENTITY_CHANGES, JOURNAL, QUARANTINE, SUPERSEDED, TABLES, Table
from fastness.pipeline.tombstones import Hidden
from fastness.pipeline.views import View

# The tables that have rows of a source, in a column of the source's name.
_TABLES: Final[dict[str, tuple[Table, ...]]] = {
    "world": tuple(table for table in TABLES.values() if "world" in table.schema.names),
    "kind": (ENTITY_CHANGES,),
    "queue": tuple(table for table in TABLES.values() if "queue" in table.schema.names),
    "session": (ACTIVITY,),
}
_SOURCE_TABLES: Final = {"world": JOURNAL.name, "kind": ENTITY_CHANGES.name}  # Of rows that were moved, or are missing.
_KINDS_SHOWN: Final = 20  # No command lists the kinds of entities.
_LISTS: Final = {
    "world": "fastness world list",
    "queue": "fastness queue list",
    "session": "fastness activity files",
}


def check(lake: Lake, view: View, config: Config, universes: Sequence[str], named: Sequence[tuple[str, str]]) -> None:
    """Check sources by their type (world, kind, queue or session) and name, in any of the universes.

    Raises:
        NotFound: neither the plane nor the lake has a source of that name.
        InvalidArgument: the lake's tombstones have another key.
    """
    hidden = tombstones.load(lake, config.key_file)
    for target, name in named:
        if target in _TABLES and not any(_is_known(lake, view, hidden, each, (target, name)) for each in universes):
            raise NotFound(
                f"Neither the plane nor the lake has the {target} {name!r} in {_places(universes)}; check the name and "
                f"--universe. {_list(view, universes, target)}"
            )


def _places(universes: Sequence[str]) -> str:
    return f"universe {universes[0]}" if len(universes) == 1 else f"any of {len(universes)} universes"


def _list(view: View, universes: Sequence[str], target: str) -> str:
    """The names that exist, or how to list them."""
    if target != "kind":
        return f"To list what the plane has, run: {_LISTS[target]}"
    found = sorted({name for universe in universes for name in _plane_names(view, universe, target)})
    more = ", …" if len(found) > _KINDS_SHOWN else ""
    return f"The plane has these kinds: {', '.join(found[:_KINDS_SHOWN])}{more}"


def _is_known(lake: Lake, view: View, hidden: Hidden, universe: str, source: tuple[str, str]) -> bool:
    target, name = source
    if target == "world" and view.incarnation(universe, name):
        return True
    return (
        name in _plane_names(view, universe, target)
        or hidden.hides(target, universe, name)
        or any(_has_rows(lake, table, universe, target, name) for table in _TABLES[target])
        or any(_names_source(lake, table, universe, target, name) for table in (SUPERSEDED, QUARANTINE))
    )


def _plane_names(view: View, universe: str, target: str) -> Iterator[str]:
    if target == "kind":
        return (entity.kind for entity in view.entities(universe))
    if target == "queue":
        return view.queue_names(universe)
    return (file.session for file in view.logs(universe)) if target == "session" else iter(())


def _has_rows(lake: Lake, table: Table, universe: str, column: str, name: str) -> bool:
    found = lake.table(table).scan([column], pc.field(column) == name, universe=universe, **{column: name})
    return any(rows.num_rows for rows in found)


def _names_source(lake: Lake, table: Table, universe: str, target: str, name: str) -> bool:
    """Whether a row of `superseded` or `quarantine` is about the source. That of an entity is named KIND/ID."""
    where = pc.field("table_name") == _SOURCE_TABLES.get(target, "")
    for rows in lake.table(table).scan(["source"], where, universe=universe):
        sources = rows.column("source").to_pylist()
        if name in ((source.partition("/")[0] for source in sources) if target == "kind" else sources):
            return True
    return False
