"""`holdfast token`: access tokens for a server."""

from typing import Any, Final

import click

from holdfast.cli import connect, printing
from holdfast.cli.commands import CommandGroup
from holdfast.cli.durations import SECONDS
from holdfast.wire.tokens import TokenInfo

_COLUMNS: Final = ("id", "name", "universes", "verbs", "created_at", "expires_at", "revoked_at")


@click.group(cls=CommandGroup)
def token() -> None:
    """Manage access tokens: their universes, permissions and limits."""


@token.command(
    examples=[
        "holdfast token create worker --universe shop --allow queue:put,queue:receive,queue:ack --ttl 30d",
        "holdfast --url dir:./data token create admin --universe '*' --allow '*'",
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
    required=True,
    metavar="VERBS",
    help="The permissions, such as queue:put,queue:receive or queue:* or *.",
)
@click.option("--ttl", type=SECONDS, help="The token expires after this time.  [default: never]")
@click.option("--rate", "rate_per_second", type=float, help="The maximum number of calls per second.")
@click.option("--body-max", "body_bytes_max", type=int, help="The maximum number of bytes per call.")
def create(
    *,
    name: str,
    universes: tuple[str, ...],
    verbs: str,
    ttl: float | None,
    rate_per_second: float | None,
    body_bytes_max: int | None,
) -> None:
    """Create a token and print it. It cannot be shown again."""
    target = connect.current_target()
    with connect.open_plane(target, create=True) as plane:
        created = plane.tokens.create(
            name,
            universes=universes or [target.universe],
            verbs=verbs,
            ttl_seconds=ttl,
            rate_per_second=rate_per_second,
            body_bytes_max=body_bytes_max,
        )
    click.echo("Store the token now: it cannot be shown again.", err=True)
    printing.result(created.token, {"token": created.token, **_fields(created.info)})


@token.command("list")
@click.option("--after", default="", help="Start after this id.")
@click.option("--limit", type=click.IntRange(1, 10_000), default=1_000, help="The maximum number of results.")
def list_(after: str, limit: int) -> None:
    """List the tokens, without their secrets."""
    with connect.open_plane() as plane:
        found = plane.tokens.page(after=after, limit=limit).tokens
    printing.rows([_fields(each) for each in found], _COLUMNS, empty="No tokens.")


@token.command()
@click.argument("id")
def revoke(id: str) -> None:
    """Revoke a token. ID can also be the token itself."""
    with connect.open_plane() as plane:
        revoked = plane.tokens.revoke(id)
    printing.result("Revoked" if revoked else "Already revoked or expired", {"revoked": revoked})


def _fields(info: TokenInfo) -> dict[str, Any]:
    return {
        "id": info.id,
        "name": info.name,
        "universes": info.universes,
        "verbs": info.verbs,
        "created_at": printing.timestamp(info.created_ms),
        "expires_at": printing.timestamp(info.expires_ms),
        "revoked_at": printing.timestamp(info.revoked_ms),
        "rate_per_second": info.rate_per_second,
        "body_bytes_max": info.body_bytes_max,
    }
