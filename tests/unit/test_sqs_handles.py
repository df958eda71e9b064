"""Receipt handles, queue URLs and ARNs, and the rules of batches."""

import os
from base64 import urlsafe_b64decode, urlsafe_b64encode
from typing import Any

import pytest

from fastness.server.authorization import AllowAll
from fastness.server.sqs.batch import BatchResults, checked_entries
from fastness.server.sqs.caller import SqsCaller
from fastness.server.sqs.errors import SqsError
from fastness.server.sqs.handles import parse_handle, receipt_handle
from fastness.server.sqs.queue_urls import queue_arn, queue_at, queue_of_arn, queue_url
from fastness.wire.stored_messages import format_id, format_lease_id

CALLER = SqsCaller(authorizer=AllowAll(), universe="main", base_url="http://127.0.0.1:9440/sqs", region="us-east-1")


def refusal(work: Any, *args: Any) -> SqsError:
    with pytest.raises(SqsError) as caught:
        work(*args)
    return caught.value


def handle_of(universe: str = "main", queue: str = "orders") -> tuple[str, bytes, bytes]:
    id, ref = os.urandom(16), os.urandom(17)
    return receipt_handle(universe, queue, id=id, fence=2**40, ref=ref, received_ms=1_700_000_000_123), id, ref


def test_a_handle_names_its_delivery() -> None:
    handle, id, ref = handle_of()
    receipt = parse_handle("main", "orders", handle)
    assert receipt.lease.id == format_id(id)
    assert receipt.lease.fence == 2**40
    assert receipt.lease.lease_id == format_lease_id(id, 2**40, ref)
    assert receipt.received_ms == 1_700_000_000_123
    assert "=" not in handle


@pytest.mark.parametrize(("universe", "queue"), [("main", "other"), ("other", "orders"), ("main", "orders.fifo")])
def test_a_handle_of_another_queue_is_refused(universe: str, queue: str) -> None:
    assert refusal(parse_handle, universe, queue, handle_of()[0]).name == "ReceiptHandleIsInvalid"


@pytest.mark.parametrize("handle", ["", "x", "ü" * 76, "*" * 76, "A" * 76, "A" * 75, "A" * 100_000])
def test_other_texts_are_no_handles(handle: str) -> None:
    error = refusal(parse_handle, "main", "orders", handle)
    assert error.name == "ReceiptHandleIsInvalid"
    assert len(error.message) < 400


def test_a_handle_with_other_characters_of_the_same_bytes_is_refused() -> None:
    handle = handle_of()[0]
    assert refusal(parse_handle, "main", "orders", handle[:-1] + "\n").name == "ReceiptHandleIsInvalid"
    data = bytearray(urlsafe_b64decode(handle))
    data[0] = 2
    another_version = urlsafe_b64encode(bytes(data)).decode()
    assert refusal(parse_handle, "main", "orders", another_version).name == "ReceiptHandleIsInvalid"


def test_a_queue_url_names_its_queue_whatever_its_host() -> None:
    url = queue_url(CALLER, "Orders.fifo")
    assert url == "http://127.0.0.1:9440/sqs/000000000000/Orders.fifo"
    assert queue_at(CALLER, url) == "Orders.fifo"
    assert queue_at(CALLER, "https://sqs.example.org/000000000000/Orders.fifo") == "Orders.fifo"
    assert queue_at(CALLER, "http://localhost:9324/000000000000/a%2Db/") == "a-b"
    assert queue_at(CALLER, "orders") == "orders"


def test_the_url_of_another_account_names_no_queue() -> None:
    assert refusal(queue_at, CALLER, "http://127.0.0.1/111111111111/orders").name == "QueueDoesNotExist"


@pytest.mark.parametrize("url", ["", "/", "http://127.0.0.1:9440/sqs/000000000000/", "http://[/x y", "a b"])
def test_other_texts_are_no_queue_urls(url: str) -> None:
    assert refusal(queue_at, CALLER, url).name in {"InvalidAddress", "QueueDoesNotExist"}


def test_an_arn_names_a_queue_of_this_region_and_account() -> None:
    arn = queue_arn(CALLER, "orders")
    assert arn == "arn:aws:sqs:us-east-1:000000000000:orders"
    assert queue_of_arn(CALLER, "SourceArn", arn) == "orders"
    assert (
        refusal(queue_of_arn, CALLER, "SourceArn", arn.replace("us-east-1", "eu-west-1")).name
        == "ResourceNotFoundException"
    )
    assert refusal(queue_of_arn, CALLER, "SourceArn", "orders").query_code == "InvalidParameterValue"


def test_a_batch_has_one_to_ten_entries() -> None:
    assert refusal(checked_entries, "SendMessageBatch", {"Entries": []}).name == "EmptyBatchRequest"
    many = [{"Id": str(i)} for i in range(11)]
    assert refusal(checked_entries, "SendMessageBatch", {"Entries": many}).name == "TooManyEntriesInBatchRequest"
    assert checked_entries("SendMessageBatch", {"Entries": many[:10]}) == many[:10]


def test_the_ids_of_a_batch_are_valid_and_different() -> None:
    for id in ("", "a b", "x" * 81, "ü", "a\n", "a.b"):
        assert refusal(checked_entries, "SendMessageBatch", {"Entries": [{"Id": id}]}).name == "InvalidBatchEntryId"
    assert (
        refusal(checked_entries, "SendMessageBatch", {"Entries": [{"Id": "a"}, {"Id": "a"}]}).name
        == "BatchEntryIdsNotDistinct"
    )
    assert checked_entries("SendMessageBatch", {"Entries": [{"Id": "x" * 80}, {"Id": "A_-9"}]})


def test_the_results_of_a_batch_keep_the_order_of_its_entries() -> None:
    entries = [{"Id": "a"}, {"Id": "b"}, {"Id": "c"}]
    results = BatchResults(entries)
    results.succeed(entries[2], MessageId="3")
    results.fail(entries[1], SqsError("InvalidMessageContents", "no"))
    results.succeed(entries[0], MessageId="1")
    assert results.output() == {
        "Successful": [{"Id": "a", "MessageId": "1"}, {"Id": "c", "MessageId": "3"}],
        "Failed": [{"Id": "b", "SenderFault": True, "Code": "InvalidMessageContents", "Message": "no"}],
    }
