"""Sends between universes over a server: a token of one universe reaches the other only as both policies allow."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import fastness
from fastness import AsyncHost, DomainEvent, Event, HostApp, Plane, TurnContext
from fastness.errors import NotAllowed, SendRefused
from fastness.tasks.planes import async_plane_of
from fastness.wire.atomic import CommitAtomic
from fastness.wire.hosting import SendToWorld, SetSendPolicy
from tests.support.server_process import Server

HOST_VERBS = "hosting:claim,hosting:commit,hosting:fail,hosting:renew,hosting:release,hosting:send,world:*,blob:*"


@pytest.fixture
def planes(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """A server, and planes by the names of their tokens."""
    with fastness.open(f"dir:{tmp_path / 'data'}") as plane:
        made = {
            name: plane.tokens.create(name, universes=name.partition("-")[0], verbs=verbs).token
            for name, verbs in {"shop": "*", "bank": "*", "shop-host": HOST_VERBS}.items()
        }
    server = Server(tmp_path, tokens=True)
    with ExitStack() as stack:
        stack.callback(server.kill)
        opened = {
            name: stack.enter_context(server.plane(token, name.partition("-")[0])) for name, token in made.items()
        }
        yield {"server": server, "tokens": made, **opened}


def test_a_token_of_the_sender_sends_what_both_universes_allow(planes: dict[str, Any]) -> None:
    shop, bank, host = (planes[name] for name in ("shop", "bank", "shop-host"))
    app = HostApp()

    @app.program
    def order(state: Any, event: Event, context: TurnContext) -> Any:
        context.send("teller@bank", event.json(), schema="pay")
        return (state or 0) + 1

    def run_ready() -> None:
        async def run(plane: Plane) -> None:
            await AsyncHost(async_plane_of(plane), app, max_attempts=1).run_ready()

        asyncio.run(run(host))

    bank.world("teller").create()
    orders = shop.world("orders")
    orders.create(program="order")
    orders.send("order", 1)
    run_ready()
    assert "SendRefused: Universe shop does not allow sends to bank" in orders.aside()[0].error

    # The sender alone cannot allow it, and its host not even that.
    with pytest.raises(NotAllowed, match=r"does not allow hosting:policy\.set"):
        host.hosting.set_policy(sends_to=["bank"])
    shop.hosting.set_policy(sends_to=["bank"])
    with pytest.raises(NotAllowed, match="is not for bank"):
        shop._transport.call(SetSendPolicy(accepts_from=["shop"], universe="bank"))
    orders.send("order", 2)
    run_ready()
    assert "SendRefused: Universe bank does not accept sends from shop" in orders.aside(after=0)[0].error
    assert bank.world("teller").inbox.read() == []

    bank.hosting.set_policy(accepts_from=["shop"])
    orders.send("order", 3)
    run_ready()
    wanted = [(0, DomainEvent(schema="pay", payload=b"3", sender="orders@shop"))]
    assert bank.world("teller").inbox.read() == wanted

    # What is allowed is a send of a world that the caller holds, and nothing else in the other universe.
    beyond = Plane(host._transport, "bank").world("teller")
    for call in (lambda: beyond.send("pay"), beyond.describe, beyond.inbox.read):
        with pytest.raises(NotAllowed, match="is not for bank"):
            call()
    fields: dict[str, Any] = {"world": "orders", "owner": "h", "to": "teller", "to_universe": "bank", "schema": "pay"}
    shop.world("orders").send("order", 4)
    [claimed] = host.hosting.claim(["order"], owner="h")
    forged = SendToWorld(**fields, fence=claimed.fence, universe="bank")
    for request in (forged, CommitAtomic([forged])):
        with pytest.raises(NotAllowed, match="is not for bank"):
            host._transport.call(request)
    assert bank.world("teller").inbox.read() == wanted

    server, token = planes["server"], planes["tokens"]["shop-host"]

    def post(to_universe: str) -> tuple[int, Any]:
        body = {**fields, "fence": claimed.fence, "to_universe": to_universe}
        del body["world"]
        path = "/v1/worlds/orders/sends?universe=shop"
        status, _, answer = server.get(path, body=json.dumps(body).encode(), token=token)
        return status, json.loads(answer).get("code")

    assert post("elsewhere") == (403, SendRefused.code)
    assert post("bank") == (201, None)
    assert [item.sender for _, item in bank.world("teller").inbox.read()] == ["orders@shop"] * 2
