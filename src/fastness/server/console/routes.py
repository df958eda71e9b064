"""All routes of the console."""

from pathlib import Path

from starlette.routing import Route

from fastness.names import folder_at
from fastness.server.console import files, sessions
from fastness.server.console.events import ConsoleEvents
from fastness.server.console.history import History, HistoryRoute
from fastness.server.console.live import LiveAggregates
from fastness.server.console.pipeline_runs import PipelineRuns
from fastness.server.console.reports import Reports
from fastness.server.console.samples import Samples
from fastness.server.context import ServerContext
from fastness.server.metrics import Metrics
from fastness.server.transport import ServerTransport


def console_routes(
    context: ServerContext,
    metrics: Metrics,
    transport: ServerTransport,
    *,
    reports: str | None = None,
    lake: str | None = None,
    history: History | None = None,
) -> list[Route]:
    """The routes of the console.

    `transport` is not measured, so that the console's own reads do not count in the metrics. `reports` and `lake` are
    folders; without `reports`, the reports of the lake are shown. `history` has the samples of charts.
    """
    folder: Path | None = None if lake is None else folder_at(lake).absolute()
    if reports is None and folder is not None:
        reports = str(folder / "reports")
    samples = Samples(metrics, transport) if history is None else history.samples
    return [
        *files.routes(),
        sessions.route(context, transport, reports=reports is not None, live=folder is not None),
        ConsoleEvents(context, samples).route(),
        HistoryRoute(context, history).route(),
        PipelineRuns(context, folder).route(),
        *(Reports(context, reports).routes() if reports is not None else ()),
        *([LiveAggregates(context, folder).route()] if folder is not None else ()),
    ]
