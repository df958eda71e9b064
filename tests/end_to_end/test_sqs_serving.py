"""`fastness serve --sqs`: under /sqs and at a port of its own, with metrics, draining and refusals."""

import asyncio
import json
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import boto3
import pytest
from botocore.config import Config

from fastness.errors import InvalidArgument
from fastness.server.serving import serve
from fastness.server.settings import Settings
from tests.support.server_process import SECONDS_MAX, Server
from tests.support.waiting import eventually, exit_code

ONE_ATTEMPT: Final = Config(retries={"total_max_attempts": 1})


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    started = Server(tmp_path, sqs_port=0, sqs_anonymous=True, drain_seconds=30)
    yield started
    started.kill()


def sqs(url: str) -> Any:
    """A client of boto3."""
    return boto3.client(
        "sqs",
        endpoint_url=url,
        region_name="us-east-1",
        aws_access_key_id="any",
        aws_secret_access_key="any",
        config=ONE_ATTEMPT,
    )


def own_url(server: Server) -> str:
    """The URL of the port of SQS, from the log."""
    messages = [json.loads(line)["message"] for line in server.log().splitlines()]
    return next(str(message.rpartition(" ")[2]) for message in messages if message.startswith("SQS is ready at "))


def test_both_ports_have_the_same_queues_and_urls_of_their_own(server: Server) -> None:
    main, own = sqs(f"{server.url}/sqs"), sqs(own_url(server))
    queue = main.create_queue(QueueName="orders")["QueueUrl"]
    assert queue == f"{server.url}/sqs/000000000000/orders"
    assert own.get_queue_url(QueueName="orders")["QueueUrl"] == f"{own_url(server)}/000000000000/orders"
    sent = main.send_message(QueueUrl=queue, MessageBody="hello")
    (received,) = own.receive_message(QueueUrl=queue)["Messages"]
    assert (received["MessageId"], received["Body"]) == (sent["MessageId"], "hello")


def test_requests_are_counted_by_action_and_code(server: Server) -> None:
    client = sqs(f"{server.url}/sqs")
    client.create_queue(QueueName="orders")
    with pytest.raises(client.exceptions.QueueDoesNotExist):
        client.get_queue_url(QueueName="none")
    metrics = server.get("/metrics")[2].decode().splitlines()
    lines = [line for line in metrics if line.startswith("fastness_sqs_requests_total")]
    assert sorted(lines) == [
        'fastness_sqs_requests_total{action="CreateQueue",code="ok"} 1.0',
        'fastness_sqs_requests_total{action="GetQueueUrl",code="AWS.SimpleQueueService.NonExistentQueue"} 1.0',
    ]


def test_a_waiting_receive_ends_empty_when_the_server_stops(server: Server) -> None:
    client = sqs(own_url(server))
    queue = client.create_queue(QueueName="empty")["QueueUrl"]
    with ThreadPoolExecutor(1) as executor:
        receiving = executor.submit(client.receive_message, QueueUrl=queue, WaitTimeSeconds=20)
        eventually(lambda: b"fastness_consumers_waiting 1.0" in server.get("/metrics")[2])
        server.process.send_signal(signal.SIGTERM)
        assert "Messages" not in receiving.result(SECONDS_MAX)
    assert exit_code(server.process) == 0


def test_a_server_without_sqs_says_how_to_turn_it_on(tmp_path: Path) -> None:
    server = Server(tmp_path)
    try:
        status, _, body = server.get("/sqs/", body=b"Action=ListQueues")
        assert status == 404
        assert "serve with --sqs" in json.loads(body)["detail"]
    finally:
        server.kill()


def test_a_port_that_is_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        settings = Settings(data="memory:", port=0, sqs_port=port, sqs_anonymous=True)
        with pytest.raises(InvalidArgument, match=f"Port {port} of 127.0.0.1 is already in use; .* --sqs-port"):
            asyncio.run(serve(settings))


def test_anonymous_requests_are_refused_on_other_addresses() -> None:
    settings = Settings(
        data="memory:", host="0.0.0.0", port=0, tokens=True, insecure=True, sqs=True, sqs_anonymous=True
    )
    with pytest.raises(InvalidArgument, match="not a loopback address: --sqs-anonymous is refused"):
        asyncio.run(serve(settings))
