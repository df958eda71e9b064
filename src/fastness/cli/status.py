"""`fastness status` and `fastness mark-restored`: the identity of a plane, and a new lineage for a copy."""

from typing import Any

import click

from fastness.cli import connect, printing
from fastness.cli.commands import LeafCommand
from fastness.wire.planes import PlaneStatus


@click.command(cls=LeafCommand, examples=["fastness status", "fastness --url dir:./data status --json"])
def status() -> None:
    """The id never changes. Every restore begins another lineage, with the one before as its parent."""
    with connect.open_plane() as plane:
        found = plane.status()
    printing.result("\n".join(_lines(found)), identity_fields(found))


@click.command(
    "mark-restored",
    cls=LeafCommand,
    examples=[
        "fastness --url postgresql://me@db/plane mark-restored",
        "fastness --url dir:./copy mark-restored",
    ],
)
def mark_restored() -> None:
    """`fastness restore` and `doctor --salvage` do this themselves. After pg_restore, or in a copied directory that is
    used beside its original, run this before anything else writes.
    """
    with connect.open_plane() as plane:
        found = plane.mark_restored()
    printing.result("\n".join(_lines(found)), identity_fields(found))


def identity_fields(found: PlaneStatus) -> dict[str, Any]:
    """The fields of a status, for --json."""
    parents = [{"lineage": each.lineage, "until": printing.timestamp(each.until_ms)} for each in found.parents]
    return {**printing.fields(found, since_ms="since"), "parents": parents}


def _lines(found: PlaneStatus) -> list[str]:
    return [
        f"version  {found.version} (data format {found.data_format})",
        f"plane    {found.plane}",
        f"lineage  {found.lineage}, {found.cause} at {printing.timestamp(found.since_ms)}",
        *(f"parent   {parent.lineage}, shared up to {printing.timestamp(parent.until_ms)}" for parent in found.parents),
    ]
