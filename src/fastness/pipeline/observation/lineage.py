"""OpenLineage events of the jobs: which datasets a run read and wrote, with their columns and row counts.

    START ──► job ──► COMPLETE, with or without findings
                 └──► FAIL, or ABORT if it was interrupted

The events go to a file, one JSON object per line, or to the HTTP API of a lineage server. A job neither fails nor waits
for long because of them: an event that cannot be sent is logged and dropped. docs/pipeline.md lists the datasets.
"""

import http.client
import os
import ssl
import threading
import uuid
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias
from urllib.parse import urlsplit

import msgspec
import pyarrow as pa

from fastness.errors import InvalidUrl, Unreachable
from fastness.limits import LINEAGE_SECONDS, RUN_ERROR_CHARACTERS
from fastness.names import folder_at
from fastness.pipeline.config import Config, JobResult
from fastness.pipeline.lake.locations import Location, parse_location
from fastness.pipeline.schemas import (
    ACTIVITY,
    CONTENTS,
    ENTITY_CHANGES,
    JOURNAL,
    LIVE_QUEUE_MINUTES,
    MAIL,
    MESSAGES,
    PLANES,
    QUARANTINE,
    QUEUE_COUNTERS,
    QUEUE_EVENTS,
    ROLLUPS,
    SEGMENTS,
    SUPERSEDED,
    TABLES,
    UNREACHABLE,
    WORLD_STATE,
    Table,
)
from fastness.pipeline.source import tables as source_tables
from fastness.version import __version__

Event: TypeAlias = dict[str, Any]
PRODUCER: Final = f"urn:fastness:{__version__}"
NAMESPACE: Final = "fastness"
PARENT_VARIABLE: Final = "OPENLINEAGE_PARENT_ID"  # NAMESPACE/JOB/RUN-ID, as Airflow's macros print it.
_SPEC: Final = "https://openlineage.io/spec"
_EVENT_SCHEMA: Final = f"{_SPEC}/2-0-2/OpenLineage.json#/$defs/RunEvent"
_FACETS: Final = {
    "schema": f"{_SPEC}/facets/1-1-1/SchemaDatasetFacet.json#/$defs/SchemaDatasetFacet",
    "outputStatistics": (
        f"{_SPEC}/facets/1-0-2/OutputStatisticsOutputDatasetFacet.json#/$defs/OutputStatisticsOutputDatasetFacet"
    ),
    "parent": f"{_SPEC}/facets/1-0-1/ParentRunFacet.json#/$defs/ParentRunFacet",
    "errorMessage": f"{_SPEC}/facets/1-0-1/ErrorMessageRunFacet.json#/$defs/ErrorMessageRunFacet",
    "jobType": f"{_SPEC}/facets/2-0-3/JobTypeJobFacet.json#/$defs/JobTypeJobFacet",
}
_PATH: Final = "/api/v1/lineage"  # If the URL of the server has no path.


class _Flow(NamedTuple):
    """The tables that a job reads and writes."""

    reads_plane: tuple[str, ...] = ()
    reads_lake: tuple[Table, ...] = ()
    writes_lake: tuple[Table, ...] = ()


_FLOWS: Final[Mapping[str, _Flow]] = {
    "ingest": _Flow(
        ("journal", "segments", "activity", "entities", "queues"),
        (),
        (JOURNAL, SEGMENTS, ACTIVITY, ENTITY_CHANGES, QUEUE_EVENTS, QUEUE_COUNTERS, PLANES, QUARANTINE),
    ),
    "backfill": _Flow(
        ("journal", "segments", "activity", "entities"),
        (),
        (JOURNAL, SEGMENTS, ACTIVITY, ENTITY_CHANGES, QUEUE_EVENTS, QUEUE_COUNTERS, PLANES, QUARANTINE),
    ),
    "audit": _Flow(("journal", "segments"), (), (WORLD_STATE,)),
    "reachability": _Flow(("journal", "queues", "mail", "entities"), (), (UNREACHABLE,)),
    "contents": _Flow(("queues", "mail", "entities"), (), CONTENTS),
    "rollup": _Flow(("queues", "mail"), (ACTIVITY, QUEUE_EVENTS, QUEUE_COUNTERS), (MESSAGES, MAIL, *ROLLUPS)),
    "report": _Flow((), (*ROLLUPS, WORLD_STATE, QUARANTINE, UNREACHABLE), ()),
    "accept": _Flow(
        ("journal", "activity", "entities"),
        (),
        (JOURNAL, SEGMENTS, ACTIVITY, ENTITY_CHANGES, QUEUE_EVENTS, QUEUE_COUNTERS, SUPERSEDED, PLANES, QUARANTINE),
    ),
    "reset": _Flow(
        ("journal", "activity", "entities"),
        (),
        (JOURNAL, SEGMENTS, WORLD_STATE, ACTIVITY, ENTITY_CHANGES, QUEUE_EVENTS, QUARANTINE),
    ),
    "forget": _Flow((), (), tuple(TABLES.values())),
    "live": _Flow(("activity",), (), (LIVE_QUEUE_MINUTES,)),
    "load": _Flow(),
    "vacuum": _Flow((), tuple(TABLES.values()), ()),
}


class Parent(NamedTuple):
    """The run that started this one."""

    namespace: str
    job: str
    run: str


class Lineage:
    """An observer that sends an event when a job starts and when it ends."""

    def __init__(
        self,
        config: Config,
        send: Callable[[bytes], None],
        *,
        parent: Parent | None = None,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._config = config
        self._send = send
        self._now = now
        # The jobs of one command share a parent, so that a lineage server shows them together.
        self._parent = parent or Parent(NAMESPACE, "pipeline", str(uuid.uuid4()))
        self._runs: dict[str, str] = {}

    def started(self, job: str) -> None:
        self._runs[job] = str(uuid.uuid4())
        self._emit("START", job)

    def completed(self, result: JobResult) -> None:
        self._emit("COMPLETE", result.job, rows=result.rows)

    def failed(self, job: str, error: BaseException) -> None:
        text = (str(error) or type(error).__name__)[:RUN_ERROR_CHARACTERS]
        self._emit("FAIL" if isinstance(error, Exception) else "ABORT", job, error=text)

    def _emit(self, kind: str, job: str, *, rows: Mapping[str, int] | None = None, error: str | None = None) -> None:
        parent = self._parent
        facets = {
            "parent": _facet(
                "parent", run={"runId": parent.run}, job={"namespace": parent.namespace, "name": parent.job}
            )
        }
        if error is not None:
            facets["errorMessage"] = _facet("errorMessage", message=error, programmingLanguage="Python")
        job_type = _facet("jobType", processingType="BATCH", integration="FASTNESS", jobType="JOB")
        inputs, outputs = _datasets(job, self._config, rows or {})
        event: Event = {
            "eventType": kind,
            "eventTime": self._now().isoformat(timespec="milliseconds"),
            "run": {"runId": self._runs[job], "facets": facets},
            "job": {"namespace": NAMESPACE, "name": f"pipeline.{job}", "facets": {"jobType": job_type}},
            "inputs": inputs,
            "outputs": outputs,
            "producer": PRODUCER,
            "schemaURL": _EVENT_SCHEMA,
        }
        self._send(msgspec.json.encode(event))


def parent_from(environment: Mapping[str, str]) -> Parent | None:
    """The run that an orchestrator has named in the environment; None if there is none or it cannot be read."""
    parts = environment.get(PARENT_VARIABLE, "").rsplit("/", 2)
    try:
        namespace, job, run = parts
        return Parent(namespace, job, str(uuid.UUID(run)))
    except ValueError:
        return None


def transport(url: str, *, token: str | None = None, tls: ssl.SSLContext | None = None) -> Callable[[bytes], None]:
    """A function that sends an event to a server, or appends it to a file.

    Raises:
        InvalidUrl: it is neither http(s)://… nor file:PATH.
    """
    scheme, _, rest = url.partition(":")
    if scheme in ("http", "https") and rest.startswith("//") and urlsplit(url).hostname:
        return lambda body: _post(url, body, token=token, tls=tls)
    if scheme == "file" and rest.removeprefix("//"):
        path = Path(rest.removeprefix("//"))
        return lambda body: _append(path, body)
    raise InvalidUrl(f"{url!r} cannot receive lineage; use http://HOST:PORT, https://HOST or file:PATH")


def _append(path: Path, body: bytes) -> None:
    # A single write to a file opened for appending is not mixed with those of other runs.
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, body + b"\n")
    finally:
        os.close(descriptor)


def _post(url: str, body: bytes, *, token: str | None, tls: ssl.SSLContext | None) -> None:
    """Send an event, and wait for the answer for a few seconds in total.

    Raises:
        Unreachable: the server did not accept it in time.
    """
    outcome: list[str] = []

    def work() -> None:
        try:
            status = _request(url, body, token, tls)
            outcome.append("" if 200 <= status < 300 else f"it answered with status {status}")
        except (OSError, http.client.HTTPException, ValueError) as error:
            outcome.append(str(error) or type(error).__name__)

    # A socket's timeout restarts with every byte; the thread bounds the whole call.
    thread = threading.Thread(target=work, name="fastness-lineage", daemon=True)
    thread.start()
    thread.join(LINEAGE_SECONDS)
    failure = outcome[0] if outcome else f"it did not answer within {LINEAGE_SECONDS:g} s"
    if failure:
        place = urlsplit(url)
        raise Unreachable(f"The lineage server at {place.hostname}:{place.port or place.scheme} failed: {failure}")


def _request(url: str, body: bytes, token: str | None, tls: ssl.SSLContext | None) -> int:
    place = urlsplit(url)
    host = place.hostname or ""
    connection = (
        http.client.HTTPSConnection(host, place.port, timeout=LINEAGE_SECONDS, context=tls)
        if place.scheme == "https"
        else http.client.HTTPConnection(host, place.port, timeout=LINEAGE_SECONDS)
    )
    headers = {"Content-Type": "application/json", "User-Agent": f"fastness/{__version__}"}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    path = place.path if place.path.strip("/") else _PATH
    try:
        connection.request("POST", f"{path}?{place.query}" if place.query else path, body, headers)
        return connection.getresponse().status
    finally:
        connection.close()


def _datasets(job: str, config: Config, rows: Mapping[str, int]) -> tuple[list[Event], list[Event]]:
    flow = _FLOWS[job]
    namespace = plane_namespace(config.data)
    inputs = [_dataset(namespace, name, source_tables.SCHEMAS[name]) for name in flow.reads_plane]
    if job == "load":
        return inputs, [
            _dataset(namespace, target, source_tables.SCHEMAS.get(target), count) for target, count in rows.items()
        ]
    lake = parse_location(config.lake, config.storage)
    inputs += [_lake_dataset(lake, table) for table in flow.reads_lake]
    outputs = [_lake_dataset(lake, table, rows.get(table.name)) for table in flow.writes_lake]
    if job == "report":
        outputs.append(_file_dataset(lake, "reports/latest.html"))
    return inputs, outputs


def plane_namespace(data: str) -> str:
    """The namespace of a plane's datasets; it has no credentials."""
    if data.startswith("dir:"):
        return f"fastness://{folder_at(data).absolute()}"
    place = urlsplit(data)
    database = place.path if place.scheme.startswith("postgres") else ""
    if "," in place.netloc:  # PostgreSQL may have several hosts, each with its port.
        return f"fastness://{place.netloc.rpartition('@')[2].lower()}{database}"
    port = f":{place.port}" if place.port else ""
    return f"fastness://{place.hostname or ''}{port}{database}"


def _lake_dataset(lake: Location, table: Table, rows: int | None = None) -> Event:
    namespace, name = _storage_name(lake, table.name)
    return _dataset(namespace, name, table.schema, rows)


def _file_dataset(lake: Location, path: str) -> Event:
    return _dataset(*_storage_name(lake, path), None)


def _storage_name(lake: Location, path: str) -> tuple[str, str]:
    """Names by OpenLineage's conventions: `file` and a path, or s3://bucket and a key."""
    if lake.is_local:
        return "file", f"{lake.url}/{path}"
    place = urlsplit(lake.url)
    return f"{place.scheme}://{place.netloc}", f"{place.path}/{path}".lstrip("/")


def _dataset(namespace: str, name: str, schema: pa.Schema | None, rows: int | None = None) -> Event:
    found: Event = {"namespace": namespace, "name": name}
    if schema is not None:
        fields = [{"name": field.name, "type": str(field.type)} for field in schema]
        found["facets"] = {"schema": _facet("schema", fields=fields)}
    if rows is not None:
        found["outputFacets"] = {"outputStatistics": _facet("outputStatistics", rowCount=rows)}
    return found


def _facet(name: str, **fields: Any) -> Event:
    return {"_producer": PRODUCER, "_schemaURL": _FACETS[name], **fields}
