"""An app that uses everything that programs and workflows can do, and scenarios of it."""

import asyncio
from datetime import timedelta
from typing import Any

from fastness.handles.sync.runs import Run
from fastness.hosts.adapters import EffectCall
from fastness.hosts.apps import HostApp
from fastness.hosts.hosted_world import HostedWorld
from fastness.hosts.programs import Event, TurnContext
from fastness.hosts.runners import Runner
from fastness.hosts.step_context import current_step
from fastness.hosts.workflows.run import WorkflowRun
from fastness.testing import HostTest

app = HostApp()


@app.program
def order(state: Any, event: Event, context: TurnContext) -> Any:
    """Charges a card, reminds after an hour, and tells everyone when it is paid."""
    state = state or {"status": "new", "log": []}
    log = [*state["log"], f"{event.kind} {event.name}"]
    if event.name == "order":
        context.call("charge_card", {"order": event.json()["id"]})
        context.timer("reminder", seconds=3_600)
        return {"status": "waiting", "log": log}
    if event.is_receipt("charge_card"):
        context.send("warehouse", {"ship": event.json()})
        context.put("emails", {"paid": event.json()})
        context.mail("ada@main", {"paid": event.json()}, sender="shop")
        context.publish({"status": "paid"})
        return {"status": "paid", "log": log}
    return {**state, "log": log}


@app.program
def warehouse(state: Any, event: Event, context: TurnContext) -> Any:
    """Counts what it is told to ship."""
    return {"shipped": [*(state or {"shipped": []})["shipped"], event.json()["ship"]]}


@app.adapter("charge_card")
async def charge_card(call: EffectCall) -> Any:
    return call.json()["order"] * 100


def look_up(item: str) -> str:
    return item.upper()


async def wait_long(seconds: float) -> float:
    await asyncio.sleep(seconds)
    return seconds


@app.workflow
async def shipping(run: WorkflowRun, item: str) -> str:
    await run.sleep(timedelta(days=1))
    return f"shipped {item}"


@app.workflow
async def buy(run: WorkflowRun, item: str) -> list[Any]:
    found, waited = await run.gather(run.step(look_up, item), run.step(wait_long, 86_400.0))
    run.state({"found": found})
    await run.put("emails", {"bought": found})
    await run.send("warehouse", {"ship": found})
    await run.mail("ada@main", {"bought": found})
    if not await run.wait_for("approval", timeout=timedelta(days=30)):
        return [found, waited, None]
    return [found, waited, await run.child(shipping, found)]


def place_order(test: HostTest) -> Any:
    """The scenario of the program."""
    for name, program in (("order-1", order), ("warehouse", warehouse)):
        test.plane.world(name).create(program=program)
    test.plane.agents.register("shop")
    test.plane.agents.register("ada")
    test.plane.world("order-1").send("order", {"id": 17})
    test.run_until_idle()
    test.advance(hours=2)
    return test.state("order-1")["status"]


def start_to_buy(test: HostTest) -> Run:
    """A run of the workflow that waits for an approval."""
    test.plane.world("warehouse").create(program=warehouse)
    run = test.plane.workflows.start(buy, "book", id="b-1")
    test.run_until_idle()
    return run


def buy_book(test: HostTest) -> Any:
    """The scenario of the workflow."""
    run = start_to_buy(test)
    run.signal("approval", True)
    return test.run_to_end(run)


# Two versions of a workflow: the first host has the first one, and every later host the second one.

rolled_out = HostApp()
charged_by: set[str] = set()  # The names of the steps that were run.
_first, _second = HostApp(), HostApp()


async def _charge(order: int) -> None:
    step = current_step()
    charged_by.add(step.name)
    await step.async_plane.queue("charges").put({"order": order}, idempotency_key=step.id)


@_first.workflow(name="pay")
async def _pay_by_card(run: WorkflowRun, order: int) -> str:
    await run.step(_charge, order, name="charge_by_card")
    return "paid"


@_second.workflow(name="pay")
async def _pay_by_bank(run: WorkflowRun, order: int) -> str:
    if run.patched("by bank"):
        await run.step(_charge, order, name="charge_by_bank")
    else:
        await run.step(_charge, order, name="charge_by_card")
    return "paid"


def _runner(world: HostedWorld) -> Runner:
    deployed = _first if world.owner == "host-1" else _second
    return deployed.runners[world.program](world)


rolled_out.add_runner("workflow:pay", _runner)


def pay(test: HostTest) -> Any:
    """The scenario of the workflow with two versions."""
    return test.run_to_end(test.plane.workflows.start("pay", 17, id="p-1"))
