"""`fastness token`: access tokens for a server."""

import time
from collections.abc import Iterator
from typing import Any

import click

from fastness.cli import completion, connect, printing
from fastness.cli.commands import CommandGroup
from fastness.cli.durations import SECONDS
from fastness.cli.operations import operation
from fastness.errors import InvalidArgument, NotFound
from fastness.handles.sync.plane import Plane
from fastness.wire.permissions import SQS_VERBS
from fastness.wire.tokens import ListTokens, TokenInfo


def _fields(info: TokenInfo) -> dict[str, Any]:
    return {**printing.fields(info), "access_key_id": info.access_key_id or None, "maker": info.maker or None}


token = CommandGroup(completions={"token": completion.tokens})


def _needed_without_sqs(context: click.Context, option: click.Parameter, value: str | None) -> str | None:
    if value is None and not context.params.get("sqs"):  # It is eager, so it is known.
        raise click.MissingParameter(ctx=context, param=option)
    return value


@token.command(
    examples=[
        "fastness token create worker --universe shop --allow queue:put,queue:receive,queue:ack --ttl 30d",
        "fastness --url dir:./data token create admin --universe '*' --allow '*'",
        "fastness token create shop --sqs --queue 'orders*'",
    ]
)
@click.argument("name", default="cli")
@click.option(
    "--universe",
    "universes",
    multiple=True,
    help="A universe that the token can access; '*' is every universe. Repeatable.",
)
@click.option(
    "--allow",
    "verbs",
    metavar="VERBS",
    callback=_needed_without_sqs,
    help="The permissions, such as queue:put,queue:receive or queue:* or *. "
    f"[default with --sqs: {','.join(SQS_VERBS)}]",
)
@click.option(
    "--queue",
    "queues",
    multiple=True,
    metavar="PATTERN",
    help="A queue that the token can access, or the beginning of names with a star: 'orders*'. Repeatable.  "
    "[default: every queue]",
)
@click.option(
    "--sqs", is_flag=True, is_eager=True, help="Create an access key for the SQS endpoint, and print it instead."
)
@click.option("--ttl", type=SECONDS, help="The token expires after this time.  [default: never]")
@click.option("--rate", "rate_per_second", type=float, help="The maximum number of calls per second.")
@click.option("--body-max", "body_bytes_max", type=int, help="The maximum number of bytes per call.")
def create(
    *,
    name: str,
    universes: tuple[str, ...],
    verbs: str | None,
    queues: tuple[str, ...],
    sqs: bool,
    ttl: float | None,
    rate_per_second: float | None,
    body_bytes_max: int | None,
) -> None:
    """Create a token and print it. It cannot be shown again.

    With --sqs, what is printed are the variables that the AWS SDKs read: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY.
    The secret is stored encrypted, with the key in the server's --sqs-key-file. For a data directory or PostgreSQL,
    FASTNESS_SQS_KEY_FILE names the file.
    """
    target = connect.current_target()
    with connect.open_plane(target, create=True) as plane:
        created = plane.tokens.create(
            name,
            universes=universes or [target.universe],
            verbs=verbs if verbs is not None else SQS_VERBS,
            queues=queues,
            sqs=sqs,
            ttl_seconds=ttl,
            rate_per_second=rate_per_second,
            body_bytes_max=body_bytes_max,
        )
    if sqs:
        key = {"AWS_ACCESS_KEY_ID": created.info.access_key_id, "AWS_SECRET_ACCESS_KEY": created.secret_access_key}
        click.echo("Store the secret now: it cannot be shown again.", err=True)
        printing.result("\n".join(f"{name}={value}" for name, value in key.items()), {**key, **_fields(created.info)})
        return
    click.echo("Store the token now: it cannot be shown again.", err=True)
    printing.result(created.token, {"token": created.token, **_fields(created.info)})


operation(
    token,
    "list",
    ListTokens,
    columns=("id", "name", "universes", "verbs", "queues", "access_key_id", "created_at", "expires_at", "revoked_at"),
    show=_fields,
)


@token.command("self")
def self_() -> None:
    """Show the token of this command, and what it allows. Exit code 4 means that it sends none."""
    with connect.open_plane() as plane:
        found = plane.tokens.self()
    if found is None:
        raise NotFound("This plane was opened without a token; give one with --token or FASTNESS_TOKEN")
    printing.record(_fields(found))


@token.command(examples=["fastness token revoke worker", "fastness token revoke 0198f2a7c3d94e5f8a1b2c3d4e5f6a7b"])
@click.argument("token", metavar="NAME|ID|TOKEN")
@click.option(
    "--keep-children", is_flag=True, help="Keep the tokens that it created. Without this they are revoked too."
)
def revoke(token: str, keep_children: bool) -> None:
    """Revoke a token, by its name, its id, or itself.

    The tokens that it created, and those that they created, are revoked with it. If several usable tokens
    have the same name, nothing is revoked and their ids are shown.
    """
    with connect.open_plane() as plane:
        try:
            revoked = plane.tokens.revoke(token, keep_children=keep_children)
        except NotFound:
            id = _id_of(plane, token)
            revoked = id is not None and plane.tokens.revoke(id, keep_children=keep_children)
    printing.result("Revoked" if revoked else "Already revoked or expired", {"revoked": revoked})


def _id_of(plane: Plane, name: str) -> str | None:
    """The id of the only usable token with this name; None if all of them are revoked or expired."""
    named = [each for each in _all_tokens(plane) if each.name == name]
    if not named:
        raise NotFound(f"No token has the name or id {name}; list them with: fastness token list")
    now_ms = round(time.time() * 1_000)
    usable = [
        each.id for each in named if each.revoked_ms is None and (each.expires_ms is None or now_ms < each.expires_ms)
    ]
    if len(usable) > 1:
        raise InvalidArgument(f"{len(usable)} tokens are named {name}; give the id of one: {', '.join(usable)}")
    return usable[0] if usable else None


def _all_tokens(plane: Plane) -> Iterator[TokenInfo]:
    after: str | None = ""
    while after is not None:
        page = plane.tokens.page(after=after, limit=1_000)
        yield from page.tokens
        after = page.next
