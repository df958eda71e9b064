"""`fastness queue schedule`: messages that are put on a cron schedule."""

from typing import Any

import click

from fastness.cli import completion, connect, printing, values
from fastness.cli.commands import CommandGroup
from fastness.cli.field_options import field_options, given
from fastness.cli.message_bodies import read_message
from fastness.cli.operations import operation
from fastness.wire.queues import ListSchedules, NewMessage, RemoveSchedule, Schedule, SetSchedule

schedule = CommandGroup(
    "schedule",
    help="Put messages at the times of cron expressions.",
    completions={"queue": completion.queues, "name": completion.schedules},
)


@schedule.command(
    examples=["fastness queue schedule add jobs nightly '0 3 * * *' '{\"report\": true}' --timezone Europe/Berlin"]
)
@click.argument("queue")
@click.argument("name")
@click.argument("cron")
@click.argument("body", required=False)
@click.option("--file", metavar="PATH", help="Read the body from a file; - is standard input.")
@click.option("--timezone", default="UTC", show_default=True, help="The time zone of CRON.")
@field_options(NewMessage)
def add(
    *,
    queue: str,
    name: str,
    cron: str,
    body: str | None,
    file: str | None,
    timezone: str,
    **options: Any,
) -> None:
    """Put BODY at the times of CRON. Replaces a schedule of the same NAME."""
    with values.open_input(body, file) as stream, connect.open_plane(create=True) as plane:
        message = read_message(plane, stream, given(options))
        request = SetSchedule(queue, name, cron, message, timezone, plane.universe)
        found = plane._transport.call(request)
    printing.record(_fields(found))


def _fields(found: Schedule) -> dict[str, Any]:
    message = printing.payload(found.message.payload, found.message.content_type)
    return {**printing.fields(found, without=("message",)), **message}


operation(schedule, "list", ListSchedules, columns=("name", "cron", "timezone", "next_at"), show=_fields)
operation(
    schedule,
    "delete",
    RemoveSchedule,
    "Deleted schedule {name}",
    show=lambda _: {"deleted": True},
    missing="Queue {queue} has no schedule {name}; list them with: fastness queue schedule list {queue}",
)
