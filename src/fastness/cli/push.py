"""`fastness push`: push data to agents, watch pushes as they are accepted, and show the statistics of the ingress."""

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import click
import msgspec

from fastness.cli import completion, connect, printing, values
from fastness.cli.commands import CommandGroup, global_options, wants_json
from fastness.cli.message_bodies import guess_content_type
from fastness.errors import InvalidArgument
from fastness.handles.sync.ingress import PushWatch
from fastness.handles.sync.plane import Plane
from fastness.limits import PUSH_PAYLOAD_BYTES_MAX
from fastness.wire.ingress import DataPush

_DEFAULT: Final = "send"
# Global options, and whether they take a value.
_OPTIONS: Final = {
    name: not option.is_flag
    for option in global_options(hidden=True)
    if isinstance(option, click.Option)
    for name in option.opts
}


class _PushGroup(CommandGroup):
    """A group whose first argument may be an agent: then it is the command `send`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and not ctx.resilient_parsing and self._is_send(ctx, args):
            args = [_DEFAULT, *args]
        return super().parse_args(ctx, args)

    def _is_send(self, ctx: click.Context, args: list[str]) -> bool:
        """Whether the first argument that is not a global option is not a command."""
        rest = iter(args)
        for arg in rest:
            if arg in ctx.help_option_names:
                return False
            name, equals, _ = arg.partition("=")
            if name not in _OPTIONS:
                return self.get_command(ctx, arg) is None
            if _OPTIONS[name] and not equals:
                next(rest, None)
        return False


@click.group(cls=_PushGroup, completions=dict.fromkeys(("agent", "sender", "to"), completion.agents))
def push() -> None:
    """A push is accepted in memory at once, and stored as mail up to 200 ms later.

    `fastness push AGENT TOPIC BODY` is short for `fastness push send AGENT TOPIC BODY`. Each sender may push 120 times
    a minute, unless the server's setting ingress_pushes_per_minute says otherwise; the error says how long to wait.
    """


@push.command(
    "send",
    examples=[
        "fastness push bob build.done '{\"ok\": true}'",
        "fastness push bob report --file report.pdf --synced --key report-7",
        "fastness push send watch build.done ok          # an agent called `watch`",
    ],
)
@click.argument("agent", metavar="AGENT")
@click.argument("topic", metavar="TOPIC")
@click.argument("body", required=False)
@click.option("--file", metavar="PATH", help="Read the body from a file; - is standard input.")
@click.option("--content-type", help="The content type of the body.  [default: detected]")
@click.option(
    "--key",
    "idempotency_key",
    help="The idempotency key: a push with the same key is stored once.  [default: new]",
)
@click.option("--synced", is_flag=True, help="Return when the push is stored, instead of when it is accepted.")
@click.option("--from", "sender", metavar="AGENT", help="The sender.  [default: the name of the token, or anybody]")
@click.option("--session-id", help="The session; for the topic chat.message a UUIDv7.")
@click.option("--reply-to", help="Where to answer; any text.")
def send(
    *,
    agent: str,
    topic: str,
    body: str | None,
    file: str | None,
    content_type: str | None,
    idempotency_key: str | None,
    synced: bool,
    sender: str | None,
    session_id: str | None,
    reply_to: str | None,
) -> None:
    """Push BODY, a file, or standard input to AGENT. Prints the id of the mail.

    Each sender may push 120 times a minute, unless the server's setting ingress_pushes_per_minute says otherwise. In a
    data directory or PostgreSQL, without a server, a push is always stored before the command ends.
    """
    target = connect.current_target()
    with values.open_input(body, file) as stream, connect.open_plane(target, create=True) as plane:
        data = stream.read(PUSH_PAYLOAD_BYTES_MAX + 1)
        pushed = plane.ingress.push(
            agent,
            topic,
            data,
            content_type=content_type or guess_content_type(data),
            idempotency_key=idempotency_key,
            synced=synced or not target.is_server,
            sender=sender,
            session_id=session_id,
            reply_to=reply_to,
        )
    if pushed.deduped:
        click.echo("Duplicate: a push with this key was accepted before, not stored again.", err=True)
    printing.result(pushed.id, msgspec.to_builtins(pushed))


@push.command(examples=["fastness push watch --to bob --json | while read -r line; do …; done"])
@click.option("--to", metavar="AGENT", help="Only pushes to this agent.")
@click.option("--topic", help="Only pushes with exactly this topic.")
@click.option("--after", metavar="POSITION", help="Continue after the push with this position.  [default: now]")
@click.option("-n", "count", type=click.IntRange(1), help="Exit after this many pushes.")
def watch(to: str | None, topic: str | None, after: str | None, count: int | None) -> None:
    """Print pushes as a server accepts them, one per line. Runs until interrupted.

    A watch confirms nothing: the pushes stay in the mailboxes. It sees the pushes that its server accepts, not those of
    other servers on the same PostgreSQL. A line on standard error says if pushes were missed.
    """
    with _server_plane() as plane, plane.ingress.watch(to=to, topic=topic, after=after) as pushes:
        for each in itertools.islice(_reporting(pushes), count):
            fields = _fields(each)
            payload = fields.get("payload", fields.get("payload_base64"))
            text = payload if isinstance(payload, str) else printing.compact(payload)
            printing.line(fields, f"{fields['received_at']} {each.sender} {each.to} {each.topic} {text}")


@push.command()
def stats() -> None:
    """Show what the ingress of a server holds and has counted."""
    with _server_plane() as plane:
        found = plane.ingress.stats()
    fields = msgspec.to_builtins(found)
    if not wants_json():
        fields |= {name: _counts(fields[name]) for name in ("refused", "lost")}
        fields["pushes_per_minute"] = found.pushes_per_minute or "no limit"
    printing.record(fields)


@contextmanager
def _server_plane() -> Iterator[Plane]:
    target = connect.current_target()
    with connect.open_plane(target) as plane:
        if not target.is_server:
            raise InvalidArgument(
                "Only a server accepts the pushes of other processes; give its address: --url http://127.0.0.1:9440"
            )
        yield plane


def _reporting(pushes: PushWatch) -> Iterator[DataPush]:
    """The pushes, with a line on standard error whenever some are missing."""
    missed, restarts = 0, 0
    for each in pushes:
        if pushes.missed > missed:
            click.echo(f"{pushes.missed - missed:,} pushes were missed", err=True)
        if pushes.restarts > restarts:
            click.echo("The server was restarted; pushes may be missing", err=True)
        missed, restarts = pushes.missed, pushes.restarts
        yield each


def _fields(each: DataPush) -> dict[str, Any]:
    return printing.fields(each, sender="from")


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{code} {count:,}" for code, count in sorted(counts.items())) or "0"
