"""The session of a console page: its token's name, verbs and universes.

A page sends its token in a header of every request, and keeps it while its tab is open. There is no cookie, so no other
site can make a browser send the token.
"""

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from fastness.limits import CONSOLE_UNIVERSES_MAX
from fastness.names import UNIVERSE
from fastness.server.authorization import Authorizer, NoAuthentication
from fastness.server.console.files import HEADERS
from fastness.server.context import ServerContext
from fastness.server.http.middleware import authenticate_request
from fastness.server.problems import JSON
from fastness.server.transport import ServerTransport
from fastness.tiers import Tier
from fastness.version import __version__
from fastness.wire.permissions import EVERYTHING, METRICS
from fastness.wire.universes import ListUniverses


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """What a page needs before it calls anything else."""

    version: str = ""
    tokens: bool  # Whether the server requires tokens.
    signed_in: bool  # If false, the page asks for a token and all other fields are empty.
    name: str | None = None  # The name of the token.
    verbs: list[str] = []
    universes: list[str] = []  # The universes that the page offers.
    limited: bool = False  # Whether the token is limited to them. Then pages about the whole plane are not offered.
    metrics: bool = False  # Whether the token allows `metrics:read` in every universe and queue.
    reports: bool = False
    live: bool = False  # Whether the server knows the lake of live aggregates.


def route(context: ServerContext, transport: ServerTransport, *, reports: bool, live: bool) -> Route:
    """`/console/session`. `transport` is not measured, so that the console does not count in the metrics."""

    async def answer(request: HttpRequest) -> Response:
        if not isinstance(context.authenticator, NoAuthentication) and "authorization" not in request.headers:
            return _session_response(Session(tokens=True, signed_in=False))
        authorizer = authenticate_request(context, request.headers, request.client.host if request.client else "")
        token = authorizer.token
        limited = token is not None and EVERYTHING not in token.universes
        names = list(token.universes) if token is not None and limited else await _universes(transport, authorizer)
        session = Session(
            version=__version__,
            tokens=token is not None,
            signed_in=True,
            name=None if token is None else token.name,
            verbs=[EVERYTHING] if token is None else list(token.verbs),
            universes=names,
            limited=limited,
            metrics=authorizer.is_allowed(METRICS),
            reports=reports and authorizer.is_allowed(METRICS),
            live=live and authorizer.is_allowed(METRICS),
        )
        return _session_response(session)

    return Route("/console/session", answer, methods=["GET"])


def _session_response(session: Session) -> Response:
    headers = {**HEADERS, "Cache-Control": "no-store"}
    return Response(msgspec.json.encode(session), headers=headers, media_type=JSON)


async def _universes(transport: ServerTransport, authorizer: Authorizer) -> list[str]:
    request = ListUniverses(limit=CONSOLE_UNIVERSES_MAX, tier=Tier.IMPORTANT)
    found = (await transport.call(request)).names if authorizer.is_allowed(request) else []
    return sorted({UNIVERSE, *found})
