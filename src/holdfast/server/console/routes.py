"""All routes of the console."""

from typing import Any

from starlette.routing import Route

from holdfast.server.console import files, sessions
from holdfast.server.console.events import Watchers
from holdfast.server.console.reports import Reports
from holdfast.server.console.samples import Samples
from holdfast.server.doors import Doors
from holdfast.server.metrics import Metrics


def console_routes(doors: Doors, metrics: Metrics, transport: Any, *, reports: str | None = None) -> list[Route]:
    """The console of a server; `transport` is not measured, so that looking does not count. `reports` is a folder."""
    return [
        *files.routes(),
        sessions.route(doors, transport, reports=reports is not None),
        Watchers(doors, Samples(metrics, transport)).route(),
        *(Reports(doors, reports).routes() if reports is not None else ()),
    ]
