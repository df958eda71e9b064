"""The code blocks of the README, the tutorial and the guides run, and print what the pages show.

The blocks of a document run from top to bottom in one shell, as a reader would run them:

    ```sh                       as it is
    ```python                   by python
    ```python title=worker.py   is saved under that name
    ```text                     expected output of the block before it: each line must occur in that output
"""

import http.client
import os
import re
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import boto3
import pytest
from moto.server import ThreadedMotoServer

from fastness.server.settings import Settings
from tests.support.forked import program_environment, run_python
from tests.support.server_process import Server, free_port

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", "docs/tour.md"]
BLOCKS = [
    block
    for page in PAGES
    for block in re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
]


def run_block(block: str, folder: Path) -> None:
    done = run_python(["-c", block], cwd=folder)
    assert done.returncode == 0, f"{done.stderr}\nin this block of {' or '.join(PAGES)}:\n{block}"


def test_the_readme_and_the_tour_have_python_blocks() -> None:
    assert len(BLOCKS) >= 12


@pytest.mark.rotating
@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_a_block_of_the_tour_runs_twice_in_one_directory(block: str, tmp_path: Path) -> None:
    for _ in range(2):
        run_block(block, tmp_path)


def test_the_blocks_of_the_tour_run_in_order_in_one_directory(tmp_path: Path) -> None:
    for block in BLOCKS:
        run_block(block, tmp_path)


MARK = "@@ block"
BLOCK = re.compile(r"^```(\w+)(?: title=(\S+))?\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def run_blocks(document: str, folder: Path, words: Mapping[str, str]) -> None:
    """Run a document's blocks in `folder`, with each key of `words` replaced by its value."""
    text = (ROOT / "docs" / document).read_text()
    for word, ours in words.items():
        assert word in text
        text = text.replace(word, ours)
    blocks = BLOCK.findall(text)
    assert blocks
    script = ["set -eu -o pipefail"]
    for number, (language, title, code) in enumerate(blocks):
        script.append(f"echo '{MARK} {number}'")
        if title:
            (folder / title).parent.mkdir(parents=True, exist_ok=True)
            (folder / title).write_text(code)
        elif language == "python":
            script.append(f"python -W error - <<'END OF BLOCK'\n{code}END OF BLOCK")
        elif language == "sh":
            script.append(code)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FASTNESS_")}
    environment |= {
        **program_environment(),
        "XDG_CONFIG_HOME": str(folder / "config"),
        "XDG_STATE_HOME": str(folder / "state"),
        "FASTNESS_URL": words.get(SERVER, ""),
    }
    shell = subprocess.Popen(
        ["bash", "-c", "\n".join(script)],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = shell.communicate()
    finally:
        with suppress(ProcessLookupError):
            for _ in range(2):  # Also stops what a block left running.
                os.killpg(shell.pid, signal.SIGKILL)
    assert shell.returncode == 0, output
    parts = re.split(rf"^{MARK} \d+$", output, flags=re.MULTILINE)[1:]
    for number, (language, _, expected) in enumerate(blocks):
        if language == "text":
            for line in expected.splitlines():
                assert line in parts[number - 1], f"{line!r} is not in: {parts[number - 1]}"


SERVER = "http://127.0.0.1:9440"


TUTORIALS = ["tutorial.md", "tutorial-agents.md"]
SERVED = [
    "coming-from/celery.md",
    "coming-from/temporal.md",
    "how-to/choose-a-deployment.md",
    "how-to/find-a-job.md",
    "how-to/hold-locks.md",
    "how-to/mcp.md",
    "how-to/secure-a-server.md",
    "how-to/sqs.md",
    "how-to/tasks.md",
    "how-to/versions-of-workflows.md",
    "how-to/write-a-worker.md",
]
SPARK = "pipeline.md"  # It starts Spark for every command.


def run_with_a_server(document: str, folder: Path, words: Mapping[str, str] | None = None) -> None:
    """Run a document's blocks with a free port instead of the usual one."""
    port = str(free_port())
    ports = {SERVER: SERVER.replace("9440", port), "fastness serve ": f"fastness serve --port {port} "}
    ours = {word: each.replace("9440", port) for word, each in (words or {}).items()}
    run_blocks(document, folder, {**ports, **ours})


@pytest.mark.parametrize("document", TUTORIALS)
@pytest.mark.rotating
def test_the_blocks_of_a_tutorial_run(document: str, tmp_path: Path) -> None:
    run_with_a_server(document, tmp_path)


INSTALL = """make setup
. .venv/bin/activate
mkdir -p build/start && cd build/start
"""


def test_the_blocks_of_the_first_page_run_where_fastness_is_installed(tmp_path: Path) -> None:
    """test_first_page.py installs it, too."""
    run_with_a_server("start.md", tmp_path, {INSTALL: ""})


@pytest.mark.parametrize(
    "document",
    [
        *(pytest.param(each, marks=pytest.mark.rotating) for each in SERVED),
        pytest.param(SPARK, marks=pytest.mark.nightly),
    ],
)
def test_the_blocks_of_a_document_with_a_server_run(document: str, tmp_path: Path) -> None:
    run_with_a_server(document, tmp_path)


def test_every_path_in_the_endpoint_reference_is_served(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "reference" / "endpoints.md").read_text()
    section = text.partition("## Other endpoints")[2].partition("\n## ")[0]
    paths = re.findall(r"^\| `(/[\w./]+)` \|", section, re.MULTILINE)
    assert len(paths) >= 8
    server = Server(tmp_path, data="memory:")
    try:
        missing = [path for path in paths if not is_served(server, path)]
    finally:
        server.kill()
    assert missing == []


def is_served(server: Server, path: str) -> bool:
    connection = http.client.HTTPConnection(*server.address, timeout=60)
    upgrade = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
    upgrade["Sec-WebSocket-Key"] = "AAAAAAAAAAAAAAAAAAAAAA=="
    connection.request("GET", path, headers=upgrade if path.startswith("/v1/") else {})
    status = connection.getresponse().status
    connection.close()
    return status < 400 or status == 406  # A GET of /mcp must accept a stream of events.


GUIDES_RUN = [
    "ingress.md",
    "coming-from/redis-streams.md",
    "coming-from/sqs.md",
    "explanation/idempotency.md",
    "explanation/tiers.md",
    "how-to/back-up-and-restore.md",
    "how-to/effects-and-timers.md",
    "how-to/encrypt-data.md",
    "how-to/free-space.md",
    "how-to/google-adk.md",
    "how-to/hold-a-lease.md",
    "how-to/langgraph.md",
    "how-to/limit-a-universe.md",
    "how-to/limit-work-by-key.md",
    "how-to/openai-agents.md",
    "how-to/pydantic-ai.md",
    "how-to/retries-and-dead-letters.md",
    "how-to/send-mail.md",
    "how-to/size-a-server.md",
    "how-to/store-rows.md",
    "how-to/test-agents.md",
    "how-to/troubleshoot.md",
    "how-to/upgrade.md",
    "how-to/write-a-backend.md",
    "how-to/write-programs.md",
    "how-to/write-workflows.md",
]


@pytest.mark.rotating
@pytest.mark.parametrize("document", GUIDES_RUN)
def test_the_blocks_of_a_guide_run(document: str, tmp_path: Path) -> None:
    run_blocks(document, tmp_path, {})


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1"}
    for name, value in {**keys, "AWS_ENDPOINT": endpoint, "AWS_ALLOW_HTTP": "true"}.items():
        monkeypatch.setenv(name, value)
    boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1").create_bucket(Bucket="bucket")
    yield endpoint
    server.stop()


@pytest.mark.rotating
@pytest.mark.usefixtures("s3")
def test_the_blocks_of_the_postgresql_guide_run(tmp_path: Path, postgres_url: str) -> None:
    run_blocks("how-to/move-to-postgresql.md", tmp_path, {"postgresql://fastness@db/plane": postgres_url})


@pytest.mark.rotating
def test_the_blocks_of_the_transaction_guide_run(tmp_path: Path, postgres_url: str) -> None:
    engine_url = postgres_url.replace("postgresql://", "postgresql+psycopg://")
    words = {"postgresql://fastness@db/plane": postgres_url, "postgresql+psycopg://fastness@db/plane": engine_url}
    run_blocks("how-to/your-own-transaction.md", tmp_path, words)


CELERY = "how-to/celery.md"


@pytest.mark.rotating
def test_the_blocks_of_the_celery_guide_run(tmp_path: Path) -> None:
    broker_port = str(free_port())
    run_with_a_server(
        CELERY, tmp_path, {"fastness://127.0.0.1:9440/": "fastness://127.0.0.1:9440/", "9324": broker_port}
    )


OTHER_TESTS = ["start.md", "tour.md", SPARK, CELERY, "how-to/move-to-postgresql.md", "how-to/your-own-transaction.md"]


def test_every_page_with_blocks_is_run_or_says_why_not() -> None:
    """A page whose blocks are not run has a line `<!-- not run: reason -->`."""
    texts = {str(path.relative_to(ROOT / "docs")): path.read_text() for path in (ROOT / "docs").rglob("*.md")}
    texts = {
        name: text for name, text in texts.items() if not name.startswith("reference/")
    }  # Generated from the code.
    run = {*TUTORIALS, *SERVED, *GUIDES_RUN, *OTHER_TESTS}
    assert run <= set(texts)
    executable = {name for name, text in texts.items() if re.search(r"^```(python|sh)\b", text, re.MULTILINE)}
    excused = {name for name, text in texts.items() if re.search(r"^<!-- not run: .{10,} -->$", text, re.MULTILINE)}
    assert executable - run - excused == set()
    assert run & excused == set()


def test_the_settings_of_the_production_guide_are_valid(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "how-to" / "production.md").read_text()
    [settings] = re.findall(r"^```toml\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    (tmp_path / "fastness.toml").write_text(settings)
    assert Settings.load(file=tmp_path / "fastness.toml", environment={}).tokens


def test_files_named_in_the_documents_exist() -> None:
    missing = []
    first = [ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")]
    for document in (*first, *(ROOT / "docs").rglob("*.md")):
        text = re.sub(r"^```.*?^```$", "", document.read_text(), flags=re.DOTALL | re.MULTILINE)
        links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)#][^)]*)\)", text) if "://" not in link]
        paths = re.findall(r"`((?:src|tests|benches|tools|docs|deploy|examples)/[\w./]+)`", text)
        absent = [name for name in [*links, *paths] if not (document.parent / name).exists()]
        missing += [f"{document.relative_to(ROOT)}: {name}" for name in absent if not (ROOT / name).exists()]
    assert missing == []


def test_tests_named_in_the_fault_model_exist() -> None:
    text = (ROOT / "docs" / "explanation" / "fault-model.md").read_text()
    named = re.findall(r"`(tests/[\w/.]+)::(\w+)`", text)
    assert len(named) >= 40
    for file, test in named:
        assert re.search(rf"^(async )?def {test}\(", (ROOT / file).read_text(), re.MULTILINE), f"{file}::{test}"
    marks = set(re.findall("[⁰¹²³⁴⁵⁶⁷⁸⁹]+", text))
    digits = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹", "0123456789")
    events = set(re.findall(r"^(\d+)\. ", text, re.MULTILINE))
    assert {mark.translate(digits) for mark in marks} == events
