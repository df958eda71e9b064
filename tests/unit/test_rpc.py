"""JSON-RPC requests, their responses and error codes."""

import json
from base64 import urlsafe_b64encode
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest

from fastness.errors import Busy, NotAllowed, RateLimited
from fastness.limits import RPC_BATCH_MAX, RPC_BYTES_MAX
from fastness.plane.embedded import AsyncEmbeddedTransport
from fastness.plane.open import Options, open_plane_async
from fastness.server.authorization import AllowAll, Authorizer
from fastness.server.ingress_metrics import IngressMetrics
from fastness.server.problems import problem_for
from fastness.server.rpc import Caller, Rpc, caller_of, encode
from fastness.testing.clock import ManualClock
from fastness.wire.ingress import SYNCED, Push
from fastness.wire.mail import BlockSender, CountMail, MailPolicy, ReadMail, SetMailPolicy
from fastness.wire.problems import error_of
from fastness.wire.rpc import RpcCode

ADA = "ada@main"


class TokenHolder(Authorizer):
    """The authorizer of a caller with the token `ada`."""

    name = "0123"
    holder = "ada"
    client = ""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.requests: list[Any] = []

    def authorize(self, request: Any) -> None:
        self.requests.append(request)
        if self.error is not None:
            raise self.error


@pytest.fixture
async def transport() -> AsyncIterator[AsyncEmbeddedTransport]:
    transport = await open_plane_async("memory:", Options(pushes_per_minute=1_000))
    yield transport
    await transport.close()


@pytest.fixture
def rpc(transport: AsyncEmbeddedTransport) -> Rpc:
    return Rpc(transport, agent="bob")


def call(method: str = "agent.ping", params: Any = None, **more: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": 1, "method": method} | ({} if params is None else {"params": params}) | more


def push(key: str = "k", **more: Any) -> dict[str, Any]:
    params = {
        "topic": "t",
        "content_type": "text/plain",
        "payload_base64": urlsafe_b64encode(b"hello").decode().rstrip("="),
        "idempotency_key": key,
        "durability": "synced",
    }
    return call("agent.data.push", {name: value for name, value in (params | more).items() if value is not None})


async def respond(rpc: Rpc, body: Any, caller: Caller | None = None) -> Any:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    if caller is None:
        answer = await rpc.answer(ADA, data)
        return None if answer is None else json.loads(answer)
    response = await rpc.respond(caller, data)
    return None if response is None else json.loads(encode(response))


def code_of(answer: Any, id: Any = 1) -> RpcCode:
    """The code of a failure; checks the form of the response."""
    assert (answer["jsonrpc"], answer["id"]) == ("2.0", id)
    assert set(answer) == {"jsonrpc", "id", "error"}
    error = answer["error"]
    code = RpcCode(error["code"])
    assert error["message"] == f"ERR_{code.name}"
    assert error["data"]["details"]
    return code


# The frames.


async def test_ping_is_answered(rpc: Rpc) -> None:
    answer = await respond(rpc, call(id="x"))
    assert (answer["jsonrpc"], answer["id"], answer["result"]["ok"]) == ("2.0", "x", True)
    assert answer["result"]["ts"].endswith("Z")


async def test_capabilities_list_methods_and_limits(rpc: Rpc) -> None:
    result = (await respond(rpc, call("agent.capabilities.get", {})))["result"]
    assert result["allowed_methods"] == ["agent.ping", "agent.capabilities.get", "agent.data.push"]
    assert result["capabilities"] == ["data.push.v1"]
    assert (result["protocol_min"], result["protocol_max"]) == (1, 1)
    assert result["limits"] == {
        "rpc_bytes": 262_144,
        "batch_calls": 64,
        "payload_bytes": 131_072,
        "pushes_per_minute": 1_000,
    }


@pytest.mark.parametrize("data", [b"", b"{", b'{"jsonrpc": "2.0", "method": "foobar, "params": "bar", "baz]', b"\xff"])
async def test_invalid_json_is_a_parse_error(rpc: Rpc, data: bytes) -> None:
    assert code_of(await respond(rpc, data), None) == -32700


@pytest.mark.parametrize(
    ("body", "id"),
    [
        (1, None),
        ("text", None),
        ({}, None),
        (call(jsonrpc="1.0"), 1),
        ({"id": 1, "method": "agent.ping"}, 1),
        ({"jsonrpc": "2.0", "id": 1}, 1),
        (call(method=1), 1),  # type: ignore[arg-type]
        ({"jsonrpc": "2.0", "method": 1, "params": "bar"}, None),
        (call(params="text"), 1),
        (call(id={}), None),
        (call(id=[1]), None),
        (call(id=True), None),
        ([], None),
    ],
)
async def test_malformed_call_is_an_invalid_request(rpc: Rpc, body: Any, id: Any) -> None:
    assert code_of(await respond(rpc, body), id) == -32600


@pytest.mark.parametrize("id", [1, 0, -7, 1.5, "x", "", None])
async def test_id_is_returned_unchanged(rpc: Rpc, id: Any) -> None:
    assert (await respond(rpc, call(id=id)))["id"] == id


async def test_unknown_method_is_not_found(rpc: Rpc) -> None:
    assert code_of(await respond(rpc, call("agent.nothing"))) == -32601


async def test_notification_is_executed_and_not_answered(rpc: Rpc, transport: AsyncEmbeddedTransport) -> None:
    notification = push()
    del notification["id"]
    assert await respond(rpc, notification) is None
    assert (await transport.call(CountMail("bob"))).pending == 1
    for refused in (call("agent.nothing"), call("agent.data.push", {})):
        del refused["id"]
        assert await respond(rpc, refused) is None


async def test_batch_is_answered_in_order_without_its_notifications(rpc: Rpc) -> None:
    notification = call()
    del notification["id"]
    answers = await respond(rpc, [call(id=1), notification, 1, call("agent.nothing", id=2), push(to="eve") | {"id": 3}])
    assert [answer["id"] for answer in answers] == [1, None, 2, 3]
    assert [answer.get("error", {}).get("code") for answer in answers] == [None, -32600, -32601, None]
    assert await respond(rpc, [notification, notification]) is None


async def test_batch_size_is_bounded(rpc: Rpc) -> None:
    assert len(await respond(rpc, [call(id=number) for number in range(RPC_BATCH_MAX)])) == RPC_BATCH_MAX
    answer = await respond(rpc, [call(id=number) for number in range(RPC_BATCH_MAX + 1)])
    assert code_of(answer, None) == -32600


async def test_request_size_is_bounded(rpc: Rpc) -> None:
    padded = json.dumps(call()).encode()
    assert (await respond(rpc, padded.ljust(RPC_BYTES_MAX)))["result"]["ok"]
    assert code_of(await respond(rpc, padded.ljust(RPC_BYTES_MAX + 1)), None) == -32005


async def test_unexpected_error_has_no_details(caplog: pytest.LogCaptureFixture) -> None:
    answer = await respond(Rpc(SimpleNamespace()), call("agent.capabilities.get"))
    assert code_of(answer) == -32603
    assert "SimpleNamespace" not in answer["error"]["data"]["details"]
    assert "SimpleNamespace" in caplog.text


# Pushes.


async def test_push_is_stored_and_reports_its_durability(rpc: Rpc, transport: AsyncEmbeddedTransport) -> None:
    result = (await respond(rpc, push(durability=None)))["result"]
    assert {name: result[name] for name in ("accepted", "deduped", "durability")} == {
        "accepted": True,
        "deduped": False,
        "durability": "accepted",
    }
    result = (await respond(rpc, push()))["result"]
    assert (result["accepted"], result["deduped"], result["durability"]) == (True, True, "synced")
    (mail,) = (await transport.call(ReadMail("bob"))).mails
    assert (mail.id, mail.sender) == (result["id"], ADA)


@pytest.mark.parametrize(
    "change",
    [
        {"topic": None},
        {"topic": ""},
        {"content_type": None},
        {"payload_base64": None},
        {"payload_base64": "+"},
        {"idempotency_key": None},
        {"idempotency_key": 7},
        {"durability": "maybe"},
        {"topic": "chat.message"},
        {"surprise": 1},
        {"to": "no name!"},
        {"to": "bob@elsewhere"},
    ],
)
async def test_invalid_parameters_are_refused(rpc: Rpc, change: dict[str, Any]) -> None:
    assert code_of(await respond(rpc, push(**change))) == -32602


@pytest.mark.parametrize("params", [None, [], [1]])
async def test_parameters_must_be_an_object(rpc: Rpc, params: Any) -> None:
    assert code_of(await respond(rpc, call("agent.data.push", params))) == -32602


async def test_recipient_comes_from_the_call_or_the_settings(transport: AsyncEmbeddedTransport) -> None:
    answer = await respond(Rpc(transport), push())
    assert code_of(answer) == -32602
    assert "ingress_agent" in answer["error"]["data"]["details"]
    assert "result" in await respond(Rpc(transport), push(to="eve@main"))
    assert (await transport.call(CountMail("eve"))).pending == 1


async def test_too_large_payload_has_its_own_code(rpc: Rpc) -> None:
    large = urlsafe_b64encode(b"x" * 131_073).decode().rstrip("=")
    answer = await respond(rpc, push(payload_base64=large))
    assert (code_of(answer), answer["error"]["data"]["code"]) == (-32005, "payload_too_large")


async def test_full_mailbox_is_busy(rpc: Rpc, transport: AsyncEmbeddedTransport) -> None:
    await transport.call(SetMailPolicy(MailPolicy(pending_max=1)))
    await respond(rpc, push("1"))
    answer = await respond(rpc, push("2"))
    assert code_of(answer) == -32010
    assert answer["error"]["data"]["code"] == "queue_full"
    assert answer["error"]["data"]["retry_after_seconds"] == 1


async def test_blocked_sender_is_unauthorized(rpc: Rpc, transport: AsyncEmbeddedTransport) -> None:
    await transport.call(BlockSender("bob", "ada"))
    assert code_of(await respond(rpc, push())) == -32001


async def test_closed_ingress_is_busy(rpc: Rpc, transport: AsyncEmbeddedTransport) -> None:
    await transport.ingress.close()
    assert code_of(await respond(rpc, push())) == -32010


async def test_too_many_pushes_are_rate_limited() -> None:
    transport = await open_plane_async("memory:", Options(pushes_per_minute=2))
    rpc = Rpc(transport, agent="bob")
    codes = [code_of(answer) for key in "abc" if "error" in (answer := await respond(rpc, push(key)))]
    assert codes == [-32006]
    await transport.close()


# The sender.


async def test_sender_is_the_authenticated_caller(rpc: Rpc, transport: AsyncEmbeddedTransport) -> None:
    assert "result" in await respond(rpc, push("1"))
    assert "result" in await respond(rpc, push("2", **{"from": "ada"}))
    assert "result" in await respond(rpc, push("3", **{"from": "ada@main"}))
    assert code_of(await respond(rpc, push("4", **{"from": "eve"}))) == -32002
    assert {mail.sender for mail in (await transport.call(ReadMail("bob"))).mails} == {ADA}


async def test_token_pushes_by_its_name_in_universes_where_it_may_send_mail(
    rpc: Rpc, transport: AsyncEmbeddedTransport
) -> None:
    authorizer = TokenHolder()
    assert "result" in await respond(rpc, push(to="bob@beta"), caller_of(authorizer, "main"))
    assert (authorizer.requests[0].sender, authorizer.requests[0].universe) == ("ada", "beta")
    (mail,) = (await transport.call(ReadMail("bob", universe="beta"))).mails
    assert mail.sender == "ada@beta"
    answer = await respond(rpc, push(**{"from": "eve"}), caller_of(authorizer, "main"))
    assert code_of(answer) == -32002


async def test_token_that_may_not_send_mail_may_not_push(rpc: Rpc) -> None:
    refused = caller_of(TokenHolder(NotAllowed("not for you")), "main")
    assert code_of(await respond(rpc, push(), refused)) == -32004
    assert "result" in await respond(rpc, call(), refused)


async def test_token_above_its_rate_is_rate_limited(rpc: Rpc) -> None:
    answer = await respond(rpc, push(), caller_of(TokenHolder(Busy("slow down")), "main"))
    assert code_of(answer) == -32006


async def test_the_wait_of_a_rate_limit_is_exact_in_json_rpc_and_in_problems(clock: ManualClock) -> None:
    transport = await open_plane_async("memory:", Options(pushes_per_minute=7, clock=clock))
    rpc = Rpc(transport, agent="bob")
    for number in range(7):
        assert "result" in await respond(rpc, push(str(number)))
    for _ in range(2):
        refused = await respond(rpc, push("more"))
        assert code_of(refused) == RpcCode.RATE_LIMITED
        seconds = refused["error"]["data"]["retry_after_seconds"]
        request = Push("bob", "t", "text/plain", b"x", "other", SYNCED, "ada")
        with pytest.raises(RateLimited) as limited:
            await transport.call(request)
        problem, headers = problem_for(limited.value, "id")
        assert problem.retry_after_seconds == limited.value.retry_after_seconds == seconds
        assert int(headers["Retry-After"]) - 1 < seconds <= int(headers["Retry-After"])
        assert getattr(error_of(problem), "retry_after_seconds", None) == seconds
        clock.advance_ms(round(seconds * 1_000) - 1)
        assert code_of(await respond(rpc, push("more"))) == RpcCode.RATE_LIMITED
        clock.advance_ms(1)
        assert "result" in await respond(rpc, push("more"))
    await transport.close()


async def test_sender_is_trusted_without_authentication(rpc: Rpc, transport: AsyncEmbeddedTransport) -> None:
    loopback = caller_of(AllowAll(), "main")
    await respond(rpc, push("1", **{"from": "eve"}), loopback)
    await respond(rpc, push("2"), loopback)
    assert [mail.sender for mail in (await transport.call(ReadMail("bob"))).mails] == ["eve@main", "anybody@main"]


async def test_relay_agent_cannot_push_to_another_universe(rpc: Rpc) -> None:
    answer = await rpc.answer("ada@beta", json.dumps(push(to="bob@main")).encode())
    assert answer is not None
    assert code_of(json.loads(answer)) == -32602
    answer = await rpc.answer("ada@beta", json.dumps(push(to="bob@beta")).encode())
    assert answer is not None
    assert "result" in json.loads(answer)


# Metrics.


async def test_ingress_metrics_are_collected(rpc: Rpc, transport: AsyncEmbeddedTransport) -> None:
    registry = CollectorRegistry()
    registry.register(IngressMetrics(transport.ingress))
    await respond(rpc, [push("1"), push("2")])
    await respond(rpc, push("2"))
    await respond(rpc, push("3", durability=None))
    await respond(rpc, push("3", topic=""))
    text = generate_latest(registry).decode()
    for line in (
        "fastness_ingress_depth 1.0",
        'fastness_ingress_pushes_total{outcome="accepted"} 3.0',
        'fastness_ingress_pushes_total{outcome="deduped"} 1.0',
        'fastness_ingress_rejects_total{reason="invalid_argument"} 1.0',
        "fastness_ingress_batch_size_sum 2.0",
        "fastness_ingress_writer_lag_seconds ",
        "fastness_ingress_flush_seconds_count ",
    ):
        assert line in text
    assert "fastness_ingress_lost_total{" not in text
