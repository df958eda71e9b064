"""Sources that a job is about: worlds, kinds of entities, queues with a durable history, and sessions.

world      journal, segments, world_state        queue     queue_events
kind       entity_changes                        session   activity
"""

from collections.abc import Collection
from typing import Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from fastness.errors import InvalidArgument
from fastness.pipeline.intake import log_ingest
from fastness.pipeline.intake.quarantine import Quarantined
from fastness.pipeline.lake import LakeTable, Move
from fastness.pipeline.schemas import ACTIVITY, ENTITY_CHANGES, JOURNAL, QUEUE_EVENTS, SEGMENTS, WORLD_STATE, Table

# The tables that are filled from sources. A world's journal comes first: the other tables follow from it.
FED_TABLES: Final = (JOURNAL, SEGMENTS, WORLD_STATE, ENTITY_CHANGES, QUEUE_EVENTS, ACTIVITY)
_WATERMARKS: Final = {
    JOURNAL.name: ("journal", "tip"),
    SEGMENTS.name: ("segments",),
    ENTITY_CHANGES.name: ("entity", "entity-tip"),
    QUEUE_EVENTS.name: ("history",),
    ACTIVITY.name: ("activity", "lines"),
}


class Sources(msgspec.Struct, frozen=True):
    """Names of sources, in every selected universe. `everything`: all sources of all kinds."""

    worlds: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    queues: tuple[str, ...] = ()
    sessions: tuple[str, ...] = ()
    everything: bool = False

    def check(self, command: str) -> None:
        """Check that sources are named, or all are wanted.

        Raises:
            InvalidArgument: neither, or both.
        """
        if self.everything == bool(self.worlds or self.kinds or self.queues or self.sessions):
            raise InvalidArgument(
                f"`{command}` needs sources: name them with --world, --kind, --queue or --session, or give --all "
                "without names"
            )

    @property
    def named(self) -> list[tuple[str, str]]:
        """The type and name of each source."""
        given = (("world", self.worlds), ("kind", self.kinds), ("queue", self.queues), ("session", self.sessions))
        return [(target, name) for target, names in given for name in names]

    def wants(self, table: str, name: str) -> bool:
        """Whether a source of a table is chosen. For activity the name is a session, for entities a kind."""
        return self.everything or name in self._names(table)

    def matches(self, table: Table, rows: pa.Table) -> pa.Array:
        """A mask of the rows of these sources."""
        if self.everything:
            return pa.repeat(pa.scalar(True), rows.num_rows)
        column = rows.column(_COLUMNS[table.name][0])
        return pc.is_in(column, pa.array(self._names(table.name), pa.string())).combine_chunks()

    def covers(self, row: Quarantined, files: Collection[str]) -> bool:
        """Whether a quarantine row is about one of these sources; `files` are the log files of the sessions."""
        if self.everything:
            return True
        if row.table == ACTIVITY.name:
            return row.source in files
        name = row.source.partition("/")[0] if row.table == ENTITY_CHANGES.name else row.source
        return row.table in _COLUMNS and self.wants(row.table, name)

    def moves(self, table: LakeTable, universe: str, files: Collection[str]) -> dict[str, Move]:
        """The moves of these sources' watermarks in a table back to zero."""
        found = {}
        for name, value in table.watermarks().items():
            kind, _, rest = name.partition("/")
            where, _, source = rest.partition("/")
            if value and where == universe and kind in _WATERMARKS.get(table.table.name, ()):
                if table.table is ACTIVITY:
                    is_chosen = self.everything or source in files
                else:
                    named = source.partition("/")[0] if table.table is ENTITY_CHANGES else source
                    is_chosen = self.wants(table.table.name, named)
                if is_chosen:
                    found[name] = Move(value, 0)
        if table.table is ACTIVITY and found:
            found |= log_ingest.read_all_again(table, universe)
        return found

    def _names(self, table: str) -> tuple[str, ...]:
        names: tuple[str, ...] = getattr(self, _COLUMNS[table][1])
        return names


_COLUMNS: Final = {
    JOURNAL.name: ("world", "worlds"),
    SEGMENTS.name: ("world", "worlds"),
    WORLD_STATE.name: ("world", "worlds"),
    ENTITY_CHANGES.name: ("kind", "kinds"),
    QUEUE_EVENTS.name: ("queue", "queues"),
    ACTIVITY.name: ("session", "sessions"),
}
