"""`fastness entity`: versioned records whose fields have durability tiers."""

from typing import Any, Final

import click

from fastness.cli import connect, printing, values
from fastness.cli.commands import CommandGroup
from fastness.cli.field_options import limit_option
from fastness.errors import NotFound
from fastness.handles.sync.entities import Entity

_HISTORY_COLUMNS: Final = ("version", "at", "durability", "fields", "removed", "deleted")


entity = CommandGroup()


_best_effort = click.option(
    "--best-effort", is_flag=True, help="Include the newest BEST_EFFORT fields, which are in the session logs."
)


@entity.command()
@click.argument("kind")
@click.argument("id")
@_best_effort
def get(kind: str, id: str, *, best_effort: bool) -> None:
    """Show an entity. Exit code 4 means that it does not exist."""
    with connect.open_plane() as plane:
        found = plane.entities.get(kind, id, best_effort=best_effort)
    if found is None:
        raise _not_found(kind, id)
    printing.record(_fields(found))


@entity.command(
    "set",
    examples=[
        "fastness entity set task t-1 status=done tries:=3",
        "fastness entity set task t-1 status=open --if-version 4      # replaces all fields",
    ],
)
@click.argument("kind")
@click.argument("id")
@click.argument("fields", metavar="NAME=TEXT|NAME:=JSON…", nargs=-1)
@click.option("--remove", multiple=True, metavar="NAME", help="Remove a field. Repeatable.")
@click.option("--if-version", type=int, help="Replace the whole entity if it has this version; 0 if it must not exist.")
@click.option("--session", help="The session log that receives BEST_EFFORT fields.")
def set_(
    *, kind: str, id: str, fields: tuple[str, ...], remove: tuple[str, ...], if_version: int | None, session: str | None
) -> None:
    """Set fields, each with the durability of its tier. Other fields keep their values."""
    values_by_name = dict(map(values.parse_field, fields))
    with connect.open_plane(create=True) as plane:
        if if_version is not None:
            written = plane.entities.put_if_version(
                kind, id, values_by_name, expected_version=if_version, session=session
            )
            version, durability = written.versions[0], written.durability
        else:
            with plane.entities.transaction(session=session) as tx:
                for name, value in values_by_name.items():
                    tx.write(kind, id, name, value)
                for name in remove:
                    tx.remove(kind, id, name)
                result = tx.commit()
            if result is None:
                raise click.UsageError("Nothing to set; give fields as NAME=TEXT or NAME:=JSON")
            version, durability = result.versions[0], result.durability
    text = f"{kind} {id} has version {version} ({durability})"
    printing.result(text, {"kind": kind, "id": id, "version": version, "durability": durability})


@entity.command()
@click.argument("kind")
@click.option("--after", default="", help="Start after this id.")
@limit_option("--limit", 100)
@_best_effort
def scan(kind: str, after: str, limit: int, *, best_effort: bool) -> None:
    """List the entities of a kind, ordered by id."""
    with connect.open_plane() as plane:
        found = plane.entities.scan(kind, after=after, limit=limit, best_effort=best_effort)
    printing.rows([_fields(each) for each in found], ("id", "version", "updated_at", "fields"))


@entity.command()
@click.argument("kind")
@click.argument("id")
@click.option("--after", type=int, default=0, help="Start after this version.")
@limit_option("--limit", 100)
def history(kind: str, id: str, after: int, limit: int) -> None:
    """Show the changes of an entity, one row per version."""
    with connect.open_plane() as plane:
        found = plane.entities.history(kind, id, after=after, limit=limit)
        if not found and not after and plane.entities.get(kind, id) is None:
            raise _not_found(kind, id)
    rows = [{**printing.fields(each), "fields": printing.jsonable(each.fields)} for each in found]
    printing.rows(rows, _HISTORY_COLUMNS, empty="No changes.")


@entity.command()
@click.argument("kind")
@click.argument("id")
@click.option("--if-version", type=int, help="Delete only if the entity has this version.")
def delete(kind: str, id: str, if_version: int | None) -> None:
    """Delete an entity but keep its history. Exit code 4 means that it does not exist."""
    with connect.open_plane() as plane:
        if not plane.entities.delete(kind, id, expected_version=if_version):
            raise _not_found(kind, id)
    printing.result(f"Deleted {kind} {id}", {"kind": kind, "id": id, "deleted": True})


def _not_found(kind: str, id: str) -> NotFound:
    return NotFound(f"{kind} {id} does not exist")


def _fields(found: Entity) -> dict[str, Any]:
    shown = {**printing.fields(found, without=("best_effort",)), "fields": printing.jsonable(found.fields)}
    if found.best_effort:
        shown["best_effort"] = {field: printing.timestamp(at_ms) for field, at_ms in found.best_effort.items()}
    return shown
