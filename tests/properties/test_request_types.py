"""Every field of every request refuses a value of another type: the error names the field, and nothing is written."""

import asyncio
from collections.abc import Iterator
from contextlib import nullcontext
from enum import IntEnum, StrEnum
from typing import Any, Literal, get_origin

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fastness
from fastness.client.transport import AsyncRemoteTransport, RemoteTransport
from fastness.errors import BatchTooLarge, EmptyBatch, InvalidArgument, InvalidName
from fastness.plane.embedded import AsyncEmbeddedTransport, EmbeddedTransport
from fastness.wire.atomic import STEPS, CommitAtomic
from fastness.wire.blobs import OpenBlob, WriteBlob
from fastness.wire.catalog import REQUESTS
from fastness.wire.fields import bare
from fastness.wire.hosting import RenewWorlds
from fastness.wire.leases import LeaseProof
from fastness.wire.queues import MessageLease, NewMessage, PutMessages, QueuePolicy
from fastness.wire.requests import Request
from fastness.wire.type_checks import check_types, refusal_of
from tests.support.failures import Failures
from tests.support.http_server import serving
from tests.support.request_values import SCALARS, filled, is_decodable, options_of


def wrong(kind: Any) -> Any:
    """A value that has none of a type's options."""
    options = options_of(kind)
    taken = [each for each in options if each in SCALARS] + [str] * any(get_origin(each) is Literal for each in options)
    return next(
        value
        for each, value in ((int, 5), (str, "high"), (bytes, b"5"))
        if each not in taken and (each is not int or float not in taken)
    )


def cases() -> Iterator[tuple[type[Request[Any]], str, Request[Any]]]:
    """Each request with one wrong field."""
    for kind in REQUESTS:
        for field in msgspec.structs.fields(kind):
            if field.type is not Any:
                yield kind, field.name, msgspec.structs.replace(filled(kind), **{field.name: wrong(bare(field.type))})


CASES = list(cases())


def content(plane: fastness.Plane) -> list[tuple[bytes, bytes]]:
    transport: Any = plane._transport
    return list(transport.services.database.read(lambda tx: tx.scan(b"", b"\xff" * 8, limit=10_000)))


def check_refusal(error: object, name: str, request: Any) -> None:
    assert type(error) is InvalidArgument, (request, error)
    assert str(error).startswith(f"{name} is {getattr(request, name)!r}; give "), (request, error)


def check_streamed(transport: Any) -> None:
    """Requests with a body are refused, too."""
    for request in (WriteBlob(), OpenBlob("0" * 64)):
        wrong_one = msgspec.structs.replace(request, universe=5)
        with pytest.raises(InvalidArgument) as refused:
            transport.send(wrong_one, [b"a"]) if isinstance(request, WriteBlob) else transport.receive(wrong_one)
        check_refusal(refused.value, "universe", wrong_one)


def test_every_request_is_tried() -> None:
    assert {kind for kind, *_ in CASES} == set(REQUESTS)
    assert len(CASES) > 800


def test_embedded_requests_with_a_wrong_field_are_refused() -> None:
    with fastness.open("memory:") as plane:
        transport: Any = plane._transport
        assert isinstance(transport, EmbeddedTransport)
        before = content(plane)
        for kind, name, request in CASES:
            with pytest.raises(InvalidArgument) as refused:
                transport.call(request)
            check_refusal(refused.value, name, request)
            if kind in STEPS:
                with pytest.raises(InvalidArgument) as refused:
                    transport.call(CommitAtomic([request]))
                check_refusal(refused.value, name, request)
                with pytest.raises(InvalidArgument) as refused:
                    plane.transact(transport.execute, request)
                check_refusal(refused.value, name, request)
        check_streamed(transport)
        assert content(plane) == before


async def test_embedded_requests_on_an_event_loop_are_refused_too() -> None:
    async with fastness.open_async("memory:") as plane:
        transport: Any = plane._transport
        assert isinstance(transport, AsyncEmbeddedTransport)
        errors = await asyncio.gather(*(transport.call(request) for *_, request in CASES), return_exceptions=True)
        for error, (_, name, request) in zip(errors, CASES, strict=True):
            check_refusal(error, name, request)
        await plane.queue("jobs").put("it works on")
        assert (await plane.queue("jobs").stats()).ready == 1


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    with serving() as running:
        yield running


async def test_remote_requests_with_a_wrong_field_are_refused(server: Any) -> None:
    """The connection breaks, because the server cannot decode a frame; the call between them is made all the same."""
    remote = [(name, request) for kind, name, request in CASES if kind.operation.network]
    async with fastness.connect_async(server.url) as plane:
        transport: Any = plane._transport
        assert isinstance(transport, AsyncRemoteTransport)
        calls = [transport.call(request) for _, request in remote]
        good = plane.queue("good").put("it works on")
        *errors, receipt = await asyncio.gather(*calls, good, return_exceptions=True)
        for error, (name, request) in zip(errors, remote, strict=True):
            check_refusal(error, name, request)
        assert not isinstance(receipt, BaseException)
        survey = await plane.survey_queues()
        assert [(each.queue, each.ready) for each in survey.queues] == [("good", 1)]
        assert (await plane.worlds()) == []


def test_a_remote_request_of_a_thread_is_refused(server: Any) -> None:
    with fastness.connect(server.url) as plane:
        transport: Any = plane._transport
        assert isinstance(transport, RemoteTransport)
        for message in (NewMessage(priority="high"), NewMessage(priority=object())):  # type: ignore[arg-type]
            with pytest.raises(InvalidArgument, match=r"priority is .*; give a whole number from 0 to 9"):
                transport.call(PutMessages("jobs", [message]))
        check_streamed(transport)


# Handles.


REFUSED: list[tuple[str, Any]] = [
    ("priority is 'high'; give a whole number from 0 to 9", lambda plane: plane.queue("jobs").put(1, priority="high")),
    ("attributes['a'] is 1; give a text", lambda plane: plane.queue("jobs").put(1, attributes={"a": 1})),
    ("attributes is 'a'; give a dictionary", lambda plane: plane.queue("jobs").put(1, attributes="a")),
    ("keep_result is 'yes'; give True or False", lambda plane: plane.queue("jobs").put(1, keep_result="yes")),
    (f"group is ['{'x' * 57}…; give a text, or None", lambda plane: plane.queue("jobs").put(1, group=["x" * 1_000])),
    (
        "priority of messages[1] is 'high'; give a whole number from 0 to 9",
        lambda plane: plane.queue("jobs").put_many([1, NewMessage(priority="high")]),  # type: ignore[arg-type]
    ),
    (
        "priority of operations[1].messages[0] is 'high'; give a whole number from 0 to 9",
        lambda plane: plane.atomic().put(plane.queue("jobs"), 1).put(plane.queue("jobs"), 1, priority="high").commit(),
    ),
    (
        "visibility_seconds is 'x'; give a number from 0.001 to 43,200, or None",
        lambda plane: plane.queue("jobs").receive(visibility_seconds="x"),
    ),
    ("extend_for_seconds is 'x'; give a number", lambda plane: plane.queue("jobs").receive(extend_for_seconds="x")),
    (
        "ttl_seconds is '5'; give a number from 0.001 to 86,400",
        lambda plane: plane.lease("a").acquire("ada", ttl_seconds="5"),
    ),
    ("fields is 5; give a dictionary", lambda plane: plane.entities.write("task", "1", 5)),
]


@pytest.mark.parametrize("where", ["embedded", "remote"])
def test_handles_name_the_field_the_value_and_the_rule(server: Any, where: str) -> None:
    failures = Failures()
    with fastness.open("memory:") if where == "embedded" else fastness.connect(server.url, universe="handles") as plane:
        before = plane.queue("jobs").stats()
        for text, call in REFUSED:
            with failures.of(text):
                with pytest.raises(InvalidArgument) as refused:
                    call(plane)
                assert str(refused.value) == text
                assert plane.queue("jobs").stats() == before
    failures.check()


def test_a_message_is_not_leased_if_its_options_are_refused() -> None:
    with fastness.open("memory:") as plane:
        plane.queue("jobs").put(1)
        with pytest.raises(InvalidArgument, match="extend_for_seconds"):
            plane.queue("jobs").receive(extend_for_seconds="x")  # type: ignore[arg-type]
        assert plane.queue("jobs").stats().leased == 0


# What is accepted.


class Color(StrEnum):
    RED = "red"


class Level(IntEnum):
    HIGH = 9


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 63) - 1)
    | st.floats(allow_nan=False)
    | st.text(st.characters(codec="utf-8"), max_size=5)
    | st.binary(max_size=5)
    | st.sampled_from([Color.RED, Level.HIGH, "done", "leased", "none", "failures"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2) | st.integers(), inner, max_size=2),
    max_leaves=4,
)
STRUCTS = (NewMessage, QueuePolicy, MessageLease, LeaseProof)


@given(st.data())
def test_every_decoded_body_is_explained_or_left_to_its_decoder(data: Any) -> None:
    kind = data.draw(st.sampled_from(REQUESTS))
    fields = st.sampled_from([field.encode_name for field in msgspec.structs.fields(kind)])
    body = data.draw(st.dictionaries(fields, VALUES, max_size=3))
    refusal = refusal_of(kind, body, plain=True)
    is_of_batch = isinstance(refusal, EmptyBatch | BatchTooLarge)
    assert refusal is None or is_of_batch or any(name in str(refusal) for name in body)


@given(st.data())
def test_an_embedded_plane_accepts_what_a_server_decodes(data: Any) -> None:
    kind = data.draw(st.sampled_from(STRUCTS))
    field = data.draw(st.sampled_from([each for each in msgspec.structs.fields(kind) if each.name != "tier"]))
    value = msgspec.structs.replace(filled(kind), **{field.name: data.draw(VALUES)})
    refusal = refusal_of(kind, value)
    if isinstance(refusal, InvalidName):  # A decoder does not look at names.
        return
    assert is_decodable(value) == (refusal is None), (value, refusal)
    with nullcontext() if refusal is None else pytest.raises(InvalidArgument, match=rf"{field.name}\b.* is "):
        check_types(value)


def test_an_item_of_several_values_has_each_of_them() -> None:
    failures = Failures()
    wrong: list[Any] = [(), ("a",), ("a", "b"), ("a", 1, 2), ["a", None], []]
    for item in wrong:
        with failures.of(repr(item)), pytest.raises(InvalidArgument, match=r"^worlds\[0\]"):
            check_types(RenewWorlds([item], "host", 5.0))
    failures.check()
    check_types(RenewWorlds([("a", 1), ["b", 2]], "host", 5.0))  # type: ignore[list-item]


def test_a_value_that_fits_has_no_refusal() -> None:
    failures = Failures()
    for kind in STRUCTS:
        with failures.of(kind.__name__):
            assert refusal_of(kind, filled(kind)) is None
            assert refusal_of(kind, msgspec.json.decode(msgspec.json.encode(filled(kind))), plain=True) is None
    failures.check()
