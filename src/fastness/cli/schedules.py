"""`fastness queue schedule`: messages that are put on a cron schedule."""

from typing import Any

import click

from fastness.cli import completion, connect, printing, values
from fastness.cli.commands import CommandGroup
from fastness.cli.existing import open_queue
from fastness.cli.field_options import field_options, given
from fastness.cli.message_bodies import read_message
from fastness.errors import NotFound
from fastness.wire.queues import NewMessage, Schedule

schedule = CommandGroup(
    "schedule",
    help="Put messages at the times of cron expressions.",
    completions={"name": completion.queues, "schedule_name": completion.schedules},
)


@schedule.command(
    examples=["fastness queue schedule add jobs nightly '0 3 * * *' '{\"report\": true}' --timezone Europe/Berlin"]
)
@click.argument("name", metavar="QUEUE")
@click.argument("schedule_name", metavar="NAME")
@click.argument("cron")
@click.argument("body", required=False)
@click.option("--file", metavar="PATH", help="Read the body from a file; - is standard input.")
@click.option("--timezone", default="UTC", show_default=True, help="The time zone of CRON.")
@field_options(NewMessage)
def add(
    *,
    name: str,
    schedule_name: str,
    cron: str,
    body: str | None,
    file: str | None,
    timezone: str,
    **options: Any,
) -> None:
    """Put BODY at the times of CRON. Replaces a schedule of the same NAME."""
    with values.open_input(body, file) as stream, connect.open_plane(create=True) as plane:
        message = read_message(plane, stream, given(options))
        found = plane.queue(name).schedule(
            schedule_name, cron, message.payload, timezone=timezone, **_options_of(message)
        )
    printing.record(_fields(found))


@schedule.command("list")
@click.argument("name", metavar="QUEUE")
def list_(name: str) -> None:
    """List the schedules of a queue, with their next times."""
    with open_queue(name) as queue:
        found = queue.schedules()
    printing.rows([_fields(each) for each in found], ("name", "cron", "timezone", "next_at"), empty="No schedules.")


@schedule.command()
@click.argument("name", metavar="QUEUE")
@click.argument("schedule_name", metavar="NAME")
def delete(name: str, schedule_name: str) -> None:
    """Delete a schedule."""
    with connect.open_plane() as plane:
        if not plane.queue(name).unschedule(schedule_name):
            raise NotFound(
                f"Queue {name} has no schedule {schedule_name}; list them with: fastness queue schedule list {name}"
            )
    printing.result(f"Deleted schedule {schedule_name}", {"queue": name, "deleted": schedule_name})


def _options_of(message: NewMessage) -> dict[str, Any]:
    return {name: getattr(message, name) for name in message.__struct_fields__ if name != "payload"}


def _fields(found: Schedule) -> dict[str, Any]:
    return {
        "name": found.name,
        "cron": found.cron,
        "timezone": found.timezone,
        "next_at": printing.timestamp(found.next_ms),
        **printing.payload(found.message.payload, found.message.content_type),
    }
