"""`holdfast token`: who may come in from the network."""

from typing import Any, Final

import click

from holdfast.cli import connect, printing
from holdfast.cli.commands import Noun
from holdfast.cli.durations import SECONDS
from holdfast.wire.tokens import TokenInfo

_SHOWN: Final = ("id", "name", "universes", "verbs", "created_at", "expires_at", "revoked_at")


@click.group(cls=Noun)
def token() -> None:
    """Who may come in from the network, into which universes, and what for."""


@token.command(
    examples=[
        "holdfast token create worker --universe shop --allow queue:put,queue:receive,queue:ack --ttl 30d",
        "holdfast --url dir:./data token create admin --universe '*' --allow '*'",
    ]
)
@click.argument("name", default="cli")
@click.option("--universe", "universes", multiple=True, help="Where it is good; repeatable, '*' is everywhere.")
@click.option(
    "--allow", "verbs", required=True, metavar="VERBS", help="What for: queue:put,queue:receive or queue:* or *."
)
@click.option("--ttl", type=SECONDS, help="When it ends.  [default: when it is revoked]")
@click.option("--rate", "rate_per_second", type=float, help="At most so many calls a second.")
@click.option("--body-max", "body_bytes_max", type=int, help="At most so many bytes in one call.")
def create(*, name: str, universes: tuple[str, ...], verbs: str, ttl: float | None, **limits: Any) -> None:
    """Make a token and print it, for the only time."""
    place = connect.target()
    with connect.opened(place) as plane:
        made = plane.tokens.create(
            name, universes=universes or [place.universe], verbs=verbs, ttl_seconds=ttl, **limits
        )
    click.echo("Keep it now: nobody can read it again.", err=True)
    printing.done(made.token, {"token": made.token, **_fields(made.info)})


@token.command("list")
@click.option("--after", default="", help="Begin behind this id.")
@click.option("--limit", type=click.IntRange(1, 10_000), default=1_000, help="At most so many.")
def list_(after: str, limit: int) -> None:
    """All tokens, without their secrets."""
    with connect.opened() as plane:
        found = plane.tokens.page(after=after, limit=limit).tokens
    printing.rows([_fields(each) for each in found], _SHOWN, nothing="There is no token yet.")


@token.command()
@click.argument("id")
def revoke(id: str) -> None:
    """Refuse a token from now on. ID may be the token itself."""
    with connect.opened() as plane:
        revoked = plane.tokens.revoke(id)
    printing.done("It is revoked" if revoked else "It could not be used any more", {"revoked": revoked})


def _fields(info: TokenInfo) -> dict[str, Any]:
    return {
        "id": info.id,
        "name": info.name,
        "universes": info.universes,
        "verbs": info.verbs,
        "created_at": printing.moment(info.created_ms),
        "expires_at": printing.moment(info.expires_ms),
        "revoked_at": printing.moment(info.revoked_ms),
        "rate_per_second": info.rate_per_second,
        "body_bytes_max": info.body_bytes_max,
    }
