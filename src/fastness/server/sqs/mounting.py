"""Mounts the SQS endpoint: under `/sqs` of the main port, and at the root of a port of its own."""

from typing import Final

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from fastness.errors import InvalidArgument
from fastness.server.context import ServerContext
from fastness.server.http.limits import HttpLimits
from fastness.server.problems import HttpError
from fastness.server.sqs.endpoint import SqsEndpoint
from fastness.server.sqs.options import SqsOptions
from fastness.server.tokens import TokenAuthenticator, is_loopback

PATH: Final = "/sqs"


def open_sqs(
    context: ServerContext, limits: HttpLimits, options: SqsOptions, tokens: TokenAuthenticator | None
) -> SqsEndpoint | None:
    """The endpoint; None if it is off. `tokens` knows the access keys, unless requests need no signature."""
    if not options.enabled:
        return None
    # Imported here: most servers do not need them.
    from fastness.server.sqs.actions import SqsActions
    from fastness.server.sqs.authentication import SqsAnonymous, SqsAuthenticator

    authentication = SqsAnonymous(context, options) if tokens is None else SqsAuthenticator(context, options, tokens)
    return SqsEndpoint(context, SqsActions(context), authentication, url=options.url, limits=limits)


def check_sqs(host: str, options: SqsOptions) -> None:
    """Return if a server may offer SQS at `host`.

    Raises:
        InvalidArgument: requests need no signature, and it is not a loopback address.
    """
    if options.anonymous and not is_loopback(host):
        raise InvalidArgument(
            f"{host} is not a loopback address: --sqs-anonymous is refused, because every program of the network could "
            "use all queues. Leave it out, and create access keys with `fastness token create NAME --sqs`"
        )


def mounted(endpoint: SqsEndpoint, app: ASGIApp) -> ASGIApp:
    """The app with the endpoint under `/sqs`.

    The endpoint is in front of the router, whose middleware and some hundred routes would take longer than decoding
    and encoding a request.
    """
    answer = endpoint.under(PATH)

    async def call_app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and is_sqs_path(scope["path"]):
            await answer(scope, receive, send)
        else:
            await app(scope, receive, send)

    return call_app


def is_sqs_path(path: str) -> bool:
    """Whether a path of the main port is that of an SQS request."""
    return path.startswith(PATH) and (len(path) == len(PATH) or path[len(PATH)] == "/")


def refusal_routes() -> list[BaseRoute]:
    """`/sqs` of a server that does not offer it: a refusal that says why."""

    async def refuse(request: HttpRequest) -> Response:
        del request
        raise HttpError(404, "not_found", "This server does not offer SQS; serve with --sqs")

    return [Route(path, refuse, methods=["GET", "POST"]) for path in (PATH, f"{PATH}/{{rest:path}}")]
