"""All routes of the console."""

from starlette.routing import Route

from holdfast.server.console import files, sessions
from holdfast.server.console.events import ConsoleEvents
from holdfast.server.console.reports import Reports
from holdfast.server.console.samples import Samples
from holdfast.server.context import ServerContext
from holdfast.server.metrics import Metrics
from holdfast.server.transport import ServerTransport


def console_routes(
    context: ServerContext, metrics: Metrics, transport: ServerTransport, *, reports: str | None = None
) -> list[Route]:
    """The routes of the console.

    `transport` is not measured, so that the console's own reads do not count in the metrics. `reports` is a folder.
    """
    return [
        *files.routes(),
        sessions.route(context, transport, reports=reports is not None),
        ConsoleEvents(context, Samples(metrics, transport)).route(),
        *(Reports(context, reports).routes() if reports is not None else ()),
    ]
