"""Messages are put with tags, and found by them, in every way into a plane."""

from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore import UNSIGNED
from botocore.config import Config
from click.testing import CliRunner

import fastness
from fastness.cli.main import root
from fastness.errors import InvalidArgument
from fastness.limits import TAG_BYTES_MAX, TAGS_MAX
from tests.end_to_end.sqs_clients import anonymous_server


def found(plane: fastness.Plane, queue: str, tag: str) -> list[list[str]]:
    return [each.tags for each in plane.queue(queue).search(tag=tag).messages]


@pytest.fixture
def plane(tmp_path: Path) -> Any:
    with (
        anonymous_server(tmp_path) as credentials,
        fastness.connect(credentials.endpoint.removesuffix("/sqs")) as plane,
    ):
        yield plane


def test_a_message_is_found_by_each_of_its_tags(plane: fastness.Plane) -> None:
    plane.queue("python").put({"n": 1}, tags=["red", "urgent"])
    plane.queue("python").put({"n": 2}, tags=["red"])
    plane.queue("python").put({"n": 3})
    assert found(plane, "python", "urgent") == [["red", "urgent"]]
    assert len(found(plane, "python", "red")) == 2
    assert found(plane, "python", "re") == []
    message = plane.queue("python").receive()
    assert message is not None
    assert message.tags == ["red", "urgent"]
    message.reject()
    [dead] = plane.queue("python").search(tag="urgent").messages
    assert dead.state == "dead"


@pytest.mark.parametrize("tags", ["urgent", [""], ["x" * (TAG_BYTES_MAX + 1)], ["x"] * (TAGS_MAX + 1), [7]])
def test_other_tags_are_refused(plane: fastness.Plane, tags: Any) -> None:
    with pytest.raises(InvalidArgument, match="tags"):
        plane.queue("python").put({"n": 1}, tags=tags)


def test_tags_are_given_on_the_command_line(plane: fastness.Plane) -> None:
    url: str = plane._transport.url  # type: ignore[attr-defined]
    put = CliRunner().invoke(root, ["--url", url, "queue", "put", "cli", "x", "--tag", "red", "--tag", "urgent"])
    assert put.exit_code == 0, put.output
    shown = CliRunner().invoke(root, ["--url", url, "message", "search", "cli", "--tag", "urgent", "--json"])
    assert '"tags":["red","urgent"]' in shown.output.replace(" ", "").replace("\n", "")


def test_an_attribute_of_sqs_has_the_tags(plane: fastness.Plane) -> None:
    url: str = plane._transport.url  # type: ignore[attr-defined]
    sqs = boto3.client(
        "sqs", endpoint_url=f"{url}/sqs", region_name="us-east-1", config=Config(signature_version=UNSIGNED)
    )
    queue = sqs.create_queue(QueueName="sqs")["QueueUrl"]
    attribute = {"DataType": "String", "StringValue": "red, urgent"}
    sqs.send_message(QueueUrl=queue, MessageBody="x", MessageAttributes={"fastness-tags": attribute})
    assert found(plane, "sqs", "urgent") == [["red", "urgent"]]
