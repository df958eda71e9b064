"""The state of a lake: its tables, the last runs, and how far it is behind its plane. No Spark here."""

from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime

import msgspec

from fastness.errors import ObjectNotFound
from fastness.pipeline import tombstones
from fastness.pipeline.config import Config
from fastness.pipeline.intake import entity_ingest, log_ingest, plans
from fastness.pipeline.lake import Lake, LakeTable
from fastness.pipeline.observation.runs import RunRecord, read_records
from fastness.pipeline.schemas import ACTIVITY, ENTITY_CHANGES, JOURNAL, QUARANTINE, TABLES
from fastness.pipeline.views import View


class Lag(msgspec.Struct, frozen=True):
    """What the plane has and a table lacks."""

    sources: int  # Worlds, log files or entities that are ahead of the table.
    amount: int
    unit: str  # records, bytes or changes


class TableStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One table of the lake."""

    table: str
    rows: int
    files: int
    bytes: int
    version: int  # Of the Delta log: the number of the last commit.
    committed_at: datetime | None
    marks: int  # Watermarks: how many sources the table remembers its position of.
    quarantined: int  # Ranges that the table lacks, without those that were accepted as lost.
    lag: Lag | None = None  # None: not measured, or derived from other tables.


class LakeStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A lake at one time."""

    lake: str
    at: datetime
    runs: list[RunRecord]
    tables: list[TableStatus]

    @property
    def is_damaged(self) -> bool:
        """Whether data is quarantined, or the last run of a job had findings."""
        return any(table.quarantined for table in self.tables) or any(run.state == "findings" for run in self.runs)


def check_exists(lake: Lake) -> None:
    """Raise unless the lake has a table, or a job has run.

    Raises:
        ObjectNotFound: there is no lake.
    """
    if not read_records(lake.location) and not any(lake.table(table).exists for table in TABLES.values()):
        url = lake.location.url
        raise ObjectNotFound(f"There is no lake at {url}; create one with: fastness pipeline ingest --lake {url}")


def lake_status(config: Config, view: View | None = None) -> LakeStatus:
    """The state of the lake of a configuration; with a view of its plane, also how far it is behind.

    Raises:
        ObjectNotFound: there is no lake.
    """
    lake = Lake(config.lake, config.storage)
    check_exists(lake)
    quarantined = Counter(
        row["table_name"]
        for row in lake.table(QUARANTINE).rows(["universe", "table_name", "accepted_at"]).to_pylist()
        if row["accepted_at"] is None and (not config.universes or row["universe"] in config.universes)
    )
    lags = {} if view is None else _lags(lake, view.without(tombstones.load(lake, config.key_file)))
    return LakeStatus(
        lake=lake.location.url,
        at=datetime.now(UTC),
        runs=list(read_records(lake.location).values()),
        tables=[
            _table_status(table, config.universes, quarantined[table.table.name], lags.get(table.table.name))
            for table in map(lake.table, TABLES.values())
            if table.exists
        ],
    )


def _table_status(table: LakeTable, universes: Sequence[str], quarantined: int, lag: Lag | None) -> TableStatus:
    files = [file for file in table.entries() if not universes or file.universe in universes]
    return TableStatus(
        table=table.table.name,
        rows=sum(file.rows for file in files),
        files=len(files),
        bytes=sum(file.size for file in files),
        version=table.version,
        committed_at=_committed_at(table),
        marks=len(table.watermarks()),
        quarantined=quarantined,
        lag=lag,
    )


def _committed_at(table: LakeTable) -> datetime | None:
    """When the last commit was made; None if its entry was removed from the log after a checkpoint."""
    try:
        lines = bytes(table.location.read(f"_delta_log/{table.version:020}.json")).splitlines()
    except ObjectNotFound:
        return None
    entries = (msgspec.json.decode(line) for line in lines if line.startswith(b'{"commitInfo":'))
    found = next((entry["commitInfo"].get("timestamp") for entry in entries), None)
    return None if found is None else datetime.fromtimestamp(found / 1_000, UTC)


def _lags(lake: Lake, view: View) -> dict[str, Lag]:
    journal, activity, changes = lake.table(JOURNAL), lake.table(ACTIVITY), lake.table(ENTITY_CHANGES)
    records: list[int] = []
    log_bytes: list[int] = []
    versions: list[int] = []
    for universe in view.universes():
        for world in view.worlds(universe):
            records.append(world.head - journal.watermark(plans.journal_watermark(universe, world.name)))
        for file in view.logs(universe):
            log_bytes.append(file.size - activity.watermark(log_ingest.offset_watermark(universe, file.id)))
        for entity in view.entities(universe):
            versions.append(
                entity.version - changes.watermark(entity_ingest.watermark(universe, entity.kind, entity.id))
            )
    return {
        JOURNAL.name: _lag(records, "records"),
        ACTIVITY.name: _lag(log_bytes, "bytes"),
        ENTITY_CHANGES.name: _lag(versions, "changes"),
    }


def _lag(differences: Sequence[int], unit: str) -> Lag:
    behind = [difference for difference in differences if difference > 0]
    return Lag(len(behind), sum(behind), unit)
