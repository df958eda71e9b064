"""`holdfast mail`: send, read, confirm, and see what became of it."""

import itertools
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import click
import msgspec

from holdfast.cli import connect, printing, values
from holdfast.cli.commands import Noun
from holdfast.cli.durations import SECONDS, WAIT
from holdfast.cli.messages import kind_of
from holdfast.encryption import AgentKey
from holdfast.handles import Plane
from holdfast.limits import MAIL_BATCH_MAX, MAIL_BYTES_MAX, READ_ENTRIES_MAX
from holdfast.wire.mail import Envelope, MailboxSize, MailPolicy, MailReceipt

_ENVELOPES: Final = ("sequence", "id", "from", "sent_at", "payload")
_BOXES: Final = ("agent", "pending", "oldest_at", "joined")
_RECEIPTS: Final = ("sequence", "id", "to", "state", "was_stored", "at")
_key_option = click.option("--key", "key_file", metavar="FILE", help="The agent's key: opens what was sealed for it.")


@click.group(cls=Noun)
def mail() -> None:
    """Mail between agents, kept until it has arrived."""


@mail.command(
    examples=[
        "holdfast mail send ada bob 'the build is green'",
        "holdfast mail send ada bob --file plan.json --key ada.key --seal",
    ]
)
@click.argument("sender", metavar="FROM")
@click.argument("to", metavar="TO")
@click.argument("body", required=False)
@click.option("--file", metavar="PATH", help="Take the body from a file; - is standard input.")
@click.option("--id", "mail_id", help="Its id; while it waits, a mail of the same id is not stored again.")
@click.option("--content-type", help="What the body is.  [default: found out]")
@click.option("--correlation-id", help="What ties it to whatever led to it.")
@click.option("--key", "key_file", metavar="FILE", help="The sender's key, to seal with.")
@click.option("--seal", is_flag=True, help="Let nobody but the recipient read it.")
def send(
    *,
    sender: str,
    to: str,
    body: str | None,
    file: str | None,
    mail_id: str | None,
    content_type: str | None,
    correlation_id: str | None,
    key_file: str | None,
    seal: bool,
) -> None:
    """Send a mail: BODY, a file, or standard input. Prints its id."""
    with values.source(body, file) as stream, connect.opened() as plane:
        data = stream.read(MAIL_BYTES_MAX + 1)
        sent = plane.mailbox(sender, key=_key(key_file)).send(
            to,
            data,
            id=mail_id,
            content_type=content_type or kind_of(data),
            correlation_id=correlation_id,
            seal=seal,
        )
    if sent.duplicate:
        click.echo("It waits there already, and is not stored again.", err=True)
    printing.done(sent.id, {"id": sent.id, "durability": sent.durability, "duplicate": sent.duplicate})


@mail.command(examples=["holdfast mail read bob --confirm --json"])
@click.argument("agent", metavar="AGENT")
@click.option("-n", "count", type=click.IntRange(1, MAIL_BATCH_MAX), default=50, help="At most so many.")
@click.option("--after", type=int, default=-1, help="Begin behind this sequence.")
@click.option("--wait", type=WAIT, default=0.0, help="How long to wait for the first, or `forever`.  [default: 0]")
@click.option("--peek", is_flag=True, help="Do not tell the senders that it was delivered.")
@click.option("--confirm", "confirmed", is_flag=True, help="It has arrived once it is printed: remove it.")
@_key_option
def read(*, agent: str, count: int, after: int, wait: float, peek: bool, confirmed: bool, key_file: str | None) -> None:
    """The mail of AGENT, the oldest first. It stays until it is confirmed."""
    key = _key(key_file)
    with connect.Visits(connect.target()) as visits:

        def look(plane: Plane, seconds: float) -> list[Envelope] | None:
            found = plane.mailbox(agent).read(after=after, limit=count, wait_seconds=seconds, peek=peek)
            return found or None

        found = visits.find(look, wait) or []
        shown = [visits.call(partial(_opened, agent=agent, key=key, each=each)) for each in found]
        printing.rows([_fields(each) for each in shown], _ENVELOPES, nothing="There is no mail.")
        if confirmed and found:
            visits.call(partial(_confirm, agent=agent, mails=found))


@mail.command(examples=["holdfast mail watch bob --json | while read -r line; do …; done"])
@click.argument("agent", metavar="AGENT")
@click.option("-n", "count", type=click.IntRange(1), help="End after so many.")
@click.option("--keep", is_flag=True, help="Do not confirm what was printed.")
@_key_option
def watch(agent: str, count: int | None, keep: bool, key_file: str | None) -> None:
    """Print the mail of AGENT as it comes, one a line, until it is interrupted; what was printed is confirmed."""
    key = _key(key_file)
    with connect.Visits(connect.target()) as visits:
        for each in itertools.islice(_coming(visits, agent), count):
            shown = visits.call(partial(_opened, agent=agent, key=key, each=each))
            fields = _fields(shown)
            said = fields.get("payload", fields.get("payload_base64"))
            printing.line(fields, f"{fields['sent_at']} {shown.sender} {said}")
            if not keep:
                visits.call(partial(_confirm, agent=agent, mails=[each]))


def _coming(visits: connect.Visits, agent: str) -> Iterator[Envelope]:
    after = -1
    while True:

        def look(plane: Plane, seconds: float, after: int = after) -> list[Envelope] | None:
            return plane.mailbox(agent).read(after=after, wait_seconds=seconds) or None

        for each in visits.find(look, 3_600.0) or []:
            after = each.sequence
            yield each


@mail.command()
@click.argument("agent", metavar="AGENT")
@click.argument("ids", metavar="ID…", nargs=-1, required=True)
def confirm(agent: str, ids: tuple[str, ...]) -> None:
    """Mails have arrived: remove them, and tell their senders."""
    with connect.opened() as plane:
        count = plane.mailbox(agent).confirm(ids)
    printing.done(f"{count:,} mails of {agent} have arrived", {"agent": agent, "count": count})


@mail.command()
@click.argument("agent", metavar="AGENT")
def count(agent: str) -> None:
    """How much mail waits for AGENT, since when, and whether anybody reads it."""
    with connect.opened() as plane:
        found = plane.mailbox(agent).stats()
    printing.record(
        {
            "agent": agent,
            "pending": found.pending,
            "pending_max": found.pending_max,
            "oldest_at": printing.moment(found.oldest_ms),
            "joined": found.joined,
        }
    )


@mail.command("list")
@click.option("--after", default="", help="Begin behind this name.")
@click.option("--limit", type=click.IntRange(1, MAIL_BATCH_MAX), default=MAIL_BATCH_MAX, help="At most so many.")
def list_(after: str, limit: int) -> None:
    """Mailboxes, and how much waits in each."""
    with connect.opened() as plane:
        found = plane.mailboxes(after=after, limit=limit)
    printing.rows([_box_fields(each) for each in found], _BOXES, nothing="Nobody has mail.")


@mail.command()
@click.argument("agent", metavar="AGENT")
@click.option("--after", type=int, default=-1, help="Begin behind this sequence.")
@click.option("-n", "count", type=click.IntRange(1, READ_ENTRIES_MAX), default=100, help="At most so many.")
def receipts(agent: str, after: int, count: int) -> None:
    """What became of the mail that AGENT has sent."""
    with connect.opened() as plane:
        found = plane.mailbox(agent).receipts(after=after, limit=count)
    printing.rows([_receipt_fields(each) for each in found], _RECEIPTS, nothing="Nothing was sent.")


@mail.command()
@click.argument("agent", metavar="AGENT")
@click.argument("sender", metavar="[SENDER]", required=False)
@click.option("--off", is_flag=True, help="Accept the sender's mail again.")
def block(agent: str, sender: str | None, off: bool) -> None:
    """Refuse the mail of SENDER to AGENT; without a SENDER, list those that are refused."""
    with connect.opened() as plane:
        mailbox = plane.mailbox(agent)
        if sender is None:
            printing.rows([{"sender": each} for each in mailbox.blocked(limit=1_000)], ["sender"])
            return
        mailbox.unblock(sender) if off else mailbox.block(sender)
    said = "is accepted" if off else "is refused"
    printing.done(f"Mail of {sender} to {agent} {said}", {"agent": agent, "sender": sender, "blocked": not off})


@mail.command(examples=["holdfast mail policy --max 5000 --ttl 30d"])
@click.option("--max", "pending_max", type=int, help="Mails that one mailbox holds.")
@click.option("--ttl", "ttl_seconds", type=SECONDS, help="How long mail is kept.")
def policy(**changes: Any) -> None:
    """How much mail a mailbox holds, and for how long; options change it."""
    wanted = {field: value for field, value in changes.items() if value is not None}
    with connect.opened() as plane:
        found: MailPolicy = plane.mail_policy()
        if wanted:
            found = plane.set_mail_policy(msgspec.structs.replace(found, **wanted))
    printing.record(msgspec.structs.asdict(found))


def _key(file: str | None) -> AgentKey | None:
    return None if file is None else AgentKey.load(Path(file))


def _opened(plane: Plane, agent: str, key: AgentKey | None, each: Envelope) -> Envelope:
    return each if key is None else plane.mailbox(agent, key=key).unseal(each)


def _confirm(plane: Plane, agent: str, mails: list[Envelope]) -> int:
    return plane.mailbox(agent).confirm(mails)


def _fields(each: Envelope) -> dict[str, Any]:
    return {
        "sequence": each.sequence,
        "id": each.id,
        "from": each.sender,
        "to": each.to,
        "sent_at": printing.moment(each.sent_ms),
        "expires_at": printing.moment(each.expires_ms),
        "content_type": each.content_type,
        "correlation_id": each.correlation_id,
        **printing.payload(each.body, each.content_type),
    }


def _box_fields(each: MailboxSize) -> dict[str, Any]:
    oldest = None if each.oldest_ms is None else printing.moment(each.oldest_ms)
    return {"agent": each.agent, "pending": each.pending, "oldest_at": oldest, "joined": each.joined}


def _receipt_fields(each: MailReceipt) -> dict[str, Any]:
    fields = msgspec.structs.asdict(each)
    return {**fields, "at": printing.moment(fields.pop("at_ms"))}
