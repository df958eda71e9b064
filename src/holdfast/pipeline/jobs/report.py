"""`report`: write an HTML page with the aggregates of the lake. The page loads nothing else.

    <lake>/reports/20261115T120500Z.html     this report
    <lake>/reports/latest.html               the same
    <lake>/reports/latest.json               its totals, for programs

Files are replaced atomically. The job needs no executors: aggregates are small.
"""

import os
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from holdfast.pipeline.config import Config, JobResult
from holdfast.pipeline.journal_chunks import Stores
from holdfast.pipeline.lake import Lake
from holdfast.pipeline.lake.locations import Location
from holdfast.pipeline.reports.facts import collect
from holdfast.pipeline.reports.page import page

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FOLDER: Final = "reports"
_TYPES: Final = {".html": "text/html; charset=utf-8", ".json": "application/json"}


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
        write(location, path, body)
        if progress is not None:
            progress("files", n, len(written))
    rows = {name: total for name, total in facts.totals.items() if total is not None}
    notes = [f"{location.url}/{name}"]
    return JobResult(job="report", ok=True, rows=rows, seconds=time.monotonic() - started, notes=notes)


def write(location: Location, path: str, data: bytes) -> None:
    """Write a file atomically: a reader gets the old version or the new one."""
    if not location.is_local:
        Stores(location.storage)(location.url).put(path, data, content_type=_TYPES[Path(path).suffix])
        return
    folder = Path(location.url)
    folder.mkdir(parents=True, exist_ok=True)
    descriptor, staged = tempfile.mkstemp(dir=folder, prefix=".", suffix=".part")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            os.fchmod(file.fileno(), 0o644)
        Path(staged).replace(folder / path)
    except BaseException:
        Path(staged).unlink(missing_ok=True)
        raise
    location.sync(path)
