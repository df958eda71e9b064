"""Changes of entities into `entity_changes`. The driver writes them: they are in the key space, which it alone reads.

    mark entity/<universe>/<kind>/<id>   the last version that was taken

Only the latest versions of an entity are kept (ENTITY_HISTORY_VERSIONS). Those that were gone before anybody ingested
them are a row of the quarantine.
"""

from collections.abc import Iterator

import cbor2
import msgspec
import pyarrow as pa

from holdfast.layers import entities
from holdfast.layers.entities import EntityKey
from holdfast.limits import INGEST_CHANGES, PAGE_ITEMS
from holdfast.pipeline import codec
from holdfast.pipeline.intake.quarantines import REWOUND, Quarantined, Scope
from holdfast.pipeline.intake.runs import Run
from holdfast.pipeline.lake import LakeTable, Move, files
from holdfast.pipeline.schemas import ENTITY_CHANGES
from holdfast.pipeline.views.rows import EntityRow
from holdfast.wire.entities import Change, Fields


class Batch(msgspec.Struct):
    """What one commit takes in."""

    rows: list[dict[str, object]] = []
    moves: dict[str, Move] = {}
    found: list[Quarantined] = []
    scopes: list[Scope] = []


def take_in(run: Run) -> None:
    """Bring every entity's changes in the lake to where the view has them."""
    run.until_done("the changes of entities", lambda: _pass(run))


def mark(universe: str, kind: str, id: str) -> str:
    return f"entity/{universe}/{kind}/{id}"


def _pass(run: Run) -> None:
    table = run.table(ENTITY_CHANGES)
    for batch in _batches(run, table):
        run.quarantine.add(batch.found)
        if batch.moves:
            _commit(table, batch)
            run.committed(ENTITY_CHANGES, len(batch.rows))
        run.quarantine.settle(batch.scopes, batch.found)


def _commit(table: LakeTable, batch: Batch) -> None:
    rows = pa.Table.from_pylist(batch.rows, ENTITY_CHANGES.schema)
    table.append(files.write(ENTITY_CHANGES, table.place, files.in_order(ENTITY_CHANGES, rows)), batch.moves)


def _batches(run: Run, table: LakeTable) -> Iterator[Batch]:
    suspects = run.quarantine.rewound()
    batch = Batch()
    for universe in run.view.universes():
        for entity in run.view.entities(universe):
            taken = table.mark(mark(universe, entity.kind, entity.id))
            is_suspect = (universe, ENTITY_CHANGES.name, f"{entity.kind}/{entity.id}") in suspects
            if entity.version != taken or is_suspect:
                _add(run, batch, entity, taken)
            if len(batch.rows) >= INGEST_CHANGES:
                yield batch
                batch = Batch()
    yield batch


def _add(run: Run, batch: Batch, entity: EntityRow, taken: int) -> None:
    source = f"{entity.kind}/{entity.id}"
    batch.scopes.append(Scope(entity.universe, ENTITY_CHANGES.name, source, taken + 1))
    if entity.version < taken:
        detail = f"the plane has version {entity.version} and the lake {taken}: it was restored from an older backup"
        batch.found.append(
            Quarantined(entity.universe, ENTITY_CHANGES.name, source, entity.version + 1, taken, REWOUND, detail)
        )
        return
    if entity.version == taken:
        return
    following = taken + 1
    for change in _history(run, entity, taken):
        if change.version > following:
            batch.found.append(_gone(entity, source, following, change.version - 1))
        batch.rows.append(_row(entity, change))
        following = change.version + 1
    if following <= entity.version:
        batch.found.append(_gone(entity, source, following, entity.version))
    batch.moves[mark(entity.universe, entity.kind, entity.id)] = Move(taken, entity.version)


def _history(run: Run, entity: EntityRow, taken: int) -> Iterator[Change]:
    """The changes behind `taken` up to the version that the view has of the entity."""
    key = EntityKey(entity.universe, entity.kind, entity.id)
    while page := run.view.database.read(entities.history, key, after=taken, limit=PAGE_ITEMS):
        for change in page:
            if change.version > entity.version:  # PostgreSQL goes on meanwhile; the next run has it.
                return
            yield change
        taken = page[-1].version


def _gone(entity: EntityRow, source: str, start: int, end: int) -> Quarantined:
    detail = "the history of the entity does not have them any more; ingest more often"
    return Quarantined(entity.universe, ENTITY_CHANGES.name, source, start, end, "missing", detail)


def _row(entity: EntityRow, change: Change) -> dict[str, object]:
    return {
        "universe": entity.universe,
        "kind": entity.kind,
        "id": entity.id,
        "version": change.version,
        "at": change.at_ms,
        "durability": change.durability.value,
        "fields": _json(change.fields),
        "removed": list(change.removed),
        "deleted": change.deleted,
    }


def _json(fields: Fields) -> str | None:
    return codec.payload_of({name: cbor2.loads(value) for name, value in fields.items()})
