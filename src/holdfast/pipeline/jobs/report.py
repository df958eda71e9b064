"""`report`: write an HTML page with the aggregates of the lake. The page loads nothing else.

    <lake>/reports/20261115T120500Z.html     this report
    <lake>/reports/latest.html               the same
    <lake>/reports/latest.json               its totals, for programs

Files are replaced atomically. The job needs no executors: aggregates are small.
"""

import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

import msgspec

from holdfast.pipeline.config import Config, JobResult
from holdfast.pipeline.lake import Lake
from holdfast.pipeline.lake.atomic_files import replace_file
from holdfast.pipeline.reports.facts import collect
from holdfast.pipeline.reports.page import page

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FOLDER: Final = "reports"


def run(
    spark: "SparkSession | None",
    config: Config,
    *,
    progress: Callable[[str, int, int], None] | None = None,
    now: datetime | None = None,
) -> JobResult:
    """Write a report of the latest results of `rollup`, `audit` and `reachability`."""
    del spark
    started, now = time.monotonic(), now or datetime.now(UTC)
    lake = Lake(config.lake, config.storage)
    facts = collect(lake, made_at=now, universes=config.universes)
    name = f"{now:%Y%m%dT%H%M%SZ}.html"
    data = page(facts).encode()
    totals = {"made_at": now, "report": name, "totals": facts.totals}
    location = lake.location.child(FOLDER)
    written = {name: data, "latest.html": data, "latest.json": msgspec.json.format(msgspec.json.encode(totals)) + b"\n"}
    for n, (path, body) in enumerate(written.items(), 1):
        replace_file(location, path, body)
        if progress is not None:
            progress("files", n, len(written))
    rows = {name: total for name, total in facts.totals.items() if total is not None}
    notes = [f"{location.url}/{name}"]
    return JobResult(job="report", ok=True, rows=rows, seconds=time.monotonic() - started, notes=notes)
