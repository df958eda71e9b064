"""`report`: write an HTML page with the aggregates of the lake. The page loads nothing else.

    <lake>/reports/20261115T120500Z.html     this report
    <lake>/reports/latest.html               the same
    <lake>/reports/latest.json               its totals, for programs

Files are replaced atomically. The job needs no executors: aggregates are small. With `publish`, the totals are stored
in the plane as well, as the report `pipeline`, which agents read over MCP.
"""

import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

import msgspec

from fastness.errors import InvalidArgument
from fastness.handles.sync.plane import Plane
from fastness.names import REPORTS
from fastness.pipeline.config import Config, JobResult
from fastness.pipeline.lake import Lake
from fastness.pipeline.lake.atomic_files import replace_file
from fastness.pipeline.loading import open_transport
from fastness.pipeline.reports.facts import collect
from fastness.pipeline.reports.page import page
from fastness.wire.collections import PutRow

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FOLDER: Final = "reports"
PUBLISHED: Final = "pipeline"  # The name of the report in the plane.


def run(
    spark: "SparkSession | None",
    config: Config,
    *,
    progress: Callable[[str, int, int], None] | None = None,
    now: datetime | None = None,
    publish: bool = False,
) -> JobResult:
    """Write a report of the latest results of `rollup`, `audit` and `reachability`.

    Raises:
        InvalidArgument: it is to be published, and is not of exactly one universe.
    """
    del spark
    if publish and len(config.universes) != 1:
        raise InvalidArgument("A published report is of one universe, whose agents can read it; give --universe once")
    started, now = time.monotonic(), now or datetime.now(UTC)
    lake = Lake(config.lake, config.storage)
    facts = collect(lake, made_at=now, universes=config.universes)
    name = f"{now:%Y%m%dT%H%M%SZ}.html"
    data = page(facts).encode()
    totals = {"made_at": now, "report": name, "totals": facts.totals}
    location = lake.location.child(FOLDER)
    latest = msgspec.json.format(msgspec.json.encode(totals)) + b"\n"
    written = {name: data, "latest.html": data, "latest.json": latest}
    for n, (path, body) in enumerate(written.items(), 1):
        replace_file(location, path, body)
        if progress is not None:
            progress("files", n, len(written))
    rows = {name: total for name, total in facts.totals.items() if total is not None}
    notes = [f"{location.url}/{name}"]
    if publish:
        notes.append(_publish(config, latest))
    return JobResult(job="report", ok=True, rows=rows, seconds=time.monotonic() - started, notes=notes)


def _publish(config: Config, totals: bytes) -> str:
    """Store the totals in the plane, in place of those of the last report; returns the address for agents."""
    (universe,) = config.universes
    with open_transport(config) as transport:
        Plane(transport, universe).collection(REPORTS).commit([PutRow(REPORTS, (PUBLISHED,), totals)])
    return f"fastness://{universe}/{REPORTS}/{PUBLISHED}"
