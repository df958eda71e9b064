"""`holdfast entity`: records whose fields have tiers."""

from typing import Any, Final

import click
import msgspec

from holdfast.cli import connect, printing, values
from holdfast.cli.commands import Noun
from holdfast.errors import NotFound
from holdfast.handles.sync.entities import Entity
from holdfast.limits import READ_ENTRIES_MAX

_CHANGES: Final = ("version", "at", "durability", "fields", "removed", "deleted")


@click.group(cls=Noun)
def entity() -> None:
    """Records with versions, each field as durable as it needs to be."""


@entity.command()
@click.argument("kind")
@click.argument("id")
def get(kind: str, id: str) -> None:
    """An entity; exit code 4 says that there is none."""
    with connect.opened() as plane:
        found = plane.entities.get(kind, id)
    if found is None:
        raise NotFound(f"There is no {kind} {id}")
    printing.record(_fields(found))


@entity.command(
    "set",
    examples=[
        "holdfast entity set task t-1 status=done tries:=3",
        "holdfast entity set task t-1 status=open --if-version 4      # replaces all fields",
    ],
)
@click.argument("kind")
@click.argument("id")
@click.argument("fields", metavar="NAME=TEXT|NAME:=JSON…", nargs=-1)
@click.option("--remove", multiple=True, metavar="NAME", help="Remove a field; repeatable.")
@click.option("--if-version", type=int, help="Replace the whole entity, if it has this version; 0: if there is none.")
@click.option("--session", help="The session log for BEST_EFFORT fields.")
def set_(
    *, kind: str, id: str, fields: tuple[str, ...], remove: tuple[str, ...], if_version: int | None, session: str | None
) -> None:
    """Set fields, each by its tier, and leave the others as they are."""
    wanted = dict(map(values.field, fields))
    with connect.opened() as plane:
        if if_version is not None:
            written = plane.entities.put_if_version(kind, id, wanted, expected_version=if_version, session=session)
            version, durability = written.versions[0], written.durability
        else:
            with plane.entities.transaction(session=session) as tx:
                for name, value in wanted.items():
                    tx.write(kind, id, name, value)
                for name in remove:
                    tx.remove(kind, id, name)
                result = tx.commit()
            if result is None:
                raise click.UsageError("There is nothing to set; give fields as NAME=TEXT or NAME:=JSON")
            version, durability = result.versions[0], result.durability
    said = f"{kind} {id} has version {version}, {durability}"
    printing.done(said, {"kind": kind, "id": id, "version": version, "durability": durability})


@entity.command()
@click.argument("kind")
@click.option("--after", default="", help="Begin behind this id.")
@click.option(
    "--limit", type=click.IntRange(1, READ_ENTRIES_MAX), default=100, show_default=True, help="At most so many."
)
def scan(kind: str, after: str, limit: int) -> None:
    """Entities of a kind, in the order of their ids."""
    with connect.opened() as plane:
        found = plane.entities.scan(kind, after=after, limit=limit)
    printing.rows([_fields(each) for each in found], ("id", "version", "updated_at", "fields"))


@entity.command()
@click.argument("kind")
@click.argument("id")
@click.option("--after", type=int, default=0, help="Begin behind this version.")
@click.option(
    "--limit", type=click.IntRange(1, READ_ENTRIES_MAX), default=100, show_default=True, help="At most so many."
)
def history(kind: str, id: str, after: int, limit: int) -> None:
    """What changed in an entity, version by version."""
    with connect.opened() as plane:
        found = plane.entities.history(kind, id, after=after, limit=limit)
    rows = [
        {
            "version": each.version,
            "at": printing.moment(each.at_ms),
            "durability": each.durability,
            "fields": printing.jsonable(each.fields),
            "removed": each.removed,
            "deleted": each.deleted,
        }
        for each in found
    ]
    printing.rows(rows, _CHANGES)


@entity.command()
@click.argument("kind")
@click.argument("id")
@click.option("--if-version", type=int, help="Only if it has this version.")
def delete(kind: str, id: str, if_version: int | None) -> None:
    """Delete an entity; its history stays. Exit code 4 says that there was none."""
    with connect.opened() as plane:
        if not plane.entities.delete(kind, id, expected_version=if_version):
            raise NotFound(f"There is no {kind} {id}")
    printing.done(f"{kind} {id} is deleted", {"kind": kind, "id": id, "deleted": True})


def _fields(found: Entity) -> dict[str, Any]:
    about = msgspec.structs.asdict(found)
    return {
        "kind": about["kind"],
        "id": about["id"],
        "version": about["version"],
        "fields": printing.jsonable(found.fields),
        "created_at": printing.moment(found.created_ms),
        "updated_at": printing.moment(found.updated_ms),
    }
