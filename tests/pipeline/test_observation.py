"""What others see of the pipeline: records of runs, the status of a lake, metrics, and health checks."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from moto.server import ThreadedMotoServer
from prometheus_client.parser import text_string_to_metric_families

from fastness.cli import exit_codes
from fastness.cli.main import root
from fastness.cli.pipeline_observers import Observation
from fastness.errors import InvalidArgument, PathUnusable, Unreachable
from fastness.limits import FOLLOW_STALL_SECONDS, RUN_RECORD_SECONDS
from fastness.pipeline import jobs
from fastness.pipeline.config import Config, JobResult
from fastness.pipeline.lake.locations import Location
from fastness.pipeline.observation import metrics
from fastness.pipeline.observation.health import FollowHealth, serve_health
from fastness.pipeline.observation.runs import RunRecorder, read_records
from fastness.pipeline.observation.status import lake_status
from fastness.pipeline.views import View, open_view, shared_view
from tests.pipeline import planes
from tests.support.waiting import POLLS_MAX_SPARK, eventually

DOCS = Path(__file__).parents[2] / "docs"
NOW = datetime(2026, 11, 15, 12, tzinfo=UTC)
WAIT_SECONDS = 120


@pytest.fixture
def built(tmp_path: Path) -> planes.Built:
    return planes.copy(tmp_path / "data", worlds=3, entries=150, entities=5, messages=10, activity=10)


@pytest.fixture
def config(built: planes.Built, tmp_path: Path) -> Config:
    return Config(data=built.url, lake=str(tmp_path / "lake"))


class Time:
    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> datetime:
        return self.now


def recorder(config: Config, time: Time | None = None) -> RunRecorder:
    return RunRecorder(Location(config.lake), time or Time())


def status(*words: str, code: int = 0) -> Result:
    result = CliRunner().invoke(root, ["pipeline", "status", *words])
    assert result.exit_code == code, result.output
    return result


def result_of(job: str, *, ok: bool = True, **rows: int) -> JobResult:
    return JobResult(job=job, ok=ok, rows=rows, seconds=1.5, findings=[] if ok else [{"reason": "checksum"}])


# Records of runs.


def test_runs_are_recorded_in_the_lake(config: Config) -> None:
    time = Time()
    observer = recorder(config, time)
    result = jobs.run("ingest", None, config, observers=[observer])
    found = read_records(Location(config.lake))["ingest"]
    assert (found.state, found.rows, found.completed_at) == ("ok", result.rows, NOW)
    time.now += timedelta(hours=1)
    broken = Config(data="dir:/no/such/plane", lake=config.lake)
    with pytest.raises(Exception, match="/no/such/plane"):
        jobs.run("ingest", None, broken, observers=[recorder(config, time)])
    failed = read_records(Location(config.lake))["ingest"]
    assert failed.state == "failed"
    assert "/no/such/plane" in (failed.error or "")
    assert failed.started_at == failed.ended_at == NOW + timedelta(hours=1)
    assert failed.completed_at == NOW  # Of the run before.


def test_failed_first_run_creates_no_lake(config: Config, tmp_path: Path) -> None:
    with pytest.raises(Exception, match="/no/such/plane"):
        jobs.run("ingest", None, Config(data="dir:/no/such/plane", lake=config.lake), observers=[recorder(config)])
    assert not (tmp_path / "lake").exists()


def test_unreadable_record_is_ignored(config: Config) -> None:
    jobs.run("ingest", None, config, observers=[recorder(config)])
    Path(config.lake, "runs", "ingest.json").write_text("{")
    assert read_records(Location(config.lake)) == {}


def test_failing_observer_does_not_fail_the_job(config: Config, caplog: pytest.LogCaptureFixture) -> None:
    class Failing:
        def started(self, job: str) -> None:
            raise OSError(f"no space for {job}")

        def completed(self, result: JobResult) -> None:
            raise RuntimeError(result.job)

        def failed(self, job: str, error: BaseException) -> None:
            raise AssertionError(job, error)

    assert jobs.run("ingest", None, config, observers=[Failing()]).ok
    assert "Failing failed, the job continues: no space for ingest" in caplog.text


def test_rounds_of_a_follow_run_are_written_now_and_then(config: Config) -> None:
    time = Time()
    observer = recorder(config, time)
    observer.started("ingest")
    for _ in range(3):
        observer.round_ended(result_of("ingest", journal=7))
        time.now += timedelta(seconds=RUN_RECORD_SECONDS / 2)
    assert observer.records["ingest"].ended_at == NOW + timedelta(seconds=RUN_RECORD_SECONDS)
    assert read_records(Location(config.lake))["ingest"].ended_at == NOW + timedelta(seconds=RUN_RECORD_SECONDS)
    time.now += timedelta(seconds=1)
    observer.round_ended(result_of("ingest", journal=8))
    assert read_records(Location(config.lake))["ingest"].rows == {"journal": 7}


# Status.


def test_status_shows_tables_marks_and_the_lag_behind_the_plane(
    built: planes.Built, config: Config, tmp_path: Path
) -> None:
    jobs.run("ingest", None, config, observers=[recorder(config)])
    with open_view(config) as view:
        tables = {table.table: table for table in lake_status(config, view).tables}
    assert {name: table.lag.amount for name, table in tables.items() if table.lag} == {
        "journal": 0,
        "activity": 0,
        "entity_changes": 0,
    }
    assert tables["journal"].rows == built.entries
    assert tables["journal"].marks == 2 * len(built.worlds)  # The height, and the fingerprint of the last record.
    assert tables["journal"].committed_at is not None
    written = max(each.stat().st_mtime for each in Path(config.lake).glob("journal/_delta_log/*.json"))
    assert abs(tables["journal"].committed_at - datetime.fromtimestamp(written, UTC)) < timedelta(hours=1)
    planes.extend(tmp_path / "data", built.worlds[:2], 10)
    with open_view(config) as view:
        behind = {table.table: table for table in lake_status(config, view).tables}
    assert behind["journal"].lag is not None
    assert (behind["journal"].lag.sources, behind["journal"].lag.amount) == (2, 20)
    assert all(table.lag is None for table in lake_status(config).tables)


@pytest.mark.rotating
def test_status_and_records_of_a_lake_in_an_object_store(built: planes.Built) -> None:
    moto = ThreadedMotoServer(port=0, verbose=False)
    moto.start()
    try:
        endpoint = "http://{}:{}".format(*moto.get_host_and_port())
        urllib.request.urlopen(urllib.request.Request(f"{endpoint}/bucket", method="PUT")).close()
        keys = {"aws_access_key_id": "x", "aws_secret_access_key": "y", "aws_region": "us-east-1"}
        storage = {"aws_endpoint": endpoint, "aws_allow_http": "true", **keys}
        remote = Config(data=built.url, lake="s3://bucket/lake", storage=storage)
        location = Location(remote.lake, storage)
        jobs.run("ingest", None, remote, observers=[RunRecorder(location)])
        found = lake_status(remote)
    finally:
        moto.stop()
    assert [(run.job, run.state) for run in found.runs] == [("ingest", "ok")]
    assert {table.table: table.rows for table in found.tables}["journal"] == built.entries
    assert all(table.committed_at is not None for table in found.tables)


def test_status_command_prints_text_and_json(built: planes.Built, config: Config) -> None:
    jobs.run("ingest", None, config, observers=[recorder(config)])
    words = ("--lake", config.lake, "--data", built.url)
    text = status(*words).stdout
    assert re.search(r"^ingest +ok +2026-11-15 12:00:00Z", text, re.MULTILINE)
    assert re.search(rf"^journal +{built.entries} .* 0 records$", text, re.MULTILINE)
    found = json.loads(status(*words, "--json").stdout)
    assert [run["job"] for run in found["runs"]] == ["ingest"]
    journal = next(table for table in found["tables"] if table["table"] == "journal")
    assert (journal["rows"], journal["lag"]) == (built.entries, {"sources": 0, "amount": 0, "unit": "records"})


def test_status_of_damaged_data_has_its_exit_code(built: planes.Built, config: Config, tmp_path: Path) -> None:
    planes.flip_byte(tmp_path / "data", built.worlds[1])
    jobs.run("ingest", None, config, observers=[recorder(config)])
    found = json.loads(status("--lake", config.lake, "--json", code=exit_codes.DAMAGED).stdout)
    assert {table["table"]: table["quarantined"] for table in found["tables"]}["journal"] == 1
    assert found["runs"][0]["state"] == "findings"


def test_status_shows_the_error_of_the_last_run(config: Config) -> None:
    observer = recorder(config)
    observer.completed(result_of("ingest"))
    observer.failed("audit", Unreachable("The plane does not answer"))
    text = status("--lake", config.lake).stdout
    assert "✗ audit: The plane does not answer" in text
    assert "No tables yet." in status("--lake", config.lake).stderr


def test_status_without_a_lake_is_not_found(tmp_path: Path) -> None:
    assert "There is no lake at" in status("--lake", str(tmp_path / "nothing"), code=4).stderr
    assert not (tmp_path / "nothing").exists()


# Metrics.


def samples(text: str) -> dict[tuple[str, ...], float]:
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_metrics_file_has_every_job_of_the_lake(built: planes.Built, config: Config, tmp_path: Path) -> None:
    path = tmp_path / "fastness.prom"
    jobs.run("ingest", None, config, observers=[recorder(config)])
    observer = recorder(config)
    jobs.run("report", None, config, observers=[observer, metrics.MetricsFile(str(path), observer)])
    found = samples(path.read_text())
    assert found["fastness_pipeline_job_rows", "ingest", "journal"] == built.entries
    assert found["fastness_pipeline_job_completed_timestamp_seconds", "ingest"] == NOW.timestamp()
    assert found["fastness_pipeline_job_failed", "report"] == 0
    status("--lake", config.lake, "--data", built.url, "--metrics", str(path))
    found = samples(path.read_text())
    assert found["fastness_pipeline_table_rows", "journal"] == built.entries
    assert found["fastness_pipeline_table_lag", "journal", "records"] == 0
    assert [file.name for file in tmp_path.glob("*.prom*")] == ["fastness.prom"]


def test_metrics_are_documented(config: Config) -> None:
    jobs.run("ingest", None, config, observers=[recorder(config)])
    with open_view(config) as view:
        found = lake_status(config, view)
    text = metrics.text(metrics.registry(found.runs, found.tables)).decode()
    names = {family.name for family in text_string_to_metric_families(text)}
    assert names == set(re.findall(r"`(fastness_pipeline_\w+)`", (DOCS / "metrics.md").read_text()))


def test_metrics_file_in_a_missing_folder_is_refused_before_the_run(config: Config, tmp_path: Path) -> None:
    with pytest.raises(PathUnusable, match="does not exist"):
        metrics.MetricsFile(str(tmp_path / "no" / "x.prom"), recorder(config))


# Health.


def get(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=WAIT_SECONDS) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_health_follows_the_rounds() -> None:
    now = [0.0]
    health = FollowHealth(lambda: now[0])
    with serve_health("0", health, lambda: b"x 1\n") as port:
        assert get(port, "/healthz")[0] == 200
        assert get(port, "/readyz")[0] == 503  # No round has ended yet.
        health.round_ended(result_of("ingest"))
        assert get(port, "/readyz")[0] == 200
        health.round_ended(Unreachable("The plane is being restarted"))
        status, body = get(port, "/readyz")
        assert (status, json.loads(body)["error"]) == (503, "The plane is being restarted")
        assert get(port, "/healthz")[0] == 200  # A restart of this process would not help.
        health.round_ended(result_of("ingest"))
        now[0] = FOLLOW_STALL_SECONDS - 1
        assert get(port, "/healthz")[0] == 200
        now[0] = FOLLOW_STALL_SECONDS
        assert get(port, "/healthz")[0] == get(port, "/readyz")[0] == 503
        health.beat()
        assert get(port, "/healthz")[0] == 200
        assert get(port, "/metrics") == (200, "x 1\n")
        assert get(port, "/other")[0] == 404


@pytest.mark.parametrize("address", ["x", "host:", "1.2.3.4:99999", "::"])
def test_invalid_health_address_is_refused(address: str) -> None:
    with pytest.raises(InvalidArgument, match="--health"), serve_health(address, FollowHealth(), bytes):
        pass


def test_health_port_in_use_is_refused() -> None:
    with (
        serve_health("0", FollowHealth(), bytes) as port,
        pytest.raises(PathUnusable, match=f"Port {port} of 127.0.0.1 cannot be used"),
        serve_health(str(port), FollowHealth(), bytes),
    ):
        pass


def test_round_callback_gets_results_and_errors(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    from fastness.pipeline.jobs import ingest

    stop = threading.Event()
    outcomes: list[object] = []
    rounds = iter(range(100))

    def open_later(given: Config, view: View | None) -> Any:
        match next(rounds):
            case 1:
                raise Unreachable("The server is being restarted")
            case 2:
                stop.set()
        return shared_view(given, view)

    monkeypatch.setattr(ingest, "shared_view", open_later)
    jobs.run("ingest", None, config, follow=True, every_seconds=0.0, stop=stop, round_ended=outcomes.append)
    assert [type(outcome) for outcome in outcomes] == [JobResult, Unreachable, JobResult]


def test_health_needs_follow(tmp_path: Path) -> None:
    words = ["pipeline", "ingest", "--data", "dir:x", "--lake", str(tmp_path / "lake"), "--health", "0"]
    result = CliRunner().invoke(root, words)
    assert (result.exit_code, "--follow" in result.stderr) == (2, True)


def test_followed_ingest_is_a_service_that_ends_at_sigterm(built: planes.Built, config: Config, tmp_path: Path) -> None:
    observation = Observation(config, metrics=str(tmp_path / "fastness.prom"))
    before = signal.getsignal(signal.SIGTERM)
    with observation.following("0") as options:
        ended, end = options["round_ended"], threading.Event()

        def round_ended(outcome: Any) -> None:
            ended(outcome)
            assert observation.health.is_ready
            if end.is_set():
                os.kill(os.getpid(), signal.SIGTERM)
            end.set()

        options["round_ended"] = round_ended
        options["every_seconds"] = 0.01
        result = jobs.run("ingest", None, config, observers=observation.observers, **options)
    assert signal.getsignal(signal.SIGTERM) == before
    assert result.rows["journal"] == built.entries
    found = samples((tmp_path / "fastness.prom").read_text())
    assert found["fastness_pipeline_job_rows", "ingest", "journal"] == built.entries
    assert read_records(Location(config.lake))["ingest"].state == "ok"


@pytest.mark.thorough
def test_followed_ingest_answers_health_checks_in_its_own_process(built: planes.Built, config: Config) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = ["ingest", "--data", built.url, "--lake", config.lake, "--follow", "--json"]
    command = [sys.executable, "-m", "fastness.cli", "pipeline", *words, "--health", f"127.0.0.1:{port}"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FASTNESS_")}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            eventually(
                lambda: is_ready(port) or process.poll() is not None, "that it is ready", polls_max=POLLS_MAX_SPARK
            )
            process.send_signal(signal.SIGTERM)
            output, errors = process.communicate()
            assert process.returncode == 0, errors
        finally:
            process.kill()
    assert json.loads(output)["rows"]["journal"] == built.entries


def is_ready(port: int) -> bool:
    try:
        return get(port, "/readyz")[0] == 200
    except OSError:  # The process has not opened its port yet.
        return False
