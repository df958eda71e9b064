"""`load`: load rows of a table or of files into queues, mailboxes or inboxes, each exactly once.

A load has a name. Running it again under the same name writes only the missing rows, even if the earlier messages were
consumed since. `forget` deletes the record of which rows were written.
"""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import cbor2

from fastness.errors import InvalidArgument
from fastness.kv import Subspace
from fastness.names import UNIVERSE, checked_name
from fastness.pipeline import loading
from fastness.pipeline.config import Config, JobResult
from fastness.pipeline.loading import Load
from fastness.pipeline.views import open_view
from fastness.runtime.maintenance.scan import scan_range
from fastness.wire.states import GetState, RemoveState

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_FORMATS: Final = {
    ".parquet": "parquet",
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
    ".csv": "csv",
    ".orc": "orc",
}
_BODY: Final = {"queues": "payload", "inboxes": "payload", "mail": "body"}


def run(
    spark: "SparkSession",
    config: Config,
    *,
    source: "DataFrame | str",
    target: str = "queues",
    load: str,
    key: str = "key",
    queue: str | None = None,
    format: str | None = None,
    staging: str | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> JobResult:
    """Write every row of `source` that was not written before.

    Args:
        source: a DataFrame, a path of files, or the name of a table that Spark knows.
        target: queues, mail or inboxes. Columns are named after the fields they fill; without a payload column, the
            remaining columns become its JSON.
        load: the name of the load.
        key: the column that identifies a row.
        queue: the queue of rows that name none.
        format: of the files, if their suffix does not imply it: parquet, json, csv, orc, or any other that Spark reads.
        staging: a store that all executors reach, where they put rows for a data directory.

    Raises:
        InvalidArgument: the rows do not fit the target.
    """
    del progress  # Spark's task progress is all there is to report.
    started = time.monotonic()
    universe = config.universes[0] if config.universes else UNIVERSE
    parameters = Load(checked_name("load", load), target, key, queue, universe)
    frame = _frame(spark, source, format)
    if target in loading.COLUMNS:
        frame = _with_body(frame, parameters)
    loading.check_columns(parameters, frame.columns)
    options = {"url": config.data, "table": target, "load": load, "key": key, "universe": universe}
    optional = {"queue": queue, "token": config.token, "objects": config.objects, "staging": staging}
    optional |= {"ca": config.ca, "cert": config.cert, "certKey": config.cert_key}
    options |= {name: value for name, value in optional.items() if value is not None}
    options |= {f"storage.{name}": value for name, value in config.storage.items()}
    frame.write.format("fastness").options(**options).mode("append").save()
    written, known = _counts(config, parameters)
    notes = [f"{known:,} rows were written before and skipped"] if known else []
    return JobResult(job="load", ok=True, rows={target: written}, seconds=time.monotonic() - started, notes=notes)


def forget(config: Config, load: str) -> int:
    """Delete the record of which rows a load has written, and return their number. The rows themselves stay."""
    load = checked_name("load", load)
    count = 0
    # The view is a snapshot, so the plane can be changed while it is read.
    with open_view(config) as view, loading.open_transport(config) as transport:
        for universe in view.universes():
            subspace = Subspace("u", universe, "states")
            for key, _ in scan_range(view.database, subspace.key(f"loads/{load}"), subspace.key(f"loads/{load}/~")):
                name = subspace.unpack(key)[0]
                if name == f"loads/{load}" or name.startswith(f"loads/{load}/"):
                    transport.call(RemoveState(name, universe=universe))
                    count += name != f"loads/{load}"
    return count


def _frame(spark: "SparkSession", source: "DataFrame | str", format: str | None) -> "DataFrame":
    if not isinstance(source, str):
        return source
    suffix = source[source.rfind(".") :].lower() if "." in source else ""
    chosen = format or _FORMATS.get(suffix)
    if chosen is not None:
        reader = spark.read.format(chosen)
        return (reader.option("header", "true") if chosen == "csv" else reader).load(source)
    if "/" in source:
        return spark.read.parquet(source)
    if spark.catalog.tableExists(source):
        return spark.table(source)
    raise InvalidArgument(f"{source!r} is neither a table nor a file with a known suffix; set `format`")


def _with_body(frame: "DataFrame", load: Load) -> "DataFrame":
    """The rows; if they have no payload column, the unused columns become its JSON."""
    from pyspark.sql import functions

    body = _BODY[load.target]
    if body in frame.columns:
        return frame
    needed, known = loading.COLUMNS[load.target]
    used = {*needed, *known}
    rest = [name for name in frame.columns if name not in used]
    if not rest:
        raise InvalidArgument(f"No column is left for the {body} of a row; add a column named {body}")
    kept = [name for name in frame.columns if name in used or name == load.key]
    return frame.select(*kept, functions.to_json(functions.struct(*rest)).alias(body))


def _counts(config: Config, load: Load) -> tuple[int, int]:
    with loading.open_transport(config) as transport:
        found = transport.call(GetState(loading.summary_key(load), load.universe)).state
    summary = cbor2.loads(found.value) if found is not None else {}
    return summary.get("written", 0), summary.get("known", 0)
