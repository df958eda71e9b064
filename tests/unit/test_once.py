"""Calls that are sent twice happen once: by whatever door, on every backend, whatever was lost on the way."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from holdfast.errors import HeadAdvanced, IdempotencyKeyReused, InvalidArgument
from holdfast.kv import Database
from holdfast.layers.once import once, sending
from holdfast.limits import ONCE_KEY_BYTES_MAX, ONCE_PERIOD_SECONDS
from holdfast.plane.groups import call_group
from holdfast.plane.once import once_of
from holdfast.plane.parts import Parts
from holdfast.plane.ports import AsyncEmbeddedPort, EmbeddedPort
from holdfast.testing.clock import ManualClock
from holdfast.wire.atomic import CommitAtomic
from holdfast.wire.frames import Call
from holdfast.wire.problems import error_of, problem_of
from holdfast.wire.queues import GetQueueStats, NewMessage, PutMessages
from holdfast.wire.requests import Request
from holdfast.wire.states import UpdateState
from holdfast.wire.worlds import AppendEntries, CreateWorld

PERIOD_MS = ONCE_PERIOD_SECONDS * 1_000
PUT = PutMessages("jobs", [NewMessage(b"a", attributes={"a": "1", "b": "2"})])


@pytest.fixture
def port(database: Database, clock: ManualClock) -> Iterator[EmbeddedPort]:
    port = EmbeddedPort(Parts(database, clock=clock))
    yield port
    port.close()


def send(port: EmbeddedPort, request: Request[Any], key: str = "k", *, again: bool = True) -> Any:
    return port.call(request, once_of(port, request, key, again=again))


def put_total(port: EmbeddedPort) -> int:
    return port.call(GetQueueStats("jobs")).put_total


# What is remembered.


def test_a_call_that_is_sent_again_is_answered_alike(port: EmbeddedPort, clock: ManualClock) -> None:
    first = send(port, PUT, again=False)
    clock.advance_ms(PERIOD_MS)
    assert send(port, PUT) == first
    assert put_total(port) == 1


def test_calls_of_different_keys_are_different_calls(port: EmbeddedPort) -> None:
    assert send(port, PUT, "one") != send(port, PUT, "two")
    assert put_total(port) == 2


def test_a_call_that_failed_has_not_happened(port: EmbeddedPort) -> None:
    port.call(CreateWorld("w"))
    append = AppendEntries("w", [b"\x01"], 1)
    with pytest.raises(HeadAdvanced):
        send(port, append)
    port.call(AppendEntries("w", [b"\x00"], 0))
    assert send(port, append).height == send(port, append).height == 1


def test_a_key_is_forgotten_after_two_periods(port: EmbeddedPort, clock: ManualClock) -> None:
    send(port, PUT)
    clock.advance_ms(2 * PERIOD_MS)
    send(port, PUT)
    assert put_total(port) == 2


def test_a_list_that_is_sent_again_is_answered_with_the_same_types(port: EmbeddedPort) -> None:
    """The HTTP door looks at types to say what an answer looks like as JSON."""
    request = CommitAtomic([PUT, UpdateState("s", b"\x01")])
    first = send(port, request)
    assert send(port, request) == first
    assert [type(answer) for answer in first.answers] == [type(answer) for answer in send(port, request).answers]


@pytest.mark.parametrize("key", ["", "x" * (ONCE_KEY_BYTES_MAX + 1)])
def test_a_key_that_is_none_is_refused(port: EmbeddedPort, key: str) -> None:
    with pytest.raises(InvalidArgument, match="UUID"):
        send(port, PUT, key)
    assert put_total(port) == 0


# Another call under the same key.


def changed(request: Request[Any], **fields: Any) -> Any:
    return msgspec.structs.replace(request, **fields)


@pytest.mark.parametrize(
    "other",
    [
        changed(PUT, messages=[NewMessage(b"b")]),
        changed(PUT, messages=[*PUT.messages, *PUT.messages]),
        changed(PUT, queue="jobs2"),
        changed(PUT, universe="other"),
        UpdateState("s", b"\x01"),
        CommitAtomic([PUT]),
    ],
    ids=["payload", "batch", "queue", "universe", "operation", "list"],
)
def test_a_key_of_another_call_is_refused(port: EmbeddedPort, other: Request[Any]) -> None:
    first = send(port, PUT)
    with pytest.raises(IdempotencyKeyReused, match="its own"):
        send(port, other)
    assert send(port, PUT) == first
    assert put_total(port) == 1


def test_what_says_the_same_is_the_same_call(port: EmbeddedPort) -> None:
    """Maps have no order, and what is not said is what it is by default."""
    first = send(port, PUT)
    other = PutMessages("jobs", [NewMessage(b"a", attributes={"b": "2", "a": "1"}, priority=5)], universe="main")
    assert send(port, other) == first


def test_a_key_that_was_reused_is_no_server_error() -> None:
    problem = problem_of(IdempotencyKeyReused("x"))
    assert (problem.status, problem.code, problem.retry) == (422, "idempotency_key_reused", "never")
    assert isinstance(error_of(problem), IdempotencyKeyReused)


# Groups.


async def test_a_group_remembers_each_of_its_calls(database: Database, clock: ManualClock) -> None:
    port = AsyncEmbeddedPort(Parts(database, clock=clock))
    puts = [changed(PUT, queue=f"q{number}") for number in range(3)]
    first = await call_group(port, [Call(number, put, f"k{number}") for number, put in enumerate(puts)])
    puts[1] = changed(puts[1], messages=[NewMessage(b"b")])
    second = await call_group(port, [Call(number, put, f"k{number}", True) for number, put in enumerate(puts)])
    assert (second[0], type(second[1]), second[2]) == (first[0], IdempotencyKeyReused, first[2])
    await port.close()


# The layer.


def test_whoever_is_fresh_does_not_look(database: Database) -> None:
    call = sending("k", PUT, fresh=True)

    def work(answer: int) -> int:
        return database.transact(once, call, lambda tx: answer, msgspec.msgpack.decode)

    assert (work(1), work(2)) == (1, 2)
    call = call._replace(fresh=False)
    assert work(3) == 2
