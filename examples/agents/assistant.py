"""An assistant with tools that asks before it spends money: a workflow. Its model is a script, so it needs no network.

Each call of the model and of a tool is a step: its result is recorded, and it does not run again. While it waits for
the approval, for up to a week, it needs no process.

    python assistant.py                  # in a temporary folder
    python assistant.py dir:./data       # kill it while it runs, and start it again
"""

import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import fastness

app = fastness.HostApp()
CALLS_MAX = 20  # Bounds what a confused model can do.

SCRIPT: list[dict[str, Any]] = [
    {"tool": "search_flights", "arguments": {"to": "Lisbon"}},
    {"tool": "book_flight", "arguments": {"flight": "TP 571", "cents": 18_900}},
    {"answer": "You fly to Lisbon with TP 571."},
]


def ask_model(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """What to do next: call a tool, or answer. Here a real assistant calls its model."""
    answered = sum(1 for message in messages if message["role"] == "assistant")
    print(f"model: call {answered + 1}")
    return SCRIPT[answered]


def search_flights(to: str) -> list[dict[str, Any]]:
    print(f"tool: search for flights to {to}")
    return [{"flight": "TP 571", "cents": 18_900}, {"flight": "LH 1166", "cents": 24_500}]


def book_flight(flight: str, cents: int) -> str:
    print(f"tool: book {flight} for {cents / 100:.2f} euros")
    return "booked"


TOOLS: dict[str, Callable[..., Any]] = {"search_flights": search_flights, "book_flight": book_flight}
NEEDS_APPROVAL = {"book_flight"}


@app.workflow
async def assistant(run: fastness.WorkflowRun, question: str, user: str) -> str:
    messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
    for _ in range(CALLS_MAX):
        reply = await run.step(ask_model, messages, retry=fastness.Retry(5))
        messages.append({"role": "assistant", **reply})
        if "answer" in reply:
            return str(reply["answer"])
        if reply["tool"] in NEEDS_APPROVAL:
            await run.mail(user, {"run": run.id, "wants": reply})
            if not await run.wait_for("approval", timeout=timedelta(days=7)):
                messages.append({"role": "tool", "content": "The user does not allow it."})
                continue
        result = await run.step(TOOLS[reply["tool"]], **reply["arguments"])
        messages.append({"role": "tool", "content": result})
    return "I have found no answer."


def main(url: str) -> None:
    with fastness.open(url) as plane, fastness.Host(plane, app):
        run = plane.workflows.start(assistant, "Book me the cheapest flight to Lisbon.", "ada", id="lisbon")
        while run.describe().state == "running":
            for mail in plane.mailbox("ada").subscribe(wait_seconds=0.2):
                wants = mail.json()["wants"]
                print(f"ada: approves {wants['tool']} {wants['arguments']['flight']}")
                plane.workflows.signal(mail.json()["run"], "approval", True)
        print(f"answer: {run.result()}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(sys.argv[1] if len(sys.argv) > 1 else f"dir:{folder}")
