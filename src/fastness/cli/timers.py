"""`fastness timer`: the times at which worlds want an item."""

from typing import Any, Final

import click

from fastness.cli import completion, connect, printing
from fastness.cli.commands import CommandGroup
from fastness.cli.existing import check_world
from fastness.limits import READ_ENTRIES_MAX
from fastness.wire.timers import TimerInfo

_COLUMNS: Final = ("due_at", "world", "timer_id", "height")


timer = CommandGroup(completions={"world": completion.worlds})


@timer.command("list")
@click.argument("world", required=False)
@click.option("--after", default="", help="Start after the page that ended with this `next`.")
@click.option("--limit", type=click.IntRange(1, READ_ENTRIES_MAX), default=1_000, help="The maximum number of results.")
def list_(world: str | None, after: str, limit: int) -> None:
    """List the timers that have not fired.

    Lists those of WORLD, or of all worlds.
    """
    with connect.open_plane() as plane:
        check_world(plane, world)
        found = plane.timers.list(world, after=after, limit=limit).timers
    printing.rows([_fields(each) for each in found], _COLUMNS, empty="No timers.")


def _fields(timer: TimerInfo) -> dict[str, Any]:
    due_at = printing.timestamp(timer.deliver_at_ms)
    return printing.fields(timer, "deliver_at_ms", "payload", due_at=due_at, **printing.payload(timer.payload))
