"""`fastness mail`: send, read and confirm mail, and read its receipts."""

import itertools
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import click
import msgspec

from fastness.cli import completion, connect, printing, values
from fastness.cli.commands import CommandGroup
from fastness.cli.durations import WAIT
from fastness.cli.field_options import field_options, given, limit_option
from fastness.cli.message_bodies import guess_content_type
from fastness.cli.operations import operation
from fastness.encryption import AgentKey
from fastness.errors import SealBroken
from fastness.handles.sync.plane import Plane
from fastness.limits import MAIL_BATCH_MAX, MAIL_BYTES_MAX
from fastness.wire.mail import ConfirmMail, Envelope, ListMailboxes, MailPolicy, ReadReceipts

_MAIL_COLUMNS: Final = ("sequence", "id", "from", "sent_at", "payload")
_require_option = click.option(
    "--require-sealed", is_flag=True, help="Treat mail that its sender has not sealed as not decrypted. Needs --key."
)
_key_option = click.option("--key", "key_file", metavar="FILE", help="The agent's secret key, to decrypt sealed mail.")


mail = CommandGroup(completions=dict.fromkeys(("agent", "sender", "to"), completion.agents))


@mail.command(
    examples=[
        "fastness mail send ada bob 'the build is green'",
        "fastness mail send ada bob --file plan.json --key ada.key --seal",
    ]
)
@click.argument("sender", metavar="FROM")
@click.argument("to", metavar="TO")
@click.argument("body", required=False)
@click.option("--file", metavar="PATH", help="Read the body from a file; - is standard input.")
@click.option(
    "--id", "mail_id", help="The mail id. A second mail with the same id is a duplicate while the first is pending."
)
@click.option("--content-type", help="The content type of the body.  [default: detected]")
@click.option("--correlation-id", help="An id that links related messages and requests.")
@click.option("--key", "key_file", metavar="FILE", help="The sender's secret key, for --seal.")
@click.option("--seal", is_flag=True, help="Encrypt the mail, so only the recipient can read it.")
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
    with values.open_input(body, file) as stream, connect.open_plane(create=True) as plane:
        data = stream.read(MAIL_BYTES_MAX + 1)
        sent = plane.mailbox(sender, key=_load_key(key_file)).send(
            to,
            data,
            id=mail_id,
            content_type=content_type or guess_content_type(data),
            correlation_id=correlation_id,
            seal=seal,
        )
    if sent.duplicate:
        click.echo("Duplicate: already pending, not stored again.", err=True)
    printing.result(sent.id, {"id": sent.id, "durability": sent.durability, "duplicate": sent.duplicate})


@mail.command(examples=["fastness mail read bob --confirm --json"])
@click.argument("agent", metavar="AGENT")
@limit_option("-n", 50, MAIL_BATCH_MAX, field="count")
@click.option("--after", type=int, default=-1, help="Start after this sequence number.")
@click.option("--wait", type=WAIT, default=0.0, help="How long to wait for mail, or `forever`.  [default: 0]")
@click.option("--peek", is_flag=True, help="Do not send `delivered` receipts.")
@click.option("--confirm", "confirmed", is_flag=True, help="Confirm the mail after printing it, which removes it.")
@_key_option
@_require_option
def read(
    *,
    agent: str,
    count: int,
    after: int,
    wait: float,
    peek: bool,
    confirmed: bool,
    key_file: str | None,
    require_sealed: bool,
) -> None:
    """Read the mail of AGENT, oldest first. Mail stays in the mailbox until it is confirmed.

    With --key, sealed mail is decrypted. Mail that cannot be decrypted is shown sealed and not confirmed, and the exit
    code is 10.
    """
    key = _load_key(key_file)
    with connect.PlaneCaller(connect.current_target()) as caller:

        def read_pending(plane: Plane, seconds: float) -> list[Envelope] | None:
            mailbox = plane.mailbox(agent, key=key, require_sealed=require_sealed)
            return mailbox.read(after=after, limit=count, wait_seconds=seconds, peek=peek) or None

        found = caller.poll(read_pending, wait) or []
        printing.rows([_fields(each, key) for each in found], _MAIL_COLUMNS, empty="No mail.")
        readable = [each for each in found if each.seal_error is None]
        if confirmed and readable:
            caller.call(partial(_confirm, agent=agent, mails=readable))
    for each in found:
        if each.seal_error is not None:
            raise SealBroken(f"Mail {each.id} from {each.sender} is not accepted: {each.seal_error}")


@mail.command(examples=["fastness mail watch bob --json | while read -r line; do …; done"])
@click.argument("agent", metavar="AGENT")
@click.option("-n", "count", type=click.IntRange(1), help="Exit after this many mails.")
@click.option("--keep", is_flag=True, help="Do not confirm printed mail.")
@_key_option
@_require_option
def watch(agent: str, count: int | None, keep: bool, key_file: str | None, require_sealed: bool) -> None:
    """Print the mail of AGENT as it arrives, and confirm it.

    Prints one mail per line. Runs until interrupted.

    With --key, sealed mail is decrypted. Mail that cannot be decrypted is printed with the reason and not confirmed.
    """
    key = _load_key(key_file)
    with connect.PlaneCaller(connect.current_target()) as caller:
        for each in itertools.islice(_arriving(caller, agent, key, require_sealed=require_sealed), count):
            fields = _fields(each, key)
            payload = each.seal_error or fields.get("payload", fields.get("payload_base64"))
            printing.line(fields, f"{fields['sent_at']} {each.sender} {payload}")
            if not keep and each.seal_error is None:
                caller.call(partial(_confirm, agent=agent, mails=[each]))


def _arriving(
    caller: connect.PlaneCaller, agent: str, key: AgentKey | None, *, require_sealed: bool
) -> Iterator[Envelope]:
    after = -1
    while True:

        def read_pending(plane: Plane, seconds: float, after: int = after) -> list[Envelope] | None:
            mailbox = plane.mailbox(agent, key=key, require_sealed=require_sealed)
            return mailbox.read(after=after, wait_seconds=seconds) or None

        for each in caller.poll(read_pending, 3_600.0) or []:
            after = each.sequence
            yield each


operation(mail, "confirm", ConfirmMail, "Confirmed {count:,} mails of {agent}", arguments={"ids": "ID…"})


@mail.command()
@click.argument("agent", metavar="AGENT")
def count(agent: str) -> None:
    """Show how much mail is pending for AGENT, and since when.

    Also shows whether a reader is connected.
    """
    with connect.open_plane() as plane:
        printing.record({"agent": agent, **printing.fields(plane.mailbox(agent).stats())})


operation(mail, "list", ListMailboxes, columns=("agent", "pending", "oldest_at", "joined"))
operation(
    mail, "receipts", ReadReceipts, columns=("sequence", "id", "to", "state", "was_stored", "at"), limit=("-n", 100)
)


@mail.command()
@click.argument("agent", metavar="AGENT")
@click.argument("sender", metavar="[SENDER]", required=False)
@click.option("--off", is_flag=True, help="Remove the block.")
def block(agent: str, sender: str | None, off: bool) -> None:
    """Block mail from SENDER to AGENT. Without SENDER, list the blocked senders."""
    with connect.open_plane(create=sender is not None and not off) as plane:
        mailbox = plane.mailbox(agent)
        if sender is None:
            found = [{"sender": each} for each in mailbox.blocked(limit=1_000)]
            printing.rows(found, ["sender"], empty="No sender is blocked.")
            return
        mailbox.unblock(sender) if off else mailbox.block(sender)
    verb = "Unblocked" if off else "Blocked"
    printing.result(f"{verb} mail from {sender} to {agent}", {"agent": agent, "sender": sender, "blocked": not off})


@mail.command(examples=["fastness mail policy --max 5000 --ttl 30d"])
@field_options(MailPolicy, changes=True, names={"pending_max": "--max"})
def policy(**changes: Any) -> None:
    """Show the mail policy of the universe. Options change it.

    A universe whose policy was never changed has the one of the server (`fastness serve --mail-max --mail-ttl`).
    """
    changed = given(changes)
    with connect.open_plane(create=bool(changed)) as plane:
        mail_policy = plane.mail_policy()
        if changed:
            mail_policy = plane.set_mail_policy(msgspec.structs.replace(mail_policy, **changed))
    printing.record(msgspec.structs.asdict(mail_policy))


def _load_key(file: str | None) -> AgentKey | None:
    return None if file is None else AgentKey.load(Path(file))


def _confirm(plane: Plane, agent: str, mails: list[Envelope]) -> int:
    return plane.mailbox(agent).confirm(mails)


def _fields(each: Envelope, key: AgentKey | None) -> dict[str, Any]:
    hidden = ("sealed_ms", "seal_error", "sealed_by")
    return {
        **printing.fields(each, without=hidden, sender="from", body="payload"),
        **({} if each.seal_error is None else {"seal_error": each.seal_error}),
        **({} if key is None else {"sealed_by": each.sealed_by}),
    }
