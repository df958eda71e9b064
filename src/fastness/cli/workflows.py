"""`fastness workflow`: runs of workflows."""

from typing import Any, Final

import click
import msgspec

from fastness.cli import completion, connect, printing, values
from fastness.cli.commands import CommandGroup, wants_json
from fastness.cli.durations import WAIT
from fastness.cli.operations import operation
from fastness.cli.results import print_value, wait_for_result
from fastness.errors import InvalidArgument, InvalidValue
from fastness.wire.hosting import HostingInfo, summary_of
from fastness.wire.run_timeline import TimelineEvent
from fastness.wire.run_values import decode_value
from fastness.wire.runs import RUN_PREFIX, RUNNING, CancelRun, DeleteRun, ListRuns, RunInfo
from fastness.wire.timers import TimerInfo

_TIMELINE_COLUMNS: Final = ("at", "kind", "name", "duration", "details")
_DETAIL_CHARACTERS: Final = 200  # Of the details of an event in a table; JSON output has all of them.


def _fields(found: RunInfo) -> dict[str, Any]:
    hidden = ("result", "published", "is_duplicate", "result_blob", "is_cancelling", "incarnation")
    is_cancelling = found.is_cancelling and found.state == RUNNING
    return printing.fields(found, without=hidden) | ({"state": "cancelling"} if is_cancelling else {})


workflow = CommandGroup(completions={"id": completion.runs, "workflow": completion.workflows})


@workflow.command(
    examples=[
        "fastness workflow start research 'What is a durable queue?' --id r-17",
        "fastness workflow start order 4711 --kwarg customer=ada --kwarg express:=true",
    ]
)
@click.argument("workflow", metavar="NAME")
@click.argument("arguments", metavar="[ARG]…", nargs=-1)
@click.option("--id", help="The id of the run: a repeat with the same id starts nothing.  [default: a new one]")
@click.option(
    "--kwarg", "keywords", multiple=True, metavar="NAME=TEXT", help="A keyword argument; NAME:=JSON for JSON."
)
def start(workflow: str, arguments: tuple[str, ...], id: str | None, keywords: tuple[str, ...]) -> None:
    """Start a run of the workflow NAME, and print its id.

    An ARG that is JSON is passed as its value, and any other one as text. For the text 5, give '"5"'.
    """
    args = [_argument(each) for each in arguments]
    kwargs = dict(values.parse_field(each) for each in keywords)
    if "id" in kwargs:
        raise InvalidArgument("id is the id of the run; pass an argument of this name by its position")
    with connect.open_plane(create=True) as plane:
        run = plane.workflows.start(workflow, *args, id=id, **kwargs)
    fields = {"id": run.id, "workflow": workflow, "is_duplicate": run.is_duplicate}
    printing.result(run.id, fields)
    if run.is_duplicate and not wants_json():
        click.echo(f"Run {run.id} had been started before.", err=True)


@workflow.command(
    examples=["fastness workflow signal r-17 approval true", "fastness workflow signal r-17 edit '{\"page\": 3}'"]
)
@click.argument("id")
@click.argument("name")
@click.argument("value", metavar="[VALUE]", required=False)
def signal(id: str, name: str, value: str | None) -> None:
    """Send the signal NAME to a run. VALUE is JSON, or text; without it, the signal has no value."""
    with connect.open_plane() as plane:
        plane.workflows.signal(id, name, None if value is None else _argument(value))
    printing.result(f"Sent {name} to {id}", {"id": id, "signal": name})


@workflow.command(examples=["fastness workflow result r-17 --wait 30", "fastness workflow result r-17 --wait forever"])
@click.argument("id")
@click.option("--wait", type=WAIT, default=0.0, help="How long to wait for the end, or `forever`.  [default: 0]")
def result(id: str, wait: float) -> None:
    """Print the result of a run: JSON, or bytes as they are.

    Exit code 7 means that the run has not ended yet, and 5 that it failed or was cancelled.
    """
    value = wait_for_result(lambda plane, seconds: plane.workflows.result(id, wait_seconds=seconds), wait)
    if wants_json():
        printing.record({"id": id, "result": printing.jsonable(value)})
    else:
        print_value(value)


operation(
    workflow,
    "list",
    ListRuns,
    columns=("id", "workflow", "state", "started_at", "ended_at", "error"),
    show=_fields,
    examples=["fastness workflow list --state failed --workflow research"],
)


@workflow.command()
@click.argument("id")
def show(id: str) -> None:
    """Show a run: its state, timeline, timers and error."""
    with connect.open_plane() as plane:
        found = plane.workflows.describe(id)
        events = plane.workflows.history(id)
        timers = plane.workflows.timers(id)
        hosting = plane.world(RUN_PREFIX + id).hosting()
    fields = {**_fields(found), **_values(found), **_hosting_fields(hosting)}
    if wants_json():
        printing.record(
            {
                **fields,
                "timeline": [printing.jsonable(msgspec.structs.asdict(each)) for each in events],
                "timers": [_timer_fields(each) for each in timers],
                "turn_traceback": hosting.error,
            }
        )
        return
    printing.record(fields)
    click.echo()
    printing.rows([_event_row(each) for each in events], _TIMELINE_COLUMNS, empty="Nothing has happened yet.")
    tracebacks = [
        (f"{each.kind} {each.name}, at {printing.timestamp(each.at_ms)}", each.details["traceback"])
        for each in events
        if "traceback" in each.details
    ]
    if hosting.error is not None:
        tracebacks.append(("the last turn, which failed", hosting.error))
    for title, traceback in tracebacks:
        click.echo(printing.escape_control(f"\n{title}:\n{traceback.rstrip()}"))
    if timers:
        click.echo()
        printing.rows([_timer_fields(each) for each in timers], ("timer", "due_at"))


@workflow.command()
@click.argument("id")
def query(id: str) -> None:
    """Print what a run has published with `run.state`."""
    with connect.open_plane() as plane:
        found = plane.workflows.query(id)
    if wants_json():
        printing.record({"id": id, "published": printing.jsonable(found)})
    else:
        click.echo(printing.escape_control(printing.compact(found)))


operation(
    workflow,
    "cancel",
    CancelRun,
    text=lambda run: f"Cancelling {run['id']}" if run["ended_at"] is None else f"Run {run['id']} is {run['state']}",
    show=_fields,
    examples=["fastness workflow cancel r-17 --reason 'not needed any more'"],
)
operation(
    workflow,
    "delete",
    DeleteRun,
    "Deleted {id}",
    show=lambda _: {"deleted": True},
    confirm="Delete run {id} with its history?",
)


def _argument(text: str) -> Any:
    """The value of a JSON text; any other text itself."""
    try:
        return values.parse_json(text)
    except InvalidValue:
        return text


def _values(found: RunInfo) -> dict[str, Any]:
    """The result and what was published, as far as there are any."""
    given = {"result": found.result, "published": found.published}
    shown = {name: printing.jsonable(decode_value(data)) for name, data in given.items() if data is not None}
    return shown if found.result_blob is None else {**shown, "result_blob": found.result_blob}


def _hosting_fields(hosting: HostingInfo) -> dict[str, Any]:
    """Which host has the run, and why it does not go on, if it does not."""
    fields: dict[str, Any] = {"host": hosting.owner}
    if hosting.error is not None:
        fields["failed_turns"] = hosting.attempts
        if not hosting.is_stopped:  # Else it is the error of the run.
            fields["turn_error"] = summary_of(hosting.error)
    return fields


def _event_row(event: TimelineEvent) -> dict[str, Any]:
    duration = "pending" if event.is_pending else None
    if event.duration_ms is not None:
        duration = f"{event.duration_ms / 1_000:.3f} s"
    details = {name: value for name, value in event.details.items() if name != "traceback"}
    shown = printing.compact(details) if details else ""
    if len(shown) > _DETAIL_CHARACTERS:
        shown = f"{shown[: _DETAIL_CHARACTERS - 1]}…"
    return {
        "at": printing.timestamp(event.at_ms),
        "kind": event.kind,
        "name": event.name,
        "duration": duration,
        "details": shown,
    }


def _timer_fields(timer: TimerInfo) -> dict[str, Any]:
    return {"timer": timer.timer_id, "due_at": printing.timestamp(timer.deliver_at_ms)}
