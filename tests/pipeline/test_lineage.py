"""OpenLineage events: their fields, their transports, and that they never fail a job."""

import json
import re
import socketserver
import threading
import uuid
from collections.abc import Iterator
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from click.testing import CliRunner

from fastness.cli.main import root
from fastness.cli.pipeline_observers import Observation
from fastness.errors import InvalidUrl, Unreachable
from fastness.pipeline import jobs
from fastness.pipeline.config import Config, JobResult
from fastness.pipeline.lake import Lake
from fastness.pipeline.observation import lineage
from fastness.pipeline.observation.lineage import Lineage, Parent, transport
from fastness.pipeline.schemas import JOURNAL, TABLES
from tests.pipeline import planes

FACET = {
    "type": "object",
    "required": ["_producer", "_schemaURL"],
    "properties": {
        "_producer": {"type": "string", "format": "uri"},
        "_schemaURL": {
            "type": "string",
            "pattern": r"^https://openlineage\.io/spec/facets/\d+-\d+-\d+/\w+\.json#/\$defs/",
        },
    },
}
FACETS = {"type": "object", "additionalProperties": FACET}
NAMED = {
    "type": "object",
    "required": ["namespace", "name"],
    "properties": {"namespace": {"type": "string"}, "name": {"type": "string", "minLength": 1}, "facets": FACETS},
}
# What the specification requires of a RunEvent.
EVENT = {
    "type": "object",
    "required": ["eventTime", "producer", "schemaURL", "run", "job"],
    "additionalProperties": False,
    "properties": {
        "eventType": {"enum": ["START", "RUNNING", "COMPLETE", "ABORT", "FAIL", "OTHER"]},
        "eventTime": {"type": "string", "format": "date-time"},
        "producer": {"type": "string", "format": "uri"},
        "schemaURL": {"const": "https://openlineage.io/spec/2-0-2/OpenLineage.json#/$defs/RunEvent"},
        "run": {
            "type": "object",
            "required": ["runId"],
            "properties": {
                "runId": {"type": "string", "format": "uuid"},
                "facets": {
                    **FACETS,
                    "properties": {
                        "parent": {"required": ["run", "job"], "properties": {"job": NAMED}},
                        "errorMessage": {"required": ["message", "programmingLanguage"]},
                    },
                },
            },
        },
        "job": {**NAMED, "properties": {**NAMED["properties"], "facets": FACETS}},  # type: ignore[dict-item]
        "inputs": {"type": "array", "items": NAMED},
        "outputs": {
            "type": "array",
            "items": {
                **NAMED,
                "properties": {
                    "outputFacets": {
                        **FACETS,
                        "properties": {
                            "outputStatistics": {
                                "required": ["rowCount"],
                                "properties": {"rowCount": {"type": "integer"}},
                            }
                        },
                    },
                },
            },
        },
    },
}


def check(event: dict[str, Any]) -> None:
    jsonschema.validate(event, EVENT, format_checker=jsonschema.FormatChecker())
    uuid.UUID(event["run"]["runId"])
    uuid.UUID(event["run"]["facets"]["parent"]["run"]["runId"])
    assert datetime.fromisoformat(event["eventTime"]).tzinfo is not None


@pytest.fixture
def config(tmp_path: Path) -> Config:
    built = planes.build(tmp_path / "data", worlds=2, entries=20)
    return Config(data=built.url, lake=str(tmp_path / "lake"))


def events_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_job_sends_its_start_and_its_end_with_datasets(config: Config, tmp_path: Path) -> None:
    send = transport(f"file:{tmp_path / 'events.jsonl'}")
    observer = Lineage(config, send)
    result = jobs.run("ingest", None, config, observers=[observer])
    jobs.run("report", None, config, observers=[observer])
    events = events_of(tmp_path / "events.jsonl")
    for event in events:
        check(event)
    assert [(event["eventType"], event["job"]["name"]) for event in events] == [
        ("START", "pipeline.ingest"),
        ("COMPLETE", "pipeline.ingest"),
        ("START", "pipeline.report"),
        ("COMPLETE", "pipeline.report"),
    ]
    start, end, report, _ = events
    assert start["run"]["runId"] == end["run"]["runId"] != report["run"]["runId"]
    assert start["run"]["facets"]["parent"] == report["run"]["facets"]["parent"]
    journal = next(each for each in end["outputs"] if each["name"].endswith("/journal"))
    assert (journal["namespace"], journal["name"]) == ("file", f"{config.lake}/journal")
    assert journal["outputFacets"]["outputStatistics"]["rowCount"] == result.rows["journal"] > 0
    fields = journal["facets"]["schema"]["fields"]
    assert {"name": "height", "type": "int64"} in fields
    assert [field["name"] for field in fields] == TABLES["journal"].schema.names
    assert {each["namespace"] for each in end["inputs"]} == {f"fastness://{tmp_path / 'data'}"}
    assert {each["name"] for each in end["inputs"]} == {"journal", "segments", "activity", "entities", "queues"}
    assert report["outputs"] == [{"namespace": "file", "name": f"{config.lake}/reports/latest.html"}]


def test_every_job_has_valid_datasets() -> None:
    sent: list[dict[str, Any]] = []
    config = Config(data="postgresql://user:secret@db:5433/plane", lake="s3://bucket/some/lake")
    observer = Lineage(config, lambda body: sent.append(json.loads(body)))
    for job in jobs.JOBS:
        observer.started(job)
        observer.completed(JobResult(job=job, ok=True, rows={"queues": 3}, seconds=1.0))
    for event in sent:
        check(event)
        assert "secret" not in json.dumps(event)
    datasets = [each for event in sent for each in (*event["inputs"], *event["outputs"])]
    assert {each["namespace"] for each in datasets} == {"s3://bucket", "fastness://db:5433/plane"}
    lake = {each["name"] for each in datasets if each["namespace"] == "s3://bucket"}
    assert lake == {f"some/lake/{name}" for name in (*TABLES, "reports/latest.html")}
    load = next(event for event in sent if event["job"]["name"] == "pipeline.load" and event["outputs"])
    assert load["outputs"][0]["outputFacets"]["outputStatistics"]["rowCount"] == 3


def test_failed_and_interrupted_jobs_have_their_events(config: Config) -> None:
    sent: list[dict[str, Any]] = []
    observer = Lineage(config, lambda body: sent.append(json.loads(body)))
    with pytest.raises(Exception, match="/no/such"):
        jobs.run("ingest", None, Config(data="dir:/no/such", lake=config.lake), observers=[observer])
    observer.failed("ingest", KeyboardInterrupt())
    for event in sent:
        check(event)
    assert [event["eventType"] for event in sent] == ["START", "FAIL", "ABORT"]
    assert "/no/such" in sent[1]["run"]["facets"]["errorMessage"]["message"]
    assert sent[2]["run"]["facets"]["errorMessage"]["message"] == "KeyboardInterrupt"


@pytest.mark.parametrize("text", ["", "x", "a/b/c", "a/b/"])
def test_parent_of_an_orchestrator_is_used_if_it_can_be_read(text: str) -> None:
    run = str(uuid.uuid4())
    assert lineage.parent_from({"OPENLINEAGE_PARENT_ID": f"airflow/dag/task/{run}"}) == Parent(
        "airflow/dag", "task", run
    )
    assert lineage.parent_from({"OPENLINEAGE_PARENT_ID": text}) is None


# Transports.


class Received(BaseHTTPRequestHandler):
    """Records the requests, and answers as the test says."""

    server: "LineageServer"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.requests.append((self.path, dict(self.headers), json.loads(body)))
        self.send_response(self.server.status)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        del format, args


class LineageServer(ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Received)
        self.requests: list[tuple[str, dict[str, str], dict[str, Any]]] = []
        self.status = 201
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


@pytest.fixture
def server() -> Iterator[LineageServer]:
    with LineageServer() as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield running
        running.shutdown()


def test_events_are_posted_to_a_server(config: Config, server: LineageServer) -> None:
    jobs.run("ingest", None, config, observers=[Lineage(config, transport(server.url, token="t0"))])
    assert [path for path, _, _ in server.requests] == ["/api/v1/lineage"] * 2
    for _, headers, event in server.requests:
        check(event)
        assert (headers["Content-Type"], headers["Authorization"]) == ("application/json", "Bearer t0")
    transport(f"{server.url}/other?x=1")(b"{}")
    assert server.requests[-1][0] == "/other?x=1"


def test_refused_events_do_not_fail_the_job(
    config: Config, server: LineageServer, caplog: pytest.LogCaptureFixture
) -> None:
    server.status = 500
    assert jobs.run("ingest", None, config, observers=[Lineage(config, transport(server.url))]).ok
    assert len(server.requests) == 2
    assert caplog.text.count("Lineage failed, the job continues: The lineage server at 127.0.0.1") == 2
    assert "status 500" in caplog.text


def test_unreachable_server_does_not_fail_the_job(config: Config, caplog: pytest.LogCaptureFixture) -> None:
    assert jobs.run("ingest", None, config, observers=[Lineage(config, transport("http://127.0.0.1:1"))]).ok
    assert "refused" in caplog.text


def test_a_server_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lineage, "LINEAGE_SECONDS", 0.2)
    stop = threading.Event()

    class Dripping(socketserver.BaseRequestHandler):
        """Sends a byte so often that no timeout of the socket expires."""

        def handle(self) -> None:
            while not stop.wait(0.05):
                self.request.sendall(b"H")

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Dripping) as dripping:
        threading.Thread(target=dripping.serve_forever, daemon=True).start()
        with pytest.raises(Unreachable, match=re.escape("did not answer within 0.2 s")):
            transport(f"http://127.0.0.1:{dripping.server_address[1]}")(b"{}")
        stop.set()
        dripping.shutdown()


@pytest.mark.parametrize("url", ["ftp://x", "http://", "file:", "events.jsonl", "http:/x"])
def test_invalid_transport_is_refused(url: str) -> None:
    with pytest.raises(InvalidUrl, match="cannot receive lineage"):
        transport(url)


def test_command_takes_the_transport_from_its_option(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "events.jsonl"
    Lake(config.lake).table(JOURNAL).delta()
    words = ["pipeline", "report", "--lake", config.lake]
    for environment, option in (({}, ["--lineage", f"file:{path}"]), ({"FASTNESS_LINEAGE": f"file:{path}"}, [])):
        result = CliRunner().invoke(root, [*words, *option], env=environment)
        assert result.exit_code == 0, result.output
    assert [event["eventType"] for event in events_of(path)] == ["START", "COMPLETE"] * 2
    assert CliRunner().invoke(root, [*words, "--lineage", "nonsense"]).exit_code == 2
    monkeypatch.setenv("OPENLINEAGE_PARENT_ID", f"airflow/dag.task/{uuid.uuid4()}")
    observation = Observation(config, lineage=f"file:{path}")
    observation.observers[-1].started("report")
    assert events_of(path)[-1]["run"]["facets"]["parent"]["job"] == {"namespace": "airflow", "name": "dag.task"}
