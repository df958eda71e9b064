"""The locks that callers of one universe can acquire: those of its agents, and those of its data.

    identity → contacts → dedupe → inbox → outbox → readstate    of an agent; `dedupe` has no name
    database → entity_type → record_id                           of entities

The two groups are separate tables. The locks of agents come first: code that holds an inbox can write entities, and
code that holds a record cannot wait for an inbox. So the two tables together cannot deadlock either.
"""

from collections.abc import Sequence
from typing import Final

from holdfast.errors import InvalidArgument
from holdfast.names import checked_agent
from holdfast.runtime.locks.rules import LevelStats, Mode, Path
from holdfast.runtime.locks.table import DATA_LEVELS, RESOURCE_LEVELS, Held, LockTable

DEDUPE: Final = "dedupe"  # One lock for all agents of the process: the ingress holds it during a commit.


class UniverseLocks:
    """Resolves the paths of callers to the table and the name that the plane itself uses."""

    def __init__(self, universe: str, *, agents: LockTable, data: LockTable) -> None:
        self._universe = universe
        self._agents = agents
        self._data = data

    def acquire(self, path: Path, mode: Mode | str = Mode.EXCLUSIVE, *, timeout_seconds: float | None = None) -> Held:
        """`LockTable.acquire`, on any level."""
        table, paths = self._resolve([path])
        return table.acquire(paths[0], mode, timeout_seconds=timeout_seconds)

    async def acquire_async(
        self, path: Path, mode: Mode | str = Mode.EXCLUSIVE, *, timeout_seconds: float | None = None
    ) -> Held:
        """`LockTable.acquire_async`, on any level."""
        table, paths = self._resolve([path])
        return await table.acquire_async(paths[0], mode, timeout_seconds=timeout_seconds)

    def acquire_all(
        self, paths: Sequence[Path], mode: Mode | str = Mode.EXCLUSIVE, *, timeout_seconds: float | None = None
    ) -> Held:
        """`LockTable.acquire_all`, on levels of agents or on levels of data."""
        table, paths = self._resolve(paths)
        return table.acquire_all(paths, mode, timeout_seconds=timeout_seconds)

    async def acquire_all_async(
        self, paths: Sequence[Path], mode: Mode | str = Mode.EXCLUSIVE, *, timeout_seconds: float | None = None
    ) -> Held:
        """`LockTable.acquire_all_async`, on levels of agents or on levels of data."""
        table, paths = self._resolve(paths)
        return await table.acquire_all_async(paths, mode, timeout_seconds=timeout_seconds)

    def stats(self) -> dict[str, LevelStats]:
        """The statistics of each level, by its name. Those of agents cover all universes."""
        return {**self._agents.stats(), **self._data.stats()}

    def _resolve(self, paths: Sequence[Path]) -> tuple[LockTable, Sequence[Path]]:
        """The table of the paths, and the paths with the names that this table uses."""
        if isinstance(paths, str) or not isinstance(paths, Sequence):
            return self._data, paths  # It raises the error.
        of_agents = [_is_of_agents(path) for path in paths]
        if not any(of_agents):
            return self._data, paths
        if not all(of_agents):
            raise InvalidArgument(
                f"acquire_all takes locks of agents ({', '.join(RESOURCE_LEVELS)}) or of data "
                f"({', '.join(DATA_LEVELS)}), not of both; acquire those of agents first, with a call of their own"
            )
        return self._agents, [self._agent_path(path) for path in paths]

    def _agent_path(self, path: Path) -> Path:
        if len(path) > 2:
            return path  # The table raises the error.
        level, name = path[0].lower(), path[1] if len(path) == 2 else ""
        if level == DEDUPE and name:
            raise InvalidArgument(f"The level {DEDUPE} has a single lock without a name; remove the name {name!r}")
        if level == DEDUPE:
            return (DEDUPE,)
        return level, f"{checked_agent(name, self._universe)}@{self._universe}"


def _is_of_agents(path: object) -> bool:
    """Whether a path names a level of agents. Levels that do not exist count as data, whose table refuses them."""
    if isinstance(path, str) or not isinstance(path, Sequence) or not path or not isinstance(path[0], str):
        return False
    level = path[0].lower()
    if level not in RESOURCE_LEVELS and level not in DATA_LEVELS:
        raise InvalidArgument(f"Unknown lock level {path[0]!r}; use one of {', '.join(DATA_LEVELS + RESOURCE_LEVELS)}")
    return level in RESOURCE_LEVELS
