"""A subscription: a charge every thirty days, a reminder three days before, until the customer cancels.

A run that waits needs no process. Here time is moved, so that three months take a second; without the clock, the same
code takes three months. Each month starts with an empty history (`continue_as_new`), so it can go on for years.

    python subscription.py                  # in a temporary folder
    python subscription.py dir:./data       # kill it while it runs, and start it again
"""

import sys
import tempfile
import time
from datetime import timedelta

import fastness
from fastness.testing.clock import ManualClock

app = fastness.HostApp()


def charge(customer: str, month: int) -> None:
    """The customer and the month are the idempotency key: a payment service that gets them twice charges once."""
    print(f"{customer}: charge month {month}")


def remind(customer: str, month: int) -> None:
    print(f"{customer}: remind of month {month}")


def say_goodbye(customer: str) -> None:
    print(f"{customer}: goodbye")


@app.workflow
async def subscription(run: fastness.WorkflowRun, customer: str, month: int = 1) -> int:
    """Returns how many months were paid."""
    await run.step(charge, customer, month, retry=fastness.Retry(10, delay_seconds=3_600))
    run.state({"paid_months": month})
    if await run.wait_for("cancel", timeout=timedelta(days=27)) is None:
        await run.step(remind, customer, month + 1)
        if await run.wait_for("cancel", timeout=timedelta(days=3)) is None:
            run.continue_as_new(customer, month + 1)
    await run.step(say_goodbye, customer)
    return month


def main(url: str) -> None:
    clock = ManualClock(int(time.time() * 1_000))
    with fastness.open(url, clock=clock) as plane:
        moved = plane.state("clock").get()
        clock.jump_to_ms(max(clock.now_ms(), 0 if moved is None else moved.value))  # Time goes on after a restart.
        with fastness.Host(plane, app):
            run = plane.workflows.start(subscription, "ada", id="subscription-ada")
            while run.describe().state == "running" and run.query() != {"paid_months": 3}:
                for timer in plane.workflows.timers(run.id):
                    clock.jump_to_ms(max(clock.now_ms(), timer.deliver_at_ms))
                    plane.state("clock").update(clock.now_ms())
                time.sleep(0.01)
                clock.advance_ms(10)
            if run.describe().state == "running":
                run.signal("cancel", True)
            print(f"ada: paid {run.result(wait_seconds=60)} months")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(sys.argv[1] if len(sys.argv) > 1 else f"dir:{folder}")
