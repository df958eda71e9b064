"""`holdfast queue schedule`: messages that are put again and again."""

from typing import Any

import click

from holdfast.cli import connect, printing, values
from holdfast.cli.commands import Noun
from holdfast.cli.messages import message_of, message_options
from holdfast.errors import NotFound
from holdfast.wire.queues import Schedule


@click.group(cls=Noun)
def schedule() -> None:
    """Messages that are put at the times that a cron expression names."""


@schedule.command(
    examples=["holdfast queue schedule add jobs nightly '0 3 * * *' '{\"report\": true}' --timezone Europe/Berlin"]
)
@click.argument("name", metavar="QUEUE")
@click.argument("schedule_name", metavar="NAME")
@click.argument("cron")
@click.argument("body", required=False)
@click.option("--file", metavar="PATH", help="Take the body from a file; - is standard input.")
@click.option("--timezone", default="UTC", show_default=True, help="Whose clock is meant.")
@message_options
def add(
    *, name: str, schedule_name: str, cron: str, body: str | None, file: str | None, timezone: str, **options: Any
) -> None:
    """Put BODY whenever CRON strikes, in place of a schedule of the same NAME."""
    with values.source(body, file) as stream, connect.opened() as plane:
        message = message_of(plane, stream, options)
        found = plane.queue(name).schedule(
            schedule_name, cron, message.payload, timezone=timezone, **_options_of(message)
        )
    printing.record(_fields(found))


@schedule.command("list")
@click.argument("name", metavar="QUEUE")
def list_(name: str) -> None:
    """The schedules of a queue, and when each strikes next."""
    with connect.opened() as plane:
        found = plane.queue(name).schedules()
    printing.rows(
        [_fields(each) for each in found], ("name", "cron", "timezone", "next_at"), nothing="There is no schedule."
    )


@schedule.command()
@click.argument("name", metavar="QUEUE")
@click.argument("schedule_name", metavar="NAME")
def remove(name: str, schedule_name: str) -> None:
    """Remove a schedule."""
    with connect.opened() as plane:
        if not plane.queue(name).unschedule(schedule_name):
            raise NotFound(f"{name} has no schedule {schedule_name}; holdfast queue schedule list {name} shows them")
    printing.done(f"{schedule_name} is removed", {"queue": name, "removed": schedule_name})


def _options_of(message: Any) -> dict[str, Any]:
    return {name: getattr(message, name) for name in message.__struct_fields__ if name != "payload"}


def _fields(found: Schedule) -> dict[str, Any]:
    return {
        "name": found.name,
        "cron": found.cron,
        "timezone": found.timezone,
        "next_at": printing.moment(found.next_ms),
        **printing.payload(found.message.payload, found.message.content_type),
    }
