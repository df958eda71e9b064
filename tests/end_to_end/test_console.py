"""The console's endpoints: static files, sessions, the event stream, and the reports of the pipeline."""

import http.client
import json
import os
import re
import resource
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest

import fastness
from fastness.errors import Unsupported
from fastness.limits import (
    CONSOLE_JOB_RECORD_BYTES_MAX,
    CONSOLE_LIVE_QUEUES_MAX,
    CONSOLE_REPORT_BYTES_MAX,
    CONSOLE_REPORT_LINK_SECONDS,
    CONSOLE_REPORT_LINKS_MAX,
    CONSOLE_SAMPLE_SECONDS,
    CONSOLE_WATCHERS_MAX,
    CONSOLE_WATCHERS_PER_TOKEN_MAX,
)
from fastness.pipeline.config import JobResult
from fastness.pipeline.lake import Lake
from fastness.pipeline.observation.runs import RunRecorder, read_records
from fastness.pipeline.schemas import LIVE_QUEUE_MINUTES
from fastness.server.authorization import AllowAll
from fastness.server.console import files, live, reports
from fastness.server.console.samples import Samples
from fastness.server.context import ServerContext
from fastness.server.metrics import Metrics
from fastness.wire.queues import QueueStats
from tests.support.failures import Failures
from tests.support.server_process import Server
from tests.support.waiting import eventually

STATIC = Path(files.__file__).with_name("static")
LINES_MAX = 100
WRONG = "fnt_" + "0" * 32 + "_" + "x" * 48


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = Server(tmp_path_factory.mktemp("console"))
    yield running
    running.kill()


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[tuple[Any, dict[str, str]]]:
    """A server that requires tokens, and some tokens."""
    with fastness.open(f"dir:{tmp_path / 'data'}") as plane:
        tokens = {
            "all": plane.tokens.create("operator", universes="*", verbs="*").token,
            "some": plane.tokens.create("reader", universes="main,other", verbs="queue:*").token,
        }
    folder = tmp_path / "reports"
    folder.mkdir()
    (folder / "latest.html").write_text("<h1>Report</h1>")
    running = Server(tmp_path, tokens=True, pipeline_reports=str(folder), pipeline_lake=str(tmp_path / "lake"))
    yield running, tokens
    running.kill()


def request(
    server: Server, path: str, method: str = "GET", token: str | None = None, **headers: str
) -> tuple[int, Any, bytes]:
    """The status, headers and body of a response, without following redirects."""
    connection = http.client.HTTPConnection(*server.address, timeout=60)
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    if token is not None:
        sent["Authorization"] = f"Bearer {token}"
    try:
        connection.request(method, path, headers=sent)
        answer = connection.getresponse()
        # Of an endless response only the first chunk is read.
        return answer.status, answer.headers, answer.read1() if answer.length is None else answer.read()
    finally:
        connection.close()


class Listener:
    """Reads /console/events."""

    def __init__(self, server: Server, universe: str = "main", token: str | None = None) -> None:
        self._connection = http.client.HTTPConnection(*server.address, timeout=60)
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._connection.request("GET", f"/console/events?universe={universe}", headers=headers)
        self.answer = self._connection.getresponse()

    def next(self, *names: str) -> tuple[str, Any]:
        """The next event with one of these names, or with any; fails after a hundred other lines."""
        name = ""
        for _ in range(LINES_MAX):
            line = self.answer.readline().decode()
            if not line:
                return "closed", None
            if line.startswith("event: "):
                name = line.removeprefix("event: ").strip()
            elif line.startswith("data: ") and (not names or name in names):
                return name, json.loads(line.removeprefix("data: "))
        pytest.fail(f"none of {names} arrived")

    def sample(self, op: str, calls: int) -> Any:
        """The next sample with at least so many calls of an operation."""
        for _ in range(LINES_MAX):
            _, found = self.next("sample")
            if found["operations"].get(op, {"calls": 0})["calls"] >= calls:
                return found
        pytest.fail(f"{op} was not called {calls} times")

    def __enter__(self) -> "Listener":
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()


def when_a_slot_is_free(server: Server) -> Listener:
    """An event stream, opened as soon as the server has a slot for it."""

    def opened() -> Listener | None:
        listener = Listener(server)
        if listener.answer.status == 200:
            return listener
        listener.__exit__()
        return None

    found = eventually(opened, "no slot became free")
    assert found is not None
    return found


# Files.


def test_the_page_has_a_strict_content_security_policy(server: Server) -> None:
    status, headers, body = request(server, "/console")
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    policy = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert policy["require-trusted-types-for"] == "'script'"
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert b"<script>" not in body
    assert b"style=" not in body


def test_a_cached_file_is_answered_with_304(server: Server) -> None:
    failures = Failures()
    for path in ("/console", *(f"/console/{each.name}" for each in STATIC.iterdir() if each.name != files.PAGE)):
        with failures.of(path):
            status, headers, body = request(server, path)
            assert status == 200
            assert body
            etag = headers["etag"]
            assert re.fullmatch(r'"[0-9a-f]{32}"', etag)
            assert headers["cache-control"] == "no-cache"
            for known in (etag, f'"x", {etag}', f"W/{etag}", "*"):
                status, headers, body = request(server, path, If_None_Match=known)
                assert (status, headers["etag"], body) == (304, etag, b"")
            assert request(server, path, If_None_Match='"x"')[0] == 200
            assert request(server, path, "HEAD")[2] == b""
    failures.check()


def test_static_files_name_no_other_host_and_parse_no_markup() -> None:
    for file in STATIC.iterdir():
        if file.name.startswith("uplot"):
            continue  # A comment has its author's address.
        text = file.read_text().replace("http://www.w3.org/2000/svg", "")
        assert re.findall(r"(?:https?:)?//[a-z0-9.-]+\.[a-z]{2,}", text) == [], file.name
        for name in (
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "new Function",
            "srcdoc",
        ):
            assert name not in text, (file.name, name)


def test_the_chart_library_has_its_licence() -> None:
    assert "MIT" in (STATIC / "uplot-license.txt").read_text()
    assert "uPlot (v" in (STATIC / "uplot.js").read_text()[:80]


@pytest.mark.parametrize("path", ["/console/nothing.js", "/console/../server/tokens.py", "/console/console.html"])
def test_an_unknown_console_path_is_404(server: Server, path: str) -> None:
    status, headers, _ = request(server, path)
    assert (status, headers["content-type"]) == (404, "application/problem+json")


def test_a_trailing_slash_redirects_to_the_page(server: Server) -> None:
    status, headers, _ = request(server, "/console/")
    assert (status, headers["location"]) == (308, "../console")


def test_a_browser_is_redirected_to_the_console_and_others_are_not(server: Server) -> None:
    for method in ("GET", "HEAD"):
        status, headers, _ = request(server, "/", method, accept="text/html,application/xhtml+xml,*/*;q=0.8")
        assert (status, headers["location"], headers["vary"]) == (307, "console", "Accept")
    for method, accept in (
        ("GET", "*/*"),
        ("GET", "application/json"),
        ("POST", "text/html"),
        ("OPTIONS", "text/html"),
    ):
        status, _, body = request(server, "/", method, accept=accept)
        assert (status, json.loads(body)["code"]) == (404, "not_found")


# Sessions.


def test_a_server_without_tokens_allows_everything(server: Server) -> None:
    with server.plane(universe="staging") as plane:
        plane.queue("jobs").put(b"x")
    session = json.loads(request(server, "/console/session")[2])
    assert (session["tokens"], session["signed_in"], session["metrics"], session["reports"]) == (
        False,
        True,
        True,
        False,
    )
    assert {"main", "staging"} <= set(session["universes"])


@pytest.mark.parametrize("path", ["/console/session", "/console/events"])
def test_pages_of_other_origins_are_refused(server: Server, path: str) -> None:
    assert request(server, path, Origin="https://example.com")[0] == 403
    assert request(server, path, Host="example.com")[0] in (401, 403)


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_embedded_resources_of_other_sites_are_refused(server: Server, site: str) -> None:
    for path in ("/console/events", "/console/session", "/v1/mailboxes/bob/mail"):
        status, _, body = request(server, path, Sec_Fetch_Site=site, Sec_Fetch_Dest="image")
        assert (status, json.loads(body)["code"]) == (403, "foreign_origin")
    assert request(server, "/v1/mailboxes/bob/mail", Sec_Fetch_Site=site, Sec_Fetch_Dest="document")[0] == 403
    assert (
        request(server, "/console", Sec_Fetch_Site=site, Sec_Fetch_Dest="document")[0] == 200
    )  # A link to the console.
    assert request(server, "/console", Sec_Fetch_Site=site, Sec_Fetch_Dest="iframe")[0] == 403


def test_a_malformed_origin_is_refused(server: Server) -> None:
    for origin in ("null", "http://[", "", "file://"):
        assert request(server, "/console/session", Origin=origin)[0] == 403


def test_a_session_without_a_token_only_reports_that_one_is_required(guarded: Any) -> None:
    server, _ = guarded
    status, _, body = request(server, "/console/session")
    assert status == 200
    session = json.loads(body)
    assert (session["tokens"], session["signed_in"]) == (True, False)
    assert (session["version"], session["universes"], session["verbs"]) == ("", [], [])
    assert request(server, "/console/events")[0] == 401
    assert request(server, "/console/reports", "POST")[0] == 401
    assert request(server, "/console")[0] == 200


def test_a_wrong_token_is_refused(guarded: Any) -> None:
    for path in ("/console/session", "/console/events"):
        status, headers, body = request(guarded[0], path, token=WRONG)
        assert (status, json.loads(body)["code"]) == (401, "not_allowed")
        assert headers["www-authenticate"].startswith("Bearer")


def test_a_session_has_the_permissions_of_its_token(guarded: Any) -> None:
    server, tokens = guarded
    session = json.loads(request(server, "/console/session", token=tokens["some"])[2])
    assert (session["name"], session["universes"], session["verbs"]) == ("reader", ["main", "other"], ["queue:*"])
    assert (session["metrics"], session["reports"]) == (False, False)
    session = json.loads(request(server, "/console/session", token=tokens["all"])[2])
    assert (session["name"], session["metrics"], session["reports"]) == ("operator", True, True)
    assert session["universes"] == ["main"]


# The event stream.


def test_samples_arrive_every_second_and_agree_with_the_metrics(server: Server) -> None:
    with server.plane() as plane, Listener(server) as listener:
        assert listener.next()[0] == "history"
        first = listener.next("sample")[1]
        plane.queue("sampled").put(b"x")
        text = server.get("/metrics")[2].decode()
        calls: Counter[str] = Counter()
        for op, value in re.findall(r'^fastness_requests_total{code=".*",op="(.*)"} (\S+)$', text, re.MULTILINE):
            calls[op] += int(float(value))
        second = listener.sample("queues.put", calls["queues.put"])
        assert second["at_ms"] > first["at_ms"]
        assert second["started_ms"] == first["started_ms"]
        assert {op: each["calls"] for op, each in second["operations"].items()} == calls
        assert second["calls"] == calls.total()
    with Listener(server) as later:
        assert len(later.next("history")[1]["samples"]) >= 2


def test_refused_requests_are_in_the_samples(server: Server) -> None:
    with Listener(server) as listener:
        before = listener.next("sample")[1]["rejects"].get("not_found", 0)
        assert request(server, "/v1/nowhere")[0] == 404
        for _ in range(LINES_MAX):
            if listener.next("sample")[1]["rejects"].get("not_found", 0) == before + 1:
                return
    pytest.fail("the refusal was not reported")


def test_changes_are_reported_by_section(server: Server) -> None:
    with server.plane(universe="sections") as plane, Listener(server, "sections") as listener:
        listener.next("sample")
        plane.queue("jobs").put(b"x")
        assert listener.next("changed")[1] == {"sections": ["queues"]}
        plane.lease("deploy").acquire("ada")
        assert listener.next("changed")[1] == {"sections": ["leases"]}
        plane.world("w").create()
        assert listener.next("changed")[1] == {"sections": ["worlds"]}
        plane.mailbox("ada").send("bob", b"x")
        assert listener.next("changed")[1] == {"sections": ["mail"]}
        plane.entities.write("order", "1", {"n": 1})
        assert listener.next("changed")[1] == {"sections": ["entities"]}
    with server.plane(universe="elsewhere") as other, Listener(server, "sections") as listener:
        listener.next("sample")
        other.queue("jobs").put(b"x")
        assert listener.next("sample", "changed")[0] == "sample"


def test_console_reads_are_not_counted_in_the_metrics(server: Server) -> None:
    with Listener(server) as listener:
        assert request(server, "/console/session")[0] == 200
        assert listener.next("sample")
        assert b'op="universes.list"' not in server.get("/metrics")[2]


def test_a_token_receives_changes_of_what_it_may_list(guarded: Any) -> None:
    server, tokens = guarded
    with server.plane(token=tokens["all"]) as plane, Listener(server, token=tokens["some"]) as listener:
        assert listener.next()[1] == {"samples": [], "metrics": False}
        plane.lease("deploy").acquire("ada")
        plane.queue("jobs").put(b"x")
        assert listener.next()[1] == {"sections": ["queues"]}
        plane.tokens.revoke(tokens["some"])
        name, problem = listener.next("problem")
        assert (name, problem["code"]) == ("problem", "not_allowed")
        assert listener.next()[0] == "closed"


def test_a_token_of_one_universe_receives_nothing_of_another(guarded: Any) -> None:
    server, tokens = guarded
    with server.plane(token=tokens["all"]) as plane:
        token = plane.tokens.create("tenant", universes="main", verbs="*").token
    with server.plane(token=tokens["all"], universe="secret") as plane, Listener(server, "secret", token) as listener:
        assert listener.next()[1] == {"samples": [], "metrics": False}
        plane.queue("jobs").put(b"x")
        plane.world("w").create()
        held = plane.lease("deploy").acquire("ada")
        for path in ("queues", "worlds", "kinds", "waits"):
            status, _, body = request(server, f"/v1/surveys/{path}?universe=secret", token=token)
            assert (status, json.loads(body)["code"]) == (403, "not_allowed")
            assert b"secret" not in request(server, f"/v1/surveys/{path}", token=token)[2]
        for path in ("/v1/worlds/w/check?universe=secret", "/v1/universes", "/metrics"):
            assert request(server, path, token=token)[0] == 403
        assert request(server, "/console/reports", "POST", token=token)[0] == 403
        assert b"secret" not in request(server, "/console/session", token=token)[2]
        held.release()
        plane.tokens.revoke(token)
        assert listener.next()[0] == "problem"  # And no event before it.


def test_a_page_is_told_of_a_failed_key_space_and_when_it_works_again(tmp_path: Path) -> None:
    server = Server(tmp_path)
    try:
        with server.plane() as plane:
            plane.queue("jobs").put_many([os.urandom(10_000) for _ in range(4)])  # More than may be written below.
        with Listener(server) as listener:
            listener.next("history")
            resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (16_384, resource.RLIM_INFINITY))
            status, _, _ = server.get("/v1/queue/enqueue", body=b'{"queue": "jobs", "messages": [{"payload": 1}]}')
            assert status == 503
            _, failed = listener.next("storage")
            assert failed["failure"] in ("disk_full", "database_failed", "commit_unknown")
            status, _, body = request(server, "/v1/space/status")
            assert (status, json.loads(body)["failure"] is not None) == (200, True)
            resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
            assert listener.next("storage")[1] == {"failure": None, "disk_low": False}
    finally:
        server.kill()


def test_an_invalid_universe_name_is_refused(server: Server) -> None:
    status, _, body = request(server, "/console/events?universe=a%20b")
    assert (status, json.loads(body)["code"]) == (400, "invalid_name")


def test_the_event_stream_ends_when_the_server_stops(tmp_path: Path) -> None:
    server = Server(tmp_path)
    try:
        with Listener(server) as listener:
            listener.next("sample")
            assert server.stop() == 0
            assert "still in flight" not in server.log()
            assert listener.next("end")[1] == {"reason": "shutdown_draining"}
    finally:
        server.kill()


def test_the_number_of_event_streams_is_bounded_and_closing_one_frees_a_slot(server: Server) -> None:
    listeners = [Listener(server) for _ in range(CONSOLE_WATCHERS_MAX)]
    try:
        assert all(each.answer.status == 200 for each in listeners)
        status, headers, body = request(server, "/console/events")
        assert (status, json.loads(body)["code"]) == (503, "console_busy")
        assert int(headers["retry-after"]) >= 1
    finally:
        for each in listeners:
            each.__exit__()
    with when_a_slot_is_free(server) as last:
        assert last.next("sample")


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="the kernel has no TCP_USER_TIMEOUT")
def test_pages_that_read_nothing_are_disconnected(tmp_path: Path) -> None:
    server = Server(tmp_path, process={"unread_seconds": 1.0})
    stalled = []
    try:
        for _ in range(CONSOLE_WATCHERS_MAX):
            page = socket.socket()
            stalled.append(page)
            page.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2_048)
            page.connect(server.address)
            page.sendall(b"GET /console/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        for page in stalled:
            assert page.recv(1) == b"H"  # The stream is open.
        with when_a_slot_is_free(server) as reader:  # A page that reads stays connected.
            assert server.logged("disconnected:", "read nothing")
            assert [reader.next("sample")[0] for _ in range(3)] == ["sample"] * 3
    finally:
        for page in stalled:
            page.close()
        server.kill()


def test_one_token_cannot_use_all_event_streams(guarded: Any) -> None:
    server, tokens = guarded
    listeners = [Listener(server, token=tokens["some"]) for _ in range(CONSOLE_WATCHERS_PER_TOKEN_MAX)]
    try:
        assert all(each.answer.status == 200 for each in listeners)
        status, _, body = request(server, "/console/events", token=tokens["some"])
        assert (status, json.loads(body)["code"]) == (503, "console_busy")
        with Listener(server, token=tokens["all"]) as other:
            assert other.answer.status == 200
    finally:
        for each in listeners:
            each.__exit__()


# Samples.


class CountingMetrics:
    """A registry that counts its refreshes."""

    def __init__(self, metrics: Metrics) -> None:
        self.registry = metrics.registry
        self.refreshes = 0

    async def refresh(self, transport: Any) -> None:
        del transport
        self.refreshes += 1


async def test_callers_within_one_second_get_the_same_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    taken = Samples(counting := CountingMetrics(Metrics()), None)  # type: ignore[arg-type]
    first = await taken.latest()
    now += CONSOLE_SAMPLE_SECONDS - 0.1
    assert await taken.latest() is first
    now += 0.1
    second = await taken.latest()
    assert second is not first
    assert "operations" in second
    assert "operations" not in taken.history[-1]
    assert counting.refreshes == 2


def stats(queue: str, **counts: int) -> QueueStats:
    given = dict.fromkeys(("ready", "delayed", "leased", "blocked", "dead"), 0) | counts
    return QueueStats(
        queue=queue, paused=False, waiting_consumers=0, head_message_id=None, head_age_seconds=2.0,
        put_total=3, delivered_total=0, acked_total=0, failed_total=0, expired_total=0, dead_total=0, **given,
    )  # fmt: skip


def test_dead_letters_count_as_dead_and_not_as_ready() -> None:
    metrics = Metrics()
    metrics._queues = [("main", stats("jobs", ready=2, dead=5)), ("main", stats("jobs.dlq", ready=5))]
    metrics._queues.append(("other", stats("lonely.dlq", ready=1)))
    sample, _, queues = Samples(metrics, None)._collect()  # type: ignore[arg-type]
    assert (sample["queues"]["main"]["ready"], sample["queues"]["main"]["dead"]) == (2, 5)
    assert sample["queues"]["main"]["put"] == 3
    assert sample["queues"]["main"]["oldest"] == 2.0
    assert sample["queues"]["other"]["ready"] == 1  # The queue that it belongs to no longer exists.
    assert queues["main", "jobs.dlq"]["ready"] == 5  # The page of a queue shows it by itself.


# Reports.


def test_a_report_is_served_by_its_link(guarded: Any) -> None:
    server, tokens = guarded
    assert request(server, "/console/reports", "POST", token=tokens["some"])[0] == 403
    status, _, body = request(server, "/console/reports", "POST", token=tokens["all"])
    assert status == 200
    found = json.loads(body)
    assert [each["name"] for each in found["files"]] == ["latest.html"]
    status, headers, body = request(server, f"/{found['at']}latest.html")
    assert (status, body) == (200, b"<h1>Report</h1>")
    policy = dict((*part.split(" ", 1), "")[:2] for part in headers["content-security-policy"].split("; "))
    assert policy["sandbox"] == "allow-scripts"  # Without an origin.
    assert policy["default-src"] == "'none'"
    assert [source[:8] for source in policy["script-src"].split()] == ["'sha256-", "'sha256-"]
    assert headers["cache-control"] == "no-store"
    assert request(server, f"/{found['at']}other.html")[0] == 404
    status, _, body = request(server, "/console/reports/unknown/latest.html")
    assert (status, json.loads(body)["code"]) == (403, "pass_expired")


def live_rows(*given: dict[str, Any]) -> pa.Table:
    names = LIVE_QUEUE_MINUTES.schema.names
    defaults = {**dict.fromkeys(names, 0), "universe": "main", "queue": "jobs", "wait_max_ms": None, "final": False}
    return pa.Table.from_pylist([{**defaults, **row} for row in given], LIVE_QUEUE_MINUTES.schema)


def test_live_aggregates_are_answered_for_the_last_hour(guarded: Any, tmp_path: Path) -> None:
    server, tokens = guarded

    def read(universe: str) -> Any:
        status, headers, body = request(server, f"/console/live?universe={universe}", token=tokens["all"])
        assert (status, headers["cache-control"]) == (200, "no-store")
        return json.loads(body)

    assert request(server, "/console/live")[0] == 401
    assert request(server, "/console/live", token=tokens["some"])[0] == 403
    assert request(server, "/console/live?universe=../x", token=tokens["all"])[0] == 400
    assert (read("main")["newest_ms"], read("main")["queues"]) == (None, [])
    minutes: list[dict[str, Any]] = [
        {"minute": 0, "put": 100},  # Older than an hour before the newest minute.
        {"minute": 60_000, "put": 2, "waits": 1, "wait_sum_ms": 9, "wait_max_ms": 9},
        {"minute": 3_600_000, "put": 3, "late": 1, "wait_max_ms": 4},
        *({"minute": 3_600_000, "queue": f"q-{n}", "put": 1} for n in range(CONSOLE_LIVE_QUEUES_MAX)),
        {"minute": 0, "universe": "other", "put": 50},
    ]
    table = Lake(str(tmp_path / "lake")).table(LIVE_QUEUE_MINUTES)
    table.append_rows(live_rows(*minutes))
    found = read("main")
    assert (found["newest_ms"], len(found["queues"]), found["left_off"]) == (3_600_000, CONSOLE_LIVE_QUEUES_MAX, 1)
    jobs = found["queues"][0]
    assert (jobs["queue"], jobs["put"], jobs["waits"], jobs["wait_max_ms"], jobs["late"]) == ("jobs", 5, 1, 9, 1)
    assert [row["put"] for row in read("other")["queues"]] == [50]
    for file in tmp_path.glob("lake/*/universe=other/*.parquet"):
        file.write_bytes(b"damaged")
    status, _, body = request(server, "/console/live?universe=other", token=tokens["all"])
    assert (status >= 500, "fastness pipeline audit" in json.loads(body)["detail"]) == (True, True)


def test_the_last_runs_of_jobs_are_answered_as_the_pipeline_reads_them(guarded: Any, tmp_path: Path) -> None:
    server, tokens = guarded
    assert request(server, "/console/pipeline")[0] == 401
    assert request(server, "/console/pipeline", token=tokens["some"])[0] == 403
    location = Lake(str(tmp_path / "lake")).location
    recorder = RunRecorder(location)
    recorder.completed(JobResult(job="ingest", ok=True, rows={"journal": 7}, seconds=2.5))
    recorder.completed(JobResult(job="audit", ok=False, rows={}, seconds=1.0, findings=[{"reason": "x"}]))
    recorder.failed("rollup", ValueError("no Java"))
    folder = tmp_path / "lake" / "runs"
    (folder / "linked.json").symlink_to(folder / "ingest.json")
    (folder / "large.json").write_bytes(b" " * CONSOLE_JOB_RECORD_BYTES_MAX + (folder / "ingest.json").read_bytes())
    (folder / "other.json").write_bytes(b'{"job": "\xff"}')
    (folder / "half.part").write_text("{")
    status, headers, body = request(server, "/console/pipeline", token=tokens["all"])
    found = json.loads(body)
    assert (status, headers["cache-control"], found["lake"]) == (200, "no-store", True)
    assert {run["job"]: run for run in found["runs"]} == msgspec.to_builtins(read_records(location))
    assert [run["job"] for run in found["runs"]] == ["rollup", "audit", "ingest"]
    assert found["unreadable"] == ["large.json", "linked.json", "other.json"]


def test_a_server_that_cannot_read_lakes_says_which_extra_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "deltalake", None)
    with pytest.raises(Unsupported, match=r"pip install '\.\[spark\]'"):
        live.read_hour(tmp_path, "main")


def test_a_server_without_a_reports_folder_has_no_reports(server: Server) -> None:
    assert request(server, "/console/reports", "POST")[0] == 404


def test_only_regular_files_of_the_folder_itself_are_listed(tmp_path: Path) -> None:
    folder = tmp_path / "reports"
    (folder / "inside").mkdir(parents=True)
    (tmp_path / "secret.html").write_text("secret")
    (folder / "link.html").symlink_to(tmp_path / "secret.html")
    (folder / "script.js").write_text("1")
    with (folder / "large.html").open("wb") as large:
        large.truncate(CONSOLE_REPORT_BYTES_MAX + 1)
    (folder / "latest.json").write_text("{}")
    (folder / os.fsdecode(b"not-utf-\xff8.html")).write_text("x")
    os.mkfifo(folder / "pipe.html")
    found = reports_in(folder)
    assert [each.name for each in found._list_files()] == ["latest.json"]
    assert found._read(folder / "latest.json") == b"{}"
    for name in ("link.html", "pipe.html", "large.html", "inside", "..", "nothing.html"):
        assert found._read(folder / name) is None
    assert reports_in(tmp_path / "nothing")._list_files() == []


def test_a_file_removed_while_listing_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("going.html", "staying.html"):
        (tmp_path / name).write_text(name)
    found = reports_in(tmp_path)
    listed = found._list_files()
    (tmp_path / "going.html").unlink()
    (tmp_path / "going.html").symlink_to(tmp_path / "staying.html")
    monkeypatch.setattr(found, "_list_files", lambda: listed)
    assert found._read(tmp_path / "going.html") is None
    (tmp_path / "going.html").unlink()
    assert found._read(tmp_path / "going.html") is None
    monkeypatch.undo()
    monkeypatch.setattr(Path, "iterdir", lambda folder: iter([folder / "going.html", folder / "staying.html"]))
    assert [each.name for each in found._list_files()] == ["staying.html"]


def reports_in(folder: Path) -> reports.Reports:
    return reports.Reports(ServerContext.__new__(ServerContext), str(folder))


def test_revoking_a_token_invalidates_its_report_links(guarded: Any) -> None:
    server, tokens = guarded
    with server.plane(token=tokens["all"]) as plane:
        token = plane.tokens.create("viewer", universes="*", verbs="metrics:read").token
        at = json.loads(request(server, "/console/reports", "POST", token=token)[2])["at"]
        assert request(server, f"/{at}latest.html")[0] == 200
        plane.tokens.revoke(token)
        status, _, body = request(server, f"/{at}latest.html")
        assert (status, json.loads(body)["code"]) == (403, "pass_expired")


def test_report_links_expire_and_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    reports_folder = reports_in(tmp_path)
    first = reports_folder._new_link(AllowAll())
    assert reports_folder._is_valid(first)
    now += CONSOLE_REPORT_LINK_SECONDS - 1
    second = reports_folder._new_link(AllowAll())
    assert reports_folder._is_valid(first)
    now += 2
    assert not reports_folder._is_valid(first)
    assert reports_folder._is_valid(second)
    for _ in range(CONSOLE_REPORT_LINKS_MAX):
        reports_folder._new_link(AllowAll())
    assert not reports_folder._is_valid(second)
    assert len(reports_folder._links) == CONSOLE_REPORT_LINKS_MAX
