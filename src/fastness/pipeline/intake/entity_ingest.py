"""Ingests entity changes into `entity_changes`. The driver writes them: only it reads the key space.

    watermark entity/<universe>/<kind>/<id>       the last ingested version
    watermark entity-tip/<universe>/<kind>/<id>   a fingerprint of its change

If the plane has another change under that version, it was restored and has diverged. The new versions are then held
back, as a row of the quarantine.

A plane keeps only the latest versions of an entity (ENTITY_HISTORY_VERSIONS). Versions that were dropped before they
were ingested become a row of the quarantine.
"""

from collections.abc import Iterator
from typing import Any

import cbor2
import msgspec
import pyarrow as pa

from fastness.layers import entities
from fastness.layers.entities import EntityKey
from fastness.limits import INGEST_CHANGES, PAGE_ITEMS
from fastness.pipeline import codec
from fastness.pipeline.intake.ingest_run import Run
from fastness.pipeline.intake.quarantine import REWOUND, Quarantined, Scope
from fastness.pipeline.lake import LakeTable, Move, files, fingerprints
from fastness.pipeline.schemas import ENTITY_CHANGES
from fastness.pipeline.views.rows import EntityRow
from fastness.wire.entities import Change, Fields


class Batch(msgspec.Struct):
    """The content of one commit."""

    rows: list[dict[str, object]] = []
    moves: dict[str, Move] = {}
    found: list[Quarantined] = []
    scopes: list[Scope] = []


def ingest_changes(run: Run) -> None:
    """Ingest all entity changes that the view has and the lake does not."""
    run.retry_until_done("entity changes", lambda: _ingest_new(run))


def watermark(universe: str, kind: str, id: str) -> str:
    return f"entity/{universe}/{kind}/{id}"


def tip_watermark(universe: str, kind: str, id: str) -> str:
    return f"entity-tip/{universe}/{kind}/{id}"


def change_fingerprint(row: dict[str, object]) -> int:
    """The fingerprint of a change, as a row of `entity_changes`."""
    content = [row[name] for name in ("version", "changed_at", "durability", "fields", "removed", "deleted")]
    return fingerprints.of_bytes(msgspec.json.encode(content))


def is_same_change(stored: dict[str, Any], row: dict[str, Any]) -> bool:
    """Whether a row of the lake, with its time in milliseconds, is this change. Redacted fields are unknown."""
    if stored["redacted"]:
        return change_fingerprint({**stored, "fields": None}) == change_fingerprint({**row, "fields": None})
    return change_fingerprint(stored) == change_fingerprint(row)


def _ingest_new(run: Run) -> None:
    table = run.table(ENTITY_CHANGES)
    for batch in _batches(run, table):
        run.quarantine.add(batch.found)
        if batch.moves:
            _commit(table, msgspec.structs.replace(batch, rows=[run.redaction.change(row) for row in batch.rows]))
            run.record_commit(ENTITY_CHANGES, len(batch.rows))
        run.quarantine.resolve(batch.scopes, batch.found)


def _commit(table: LakeTable, batch: Batch) -> None:
    rows = pa.Table.from_pylist(batch.rows, ENTITY_CHANGES.schema)
    table.append(files.write(ENTITY_CHANGES, table.location, files.sorted_batches(ENTITY_CHANGES, rows)), batch.moves)


def _batches(run: Run, table: LakeTable) -> Iterator[Batch]:
    rewound_sources = run.quarantine.rewound()
    batch = Batch()
    for universe in run.view.universes():
        for entity in run.view.entities(universe):
            ingested = table.watermark(watermark(universe, entity.kind, entity.id))
            was_rewound = (universe, ENTITY_CHANGES.name, f"{entity.kind}/{entity.id}") in rewound_sources
            if entity.version != ingested or was_rewound:
                tip = table.watermark(tip_watermark(universe, entity.kind, entity.id))
                _add(run, batch, entity, ingested, tip)
            if len(batch.rows) >= INGEST_CHANGES:
                yield batch
                batch = Batch()
    yield batch


def _add(run: Run, batch: Batch, entity: EntityRow, ingested: int, tip: int) -> None:
    source = f"{entity.kind}/{entity.id}"
    batch.scopes.append(Scope(entity.universe, ENTITY_CHANGES.name, source, ingested + 1))
    if entity.version < ingested:
        detail = (
            f"the plane has version {entity.version}, the lake {ingested}: the plane was restored from an older backup"
        )
        batch.found.append(
            Quarantined(entity.universe, ENTITY_CHANGES.name, source, entity.version + 1, ingested, REWOUND, detail)
        )
        return
    rows = [row_of(entity, change) for change in _history(run, entity, max(ingested - 1, 0))]
    if rows and rows[0]["version"] == ingested:
        if tip and change_fingerprint(rows[0]) != tip:
            batch.found.append(_diverged(entity, source, ingested))
            return
        del rows[0]
    if entity.version == ingested:
        return
    next_version = ingested + 1
    for row in rows:
        version = int(str(row["version"]))
        if version > next_version:
            batch.found.append(_dropped_versions(entity, source, next_version, version - 1))
        next_version = version + 1
    if next_version <= entity.version:
        batch.found.append(_dropped_versions(entity, source, next_version, entity.version))
    batch.rows += rows
    last = change_fingerprint(rows[-1]) if rows and next_version > entity.version else 0
    batch.moves[watermark(entity.universe, entity.kind, entity.id)] = Move(ingested, entity.version)
    batch.moves[tip_watermark(entity.universe, entity.kind, entity.id)] = Move(tip, last)


def _history(run: Run, entity: EntityRow, ingested: int) -> Iterator[Change]:
    """The changes after version `ingested`, up to the entity's version in the view."""
    key = EntityKey(entity.universe, entity.kind, entity.id)
    while page := run.view.database.read(entities.history, key, after=ingested, limit=PAGE_ITEMS):
        for change in page:
            if change.version > entity.version:  # PostgreSQL may have newer ones; the next run ingests them.
                return
            yield change
        ingested = page[-1].version


def _diverged(entity: EntityRow, source: str, ingested: int) -> Quarantined:
    detail = (
        f"version {ingested} differs from the one in the lake: the plane was restored from an older backup and has "
        "diverged since; replace the lake's versions with `fastness pipeline accept`"
    )
    return Quarantined(
        entity.universe, ENTITY_CHANGES.name, source, ingested, max(ingested, entity.version), REWOUND, detail
    )


def _dropped_versions(entity: EntityRow, source: str, start: int, end: int) -> Quarantined:
    detail = "the entity's history no longer has these versions; ingest more often"
    return Quarantined(entity.universe, ENTITY_CHANGES.name, source, start, end, "missing", detail)


def row_of(entity: EntityRow | EntityKey, change: Change) -> dict[str, object]:
    """A change as a row of `entity_changes`, with its time in milliseconds."""
    return {
        "universe": entity.universe,
        "kind": entity.kind,
        "id": entity.id,
        "version": change.version,
        "changed_at": change.at_ms,
        "durability": change.durability.value,
        "fields": _json(change.fields),
        "removed": list(change.removed),
        "deleted": change.deleted,
    }


def _json(fields: Fields) -> str | None:
    return codec.payload_of({name: cbor2.loads(value) for name, value in fields.items()})
