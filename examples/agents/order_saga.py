"""An order saga: goods are reserved, a card is charged, a parcel is handed over. If a step fails for good, the steps
that were done are undone in reverse order.

A crash at any place changes nothing: the run continues after the last recorded step, also in the middle of undoing.

    python order_saga.py                  # in a temporary folder
    python order_saga.py dir:./data       # kill it while it runs, and start it again
"""

import sys
import tempfile
from collections.abc import Callable
from typing import Any

import fastness
from fastness.errors import RunCancelled, StepFailed

app = fastness.HostApp()


def reserve(order: str, item: str) -> str:
    print(f"{order}: reserve a {item}")
    return f"reservation of {order}"


def release(order: str, reservation: str) -> None:
    print(f"{order}: release the {reservation}")


def charge(order: str, cents: int) -> str:
    """The order's id is the idempotency key: a payment service that gets it twice charges once."""
    print(f"{order}: charge {cents} cents")
    return f"payment of {order}"


def refund(order: str, payment: str) -> None:
    print(f"{order}: refund the {payment}")


def ship(order: str, item: str) -> None:
    print(f"{order}: ship the {item}")
    if item == "piano":
        raise ConnectionError("the carrier takes no pianos")


@app.workflow
async def place_order(run: fastness.WorkflowRun, item: str, cents: int) -> str:
    undo: list[tuple[Callable[[str, Any], None], Any]] = []
    try:
        reservation = await run.step(reserve, run.id, item)
        undo.append((release, reservation))
        payment = await run.step(charge, run.id, cents, retry=fastness.Retry(5))
        undo.append((refund, payment))
        await run.step(ship, run.id, item, retry=fastness.Retry(2, delay_seconds=0.1))
    except (StepFailed, RunCancelled) as error:
        for function, argument in reversed(undo):
            await run.step(function, run.id, argument, retry=fastness.Retry(20))
        return f"undone, {type(error).__name__}"
    return "shipped"


def main(url: str) -> None:
    with fastness.open(url) as plane, fastness.Host(plane, app):
        for order, item, cents in (("order-1", "kettle", 2_900), ("order-2", "piano", 690_000)):
            run = plane.workflows.start(place_order, item, cents, id=order)
            print(f"{order}: {run.result(wait_seconds=60)}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(sys.argv[1] if len(sys.argv) > 1 else f"dir:{folder}")
