"""Who is looking at the console, and at what they may look.

A page shows its token with every request, in a header, and keeps it for as long as its tab is open. There is no cookie,
so no other site can make a browser send it along.
"""

from typing import Any

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from holdfast import __version__
from holdfast.limits import CONSOLE_UNIVERSES_MAX
from holdfast.names import UNIVERSE
from holdfast.server.authorization import Guard, Open
from holdfast.server.console.files import HEADERS
from holdfast.server.doors import Doors
from holdfast.server.http.middleware import admitted
from holdfast.server.http.problems import JSON
from holdfast.tiers import Tier
from holdfast.wire.requests import Request
from holdfast.wire.tokens import EVERYTHING, METRICS
from holdfast.wire.universes import ListUniverses


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """What a page needs to know before it asks for anything else."""

    version: str = ""
    tokens: bool  # Whether one is asked for.
    signed_in: bool  # False: show one. Nothing else is said before that.
    name: str | None = None  # Of the token.
    verbs: list[str] = []
    universes: list[str] = []  # To choose from.
    metrics: bool = False
    reports: bool = False


def may(guard: Guard, request: Request[Any] | str) -> bool:
    """Whether whoever stands behind a guard may ask for this, or has this verb in every universe."""
    asked = getattr(guard, "may", None)
    return True if asked is None else bool(asked(request))


def route(doors: Doors, transport: Any, *, reports: bool) -> Route:
    """`/console/session`; `transport` is not measured, so that looking does not count."""

    async def answer(request: HttpRequest) -> Response:
        if not isinstance(doors.guards, Open) and "authorization" not in request.headers:
            return _spoken(Session(tokens=True, signed_in=False))
        guard = admitted(doors, request.headers, request.client.host if request.client else "")
        token = getattr(guard, "token", None)
        limited = token is not None and EVERYTHING not in token.universes
        names = list(token.universes) if token is not None and limited else await _universes(transport, guard)
        session = Session(
            version=__version__,
            tokens=token is not None,
            signed_in=True,
            name=None if token is None else token.name,
            verbs=[EVERYTHING] if token is None else list(token.verbs),
            universes=names,
            metrics=may(guard, METRICS),
            reports=reports and may(guard, METRICS),
        )
        return _spoken(session)

    return Route("/console/session", answer, methods=["GET"])


def _spoken(session: Session) -> Response:
    headers = {**HEADERS, "Cache-Control": "no-store"}
    return Response(msgspec.json.encode(session), headers=headers, media_type=JSON)


async def _universes(transport: Any, guard: Guard) -> list[str]:
    request = ListUniverses(limit=CONSOLE_UNIVERSES_MAX, tier=Tier.IMPORTANT)
    found = (await transport.call(request)).names if may(guard, request) else []
    return sorted({UNIVERSE, *found})
