"""`load`: rows of a table or of files into queues, mailboxes or inboxes, each once.

A load has a name. Run again under the same name it writes what is missing and nothing else, whatever became of the
messages since; `forget` makes the plane forget which rows it has had.
"""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import cbor2

from holdfast.errors import InvalidArgument
from holdfast.kv import Subspace
from holdfast.names import UNIVERSE, checked_name
from holdfast.pipeline import loading
from holdfast.pipeline.config import Config, JobResult
from holdfast.pipeline.loading import Load
from holdfast.pipeline.views import open_view
from holdfast.runtime.maintenance.scan import walk
from holdfast.wire.states import GetState, RemoveState

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
        target: queues, mail or inboxes. Columns are named after what they fill; if none fills the payload, the columns
            that nothing else takes become its JSON.
        load: the name of the load.
        key: the column that tells rows apart.
        queue: where rows go that name no queue.
        format: of the files, if their name does not say: parquet, json, csv, orc, or any other that Spark reads.
        staging: a store that executors reach, where they leave rows for a data directory.

    Raises:
        InvalidArgument: the rows do not fit the target.
    """
    del progress  # Spark's own tasks are all there is to tell of.
    begun = time.monotonic()
    universe = config.universes[0] if config.universes else UNIVERSE
    what = Load(checked_name("load", load), target, key, queue, universe)
    frame = _frame(spark, source, format)
    if target in loading.COLUMNS:
        frame = _with_body(frame, what)
    loading.check_columns(what, frame.columns)
    options = {"url": config.data, "table": target, "load": load, "key": key, "universe": universe}
    given = {"queue": queue, "token": config.token, "objects": config.objects, "staging": staging}
    given |= {"ca": config.ca, "cert": config.cert, "certKey": config.cert_key}
    options |= {name: value for name, value in given.items() if value is not None}
    options |= {f"storage.{name}": value for name, value in config.storage.items()}
    frame.write.format("holdfast").options(**options).mode("append").save()
    written, known = _counts(config, what)
    notes = [f"{known:,} rows had been written before, and were passed over"] if known else []
    return JobResult(job="load", ok=True, rows={target: written}, seconds=time.monotonic() - begun, notes=notes)


def forget(config: Config, load: str) -> int:
    """Make the plane forget which rows of a load it has had; how many they were. The rows themselves stay."""
    load = checked_name("load", load)
    count = 0
    # A view is of a moment that is past, so the plane can be changed beside it.
    with open_view(config) as view, loading.opened(config) as transport:
        for universe in view.universes():
            room = Subspace("u", universe, "states")
            for key, _ in walk(view.database, room.key(f"loads/{load}"), room.key(f"loads/{load}/~")):
                name = room.unpack(key)[0]
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
    raise InvalidArgument(f"{source!r} is no table and no file of a known kind; say which with `format`")


def _with_body(frame: "DataFrame", load: Load) -> "DataFrame":
    """The rows, with whatever has no other use as the JSON of their payload, if they have none."""
    from pyspark.sql import functions

    body = _BODY[load.target]
    if body in frame.columns:
        return frame
    needed, known = loading.COLUMNS[load.target]
    taken = {*needed, *known}
    rest = [name for name in frame.columns if name not in taken]
    if not rest:
        raise InvalidArgument(f"Nothing is left to be the {body} of a row; give a column of that name")
    kept = [name for name in frame.columns if name in taken or name == load.key]
    return frame.select(*kept, functions.to_json(functions.struct(*rest)).alias(body))


def _counts(config: Config, load: Load) -> tuple[int, int]:
    with loading.opened(config) as transport:
        found = transport.call(GetState(loading.summary_key(load), load.universe)).state
    summary = cbor2.loads(found.value) if found is not None else {}
    return summary.get("written", 0), summary.get("known", 0)
