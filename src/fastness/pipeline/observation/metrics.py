"""Runs and the state of a lake as Prometheus metrics: for a scrape, or for node_exporter's textfile collector."""

from collections.abc import Iterable
from datetime import datetime
from pathlib import Path

from prometheus_client import CollectorRegistry, Gauge, generate_latest, write_to_textfile

from fastness.errors import PathUnusable
from fastness.pipeline.config import JobResult
from fastness.pipeline.observation.runs import RunRecord, RunRecorder
from fastness.pipeline.observation.status import TableStatus


class MetricsFile:
    """An observer that writes the metrics of all jobs of a lake into a file, after each job."""

    def __init__(self, path: str, recorder: RunRecorder) -> None:
        """Create an observer; it must come after the recorder in the list of observers.

        Raises:
            PathUnusable: the folder of the file does not exist.
        """
        if not Path(path).absolute().parent.is_dir():
            raise PathUnusable(f"--metrics {path}: the folder {Path(path).absolute().parent} does not exist; create it")
        self._path = path
        self._recorder = recorder

    def started(self, job: str) -> None:
        del job

    def completed(self, result: JobResult) -> None:
        del result
        self.write()

    def failed(self, job: str, error: BaseException) -> None:
        del job, error
        self.write()

    def write(self) -> None:
        write_file(self._path, registry(self._recorder.records.values()))


def registry(runs: Iterable[RunRecord], tables: Iterable[TableStatus] = ()) -> CollectorRegistry:
    """The metrics; docs/metrics.md lists them."""
    found = CollectorRegistry()
    _add_runs(found, runs)
    _add_tables(found, tables)
    return found


def text(metrics: CollectorRegistry) -> bytes:
    """The metrics in the Prometheus text format."""
    return generate_latest(metrics)


def write_file(path: str, metrics: CollectorRegistry) -> None:
    """Replace a file by the metrics, atomically.

    Raises:
        PathUnusable: the file cannot be written.
    """
    try:
        write_to_textfile(path, metrics)
    except OSError as error:
        raise PathUnusable(f"--metrics {path}: {error.strerror or error}; give a file in a writable folder") from error


def _add_runs(found: CollectorRegistry, runs: Iterable[RunRecord]) -> None:
    def gauge(name: str, meaning: str, *labels: str) -> Gauge:
        return Gauge(f"fastness_pipeline_{name}", meaning, ["job", *labels], registry=found)

    started = gauge("job_started_timestamp_seconds", "Start of the last run")
    ended = gauge("job_ended_timestamp_seconds", "End of the last run, or of its last round with --follow")
    completed = gauge("job_completed_timestamp_seconds", "End of the last run that did not fail")
    seconds = gauge("job_seconds", "Duration of the last run")
    failed = gauge("job_failed", "1 if the last run failed")
    findings = gauge("job_findings", "Findings of the last run: damage")
    rows = gauge("job_rows", "Rows that the last run wrote or counted", "table")
    for run in runs:
        _set_time(started, run.started_at, run.job)
        _set_time(ended, run.ended_at, run.job)
        _set_time(completed, run.completed_at, run.job)
        seconds.labels(run.job).set(run.seconds)
        failed.labels(run.job).set(run.state == "failed")
        findings.labels(run.job).set(run.findings)
        for table, count in run.rows.items():
            rows.labels(run.job, table).set(count)


def _add_tables(found: CollectorRegistry, tables: Iterable[TableStatus]) -> None:
    def gauge(name: str, meaning: str, *labels: str) -> Gauge:
        return Gauge(f"fastness_pipeline_table_{name}", meaning, ["table", *labels], registry=found)

    rows, size = gauge("rows", "Rows"), gauge("bytes", "Size of the current files")
    committed = gauge("committed_timestamp_seconds", "Time of the last commit")
    quarantined = gauge("quarantined_ranges", "Ranges that could not be read")
    lag = gauge("lag", "What the plane has and the table lacks", "unit")
    for table in tables:
        rows.labels(table.table).set(table.rows)
        size.labels(table.table).set(table.bytes)
        _set_time(committed, table.committed_at, table.table)
        quarantined.labels(table.table).set(table.quarantined)
        if table.lag is not None:
            lag.labels(table.table, table.lag.unit).set(table.lag.amount)


def _set_time(gauge: Gauge, at: datetime | None, label: str) -> None:
    if at is not None:
        gauge.labels(label).set(at.timestamp())
