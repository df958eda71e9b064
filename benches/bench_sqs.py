"""The SQS endpoint with boto3, in turns with moto's server; and the server alone with 64 connections.

    python -m benches sqs
    python -m benches.bench_sqs boto3 --rounds 5 --messages 600 --json FILE
    python -m benches.bench_sqs connections

Both servers are processes of their own and get the same signed requests of boto3, one caller, one call at a time.
Fastness stores every message in RocksDB and syncs its log before it answers; moto keeps messages in memory. The first
round does not count, and the medians are compared.

`connections` uses a light HTTP client in a process of its own, because boto3 takes longer for a call than the server.
Its requests are signed as well. Processor time is that of the server process.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

import boto3
from botocore.config import Config
from moto.server import ThreadedMotoServer
from rich.table import Table

from benches.bench_client import cpu_seconds_of
from benches.comparison import disable_output, echo

CHILD: Final = Path(__file__).with_name("sqs_process.py")
BODY: Final = "x" * 200
SINGLE, BATCH, DRAIN = "single sends", "sends in tens", "receive and delete in tens"
_queues = count()


class Sizes(NamedTuple):
    """How many messages each kind of work has in a round."""

    rounds: int = 5
    boto3: int = 600  # The more messages a queue has, the slower moto is: it goes through all of them.
    connections: int = 6_000


QUICK: Final = Sizes(rounds=1, boto3=10, connections=200)


class Credentials(NamedTuple):
    key: str
    secret: str


def main(argv: Sequence[str] = ()) -> None:
    options = arguments(argv)
    sizes = QUICK if options.quick else Sizes(rounds=options.rounds, boto3=options.messages)
    if options.json:
        disable_output()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="fastness-sqs-") as folder, ExitStack() as stack:
        server, url, credentials = stack.enter_context(serving(folder))
        if options.work in ("all", "boto3"):
            results["boto3"] = with_boto3(url, credentials, stack, sizes)
        if options.work in ("all", "connections"):
            results["connections"] = with_connections(server.pid, url, credentials, sizes)
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=2))


def with_boto3(url: str, credentials: Credentials, stack: ExitStack, sizes: Sizes) -> dict[str, dict[str, float]]:
    """Messages a second of Fastness and of moto, by kind of work."""
    moto = stack.enter_context(_moto())
    clients = {"moto": _client(moto, credentials), "fastness": _client(url, credentials)}
    seconds: dict[str, dict[str, list[float]]] = {name: {SINGLE: [], BATCH: [], DRAIN: []} for name in clients}
    for round_ in range(sizes.rounds + 1):
        for name, client in clients.items():
            taken = _boto3_round(client, sizes.boto3)
            if round_:
                for work, each in taken.items():
                    seconds[name][work].append(each / sizes.boto3)
    rates = {name: {work: 1 / median(each) for work, each in of.items()} for name, of in seconds.items()}
    table = Table(title="boto3, one caller, messages a second", title_justify="left", min_width=80)
    for column in ("work", "moto", "fastness", "times"):
        table.add_column(column, justify="left" if column == "work" else "right")
    for work, ours in rates["fastness"].items():
        theirs = rates["moto"][work]
        table.add_row(work, f"{theirs:,.0f}", f"{ours:,.0f}", f"{ours / theirs:.1f}")
    echo(table)
    return rates


def _boto3_round(client: Any, messages: int) -> dict[str, float]:
    queue = client.create_queue(QueueName=f"bench-{next(_queues)}")["QueueUrl"]
    taken = {}
    with _timed(taken, SINGLE):
        for _ in range(messages):
            client.send_message(QueueUrl=queue, MessageBody=BODY)
    client.delete_queue(QueueUrl=queue)
    queue = client.create_queue(QueueName=f"bench-{next(_queues)}")["QueueUrl"]
    entries = [{"Id": str(number), "MessageBody": BODY} for number in range(10)]
    with _timed(taken, BATCH):
        for _ in range(messages // 10):
            assert not client.send_message_batch(QueueUrl=queue, Entries=entries).get("Failed")
    left = messages
    with _timed(taken, DRAIN):
        while left:
            received = client.receive_message(QueueUrl=queue, MaxNumberOfMessages=10).get("Messages", [])
            handles = [
                {"Id": str(number), "ReceiptHandle": each["ReceiptHandle"]} for number, each in enumerate(received)
            ]
            client.delete_message_batch(QueueUrl=queue, Entries=handles)
            left -= len(received)
    client.delete_queue(QueueUrl=queue)
    return taken


@contextmanager
def _timed(taken: dict[str, float], work: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    taken[work] = time.perf_counter() - started


def with_connections(server: int, url: str, credentials: Credentials, sizes: Sizes) -> dict[str, dict[str, float]]:
    """Messages a second and processor time of the server, with many connections, by kind of work."""
    rates: dict[str, list[float]] = {}
    cpu: dict[str, list[float]] = {}
    with _light_client(url, credentials) as run:
        for round_ in range(sizes.rounds + 1):
            for work in (SINGLE, BATCH, DRAIN):
                before = cpu_seconds_of(server)
                seconds = run(work, sizes.connections)
                used = cpu_seconds_of(server) - before
                if round_:
                    rates.setdefault(work, []).append(sizes.connections / seconds)
                    cpu.setdefault(work, []).append(used / sizes.connections)
    table = Table(title="64 connections, the server alone", title_justify="left", min_width=80)
    for column in ("work", "messages/s", "server CPU µs"):
        table.add_column(column, justify="left" if column == "work" else "right")
    results = {}
    for work, each in rates.items():
        results[work] = {"per_second": median(each), "server_cpu_seconds": median(cpu[work])}
        table.add_row(work, f"{median(each):,.0f}", f"{median(cpu[work]) * 1e6:,.0f}")
    echo(table)
    return results


@contextmanager
def _light_client(url: str, credentials: Credentials) -> Iterator[Callable[[str, int], float]]:
    with subprocess.Popen(
        [sys.executable, str(CHILD), url, *credentials],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        requests, answers = process.stdin, process.stdout

        def run(work: str, messages: int) -> float:
            requests.write(json.dumps({"work": work, "messages": messages}) + "\n")
            requests.flush()
            seconds: float = json.loads(answers.readline())["seconds"]
            return seconds

        yield run
        requests.close()


@contextmanager
def serving(folder: str) -> "Iterator[tuple[subprocess.Popen[str], str, Credentials]]":
    """A server with the SQS endpoint, and an access key for it."""
    data = f"dir:{folder}/data"
    command = [sys.executable, "-m", "fastness.cli", "--json", "--url", data, "token", "create", "bench", "--sqs"]
    created = subprocess.run(command, check=True, capture_output=True, text=True)
    answer = json.loads(created.stdout)
    credentials = Credentials(answer["AWS_ACCESS_KEY_ID"], answer["AWS_SECRET_ACCESS_KEY"])
    command = [sys.executable, "-m", "fastness.cli", "serve", "--data", data, "--port", "0", "--sqs"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
    ) as server:
        try:
            assert server.stdout is not None
            port = int(server.stdout.readline().rpartition(":")[2])
            yield server, f"http://127.0.0.1:{port}/sqs", credentials
        finally:
            server.terminate()


@contextmanager
def _moto() -> Iterator[str]:
    """The URL of moto's server, in a process of its own."""
    with subprocess.Popen(
        [sys.executable, "-m", "benches.bench_sqs", "moto"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # It logs each request.
        text=True,
        start_new_session=True,
    ) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


def _serve_moto() -> None:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    print(f"http://{host}:{port}", flush=True)
    while True:
        time.sleep(3_600)


def _client(url: str, credentials: Credentials) -> Any:
    return boto3.client(
        "sqs",
        endpoint_url=url,
        region_name="us-east-1",
        aws_access_key_id=credentials.key,
        aws_secret_access_key=credentials.secret,
        config=Config(retries={"max_attempts": 0}),
    )


def arguments(argv: Sequence[str]) -> Any:
    parser = argparse.ArgumentParser(prog="python -m benches.bench_sqs", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("work", nargs="?", default="all", choices=("all", "boto3", "connections"))
    parser.add_argument("--rounds", type=int, default=Sizes().rounds, help="measured rounds [5]")
    parser.add_argument("--messages", type=int, default=Sizes().boto3, help="messages of each round of boto3 [600]")
    parser.add_argument("--quick", action="store_true", help="a smoke test")
    parser.add_argument("--json", metavar="FILE", help="write the figures there, and print nothing")
    return parser.parse_args(argv)


if __name__ == "__main__":
    if sys.argv[1:] == ["moto"]:
        _serve_moto()
    main(sys.argv[1:])
