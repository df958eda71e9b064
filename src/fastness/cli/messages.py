"""`fastness message`: search for messages; show, cancel, change, move and delete them; and read their results."""

import base64
from collections.abc import Iterator, Sequence
from typing import Any, Final, get_args

import cbor2
import click

from fastness.cli import completion, connect, printing, values
from fastness.cli.commands import CommandGroup, wants_json
from fastness.cli.durations import SECONDS, WAIT
from fastness.cli.existing import open_queue
from fastness.cli.field_options import limit_option
from fastness.cli.operations import operation
from fastness.cli.results import print_value, wait_for_result
from fastness.errors import MessageNotFound, rebuild
from fastness.limits import MESSAGES_MAX, SEARCH_LIST_MAX
from fastness.wire.queues import Failure, FoundMessage, MessageInfo, MessageState, Outcome, UpdateMessage

_FOUND_COLUMNS: Final = ("id", "state", "created_at", "attempts", "owner", "key", "last_error")
_CANCEL_COLUMNS: Final = ("id", "state", "attempts", "finished_at")


message = CommandGroup(completions=dict.fromkeys(("name", "queue", "to"), completion.queues))


@message.command(examples=["fastness message show jobs 0198f…", "fastness message show jobs 0198f… --json | jq .state"])
@click.argument("name", metavar="QUEUE")
@click.argument("id")
def show(name: str, id: str) -> None:
    """Show the state, times, payload and failures of a message.

    A message that is done is found only if it was put with --keep-result or acknowledged with a result.
    """
    with connect.open_plane() as plane:
        found = plane.queue(name).get(id)
    fields = {"queue": name, **message_fields(found)}
    if wants_json():
        printing.record(fields)
        return
    if found.payload is not None:
        fields["payload"] = printing.excerpt(found.payload, found.size, characters=1_000)
    del fields["failures"]
    printing.record({field: value for field, value in fields.items() if value not in (None, "", {}, False)})
    print_failures(found.id, found.failures)


@message.command(examples=["fastness message cancel jobs 0198f… 0198f…"])
@click.argument("name", metavar="QUEUE")
@click.argument("ids", metavar="ID…", nargs=-1, required=True)
def cancel(name: str, ids: tuple[str, ...]) -> None:
    """Cancel messages, so that they are not delivered. Repeating this is safe.

    If a message is leased, its consumer is told to stop and cannot acknowledge it. A message that is done or dead stays
    as it is; the output shows its state. Exit code 4 means that one of them was not found; the others are cancelled.
    """
    found: list[MessageInfo] = []
    missing: list[MessageNotFound] = []
    with connect.open_plane() as plane:
        for id in ids:
            try:
                found.append(plane.queue(name).cancel(id))
            except MessageNotFound as error:
                missing.append(error)
    if found:
        printing.rows([{"queue": name, **message_fields(each)} for each in found], _CANCEL_COLUMNS)
    if missing:
        raise missing[0]


@message.command(
    examples=[
        "fastness message search jobs --state dead --error Timeout --older-than 1h",
        "fastness message search jobs --state leased --owner worker-7 --json | jq -r '.[].id'",
    ]
)
@click.argument("name", metavar="QUEUE")
@click.option(
    "--state",
    "states",
    multiple=True,
    type=click.Choice(get_args(MessageState)),
    help="Find messages in this state. Repeat it for several; without it, all states.",
)
@click.option("--key", help="Find messages with this key.")
@click.option("--group", help="Find messages of this group.")
@click.option("--owner", help="Find messages that this consumer has leased.")
@click.option("--error", help="Find messages whose last error has this text, in upper or lower case.")
@click.option("--tag", help="Find messages that have this tag.")
@click.option("--older-than", type=SECONDS, help="Find messages that were put at least this long ago.")
@click.option("--newer-than", type=SECONDS, help="Find messages that were put less than this time ago.")
@limit_option("-n", 100, field="count")
def search(
    *,
    name: str,
    states: tuple[MessageState, ...],
    key: str | None,
    group: str | None,
    owner: str | None,
    error: str | None,
    tag: str | None,
    older_than: float | None,
    newer_than: float | None,
    count: int,
) -> None:
    """Search a queue and its dead letters for messages.

    Finds those that match all options.

    There is no index: the search reads the queue from its beginning until it has found enough. Messages that are done
    or cancelled are found for as long as something is kept about them.
    """
    found: list[FoundMessage] = []
    scanned, after = 0, ""
    with open_queue(name) as queue:
        while True:
            page = queue.search(
                states=states,
                key=key,
                group=group,
                owner=owner,
                error=error,
                tag=tag,
                older_than_seconds=older_than,
                newer_than_seconds=newer_than,
                after=after,
                limit=min(count - len(found), SEARCH_LIST_MAX),
            )
            found += page.messages
            scanned += page.scanned
            if page.next is None or len(found) == count:
                break
            after = page.next
    printing.rows([printing.fields(each) for each in found], _FOUND_COLUMNS, empty="No messages match.")
    if not wants_json():
        more = "; there may be more, use -n to list more" if page.next is not None else ""
        click.echo(f"Searched {scanned:,} {'record' if scanned == 1 else 'records'}{more}.", err=True)


@message.command(examples=["fastness message move jobs 0198f… 0198f… --to jobs-slow"])
@click.argument("name", metavar="QUEUE")
@click.argument("ids", metavar="ID…", nargs=-1, required=True)
@click.option("--to", required=True, metavar="QUEUE", help="The queue that gets the messages.")
def move(name: str, ids: tuple[str, ...], to: str) -> None:
    """Move messages, or dead letters, to another queue. They must not be leased.

    They keep their ids, payloads, attributes, failed attempts, workflow states and delays. Dead letters are delivered
    again, with no failures counted. A message that cannot be moved stays, and sets the exit code.
    """
    with connect.open_plane() as plane:
        outcomes = [each for some in _batches(ids) for each in plane.queue(name).move(some, to=to)]
    _print_outcomes(name, ids, outcomes, f"moved to {to}")


@message.command(examples=["fastness message delete jobs 0198f… --yes"])
@click.argument("name", metavar="QUEUE")
@click.argument("ids", metavar="ID…", nargs=-1, required=True)
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
def delete(name: str, ids: tuple[str, ...], yes: bool) -> None:
    """Permanently delete messages, or dead letters. They must not be leased.

    Nothing of them is kept. A message that cannot be deleted stays, and sets the exit code.
    """
    noun = "message" if len(ids) == 1 else "messages"
    values.confirm(f"Permanently delete {len(ids):,} {noun} of {name}?", yes=yes)
    with connect.open_plane() as plane:
        outcomes = [each for some in _batches(ids) for each in plane.queue(name).delete_messages(some)]
    _print_outcomes(name, ids, outcomes, "deleted")


def _batches(ids: Sequence[str]) -> Iterator[Sequence[str]]:
    return (ids[start : start + MESSAGES_MAX] for start in range(0, len(ids), MESSAGES_MAX))


def _print_outcomes(name: str, ids: Sequence[str], outcomes: Sequence[Outcome], done: str) -> None:
    """Print what became of each message, and raise the first error."""
    rows = [
        {"queue": name, "id": id, "outcome": done if each.code is None else each.code}
        for id, each in zip(ids, outcomes, strict=True)
    ]
    printing.rows(rows, ("id", "outcome"))
    for each in outcomes:
        if each.code is not None:
            raise rebuild(each.code, each.detail or "")


@message.command(
    examples=[
        "fastness message result jobs 0198f… --wait 30",
        'id=$(fastness queue put jobs --keep-result 1) && fastness message result jobs "$id" --wait forever',
    ]
)
@click.argument("name", metavar="QUEUE")
@click.argument("id")
@click.option("--wait", type=WAIT, default=0.0, help="How long to wait for the result, or `forever`.  [default: 0]")
def result(name: str, id: str, wait: float) -> None:
    """Print the result that a message was acknowledged with.

    It is JSON, or bytes as they are.

    Exit code 7 means that the message is not done yet, 5 that it is a dead letter, 6 that it was cancelled, and 4 that
    no result was kept.
    """
    value = wait_for_result(lambda plane, seconds: plane.queue(name).result(id, wait_seconds=seconds), wait)
    if wants_json():
        is_bytes = isinstance(value, bytes)
        shown = {"result_base64": base64.b64encode(value).decode()} if is_bytes else {"result": value}
        printing.record({"queue": name, "id": id, **shown})
    else:
        print_value(value)


def message_fields(found: MessageInfo) -> dict[str, Any]:
    """The fields of what is known about a message, as the command line prints them."""
    state = None if found.state_value is None else printing.jsonable(cbor2.loads(found.state_value))
    hidden = ("fence", "stateful", "state_value")
    return {**printing.fields(found, without=hidden), "workflow_state": state}


def _updated_text(fields: dict[str, Any]) -> str:
    until = f" until {fields['due_at']}" if fields["due_at"] else ""
    return f"Changed {fields['id']}: {fields['state']}{until}, priority {fields['priority']}"


operation(
    message,
    "update",
    UpdateMessage,
    _updated_text,
    help="Change the priority or the delay of a message. It must not be leased.",
    show=message_fields,
    examples=["fastness message update jobs 0198f… --priority 9", "fastness message update jobs 0198f… --delay 0"],
)


def print_failures(id: str, failures: Sequence[Failure]) -> None:
    """Print the failed attempts of a message, each with its traceback."""
    for failure in failures:
        click.echo(
            f"\n{id}, attempt {failure.attempt}: leased by {printing.escape_control(failure.owner)} "
            f"at {printing.timestamp(failure.leased_ms)}, {failure.outcome} at {printing.timestamp(failure.failed_ms)}"
        )
        error = ": ".join(part for part in (failure.error_type, failure.message) if part)
        click.echo(printing.escape_control((failure.traceback or error or "no error was given").rstrip()))
