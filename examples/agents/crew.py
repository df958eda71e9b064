"""A crew of agents that talk by mail: an editor orders an article, a writer writes it, a critic reviews it.

Each agent is a world with a program, a pure function from a state and an event to the next state. What it asks for
(mail, calls of the model, documents) commits together with its state. Only the adapter calls the model.

    python crew.py                  # in a temporary folder
    python crew.py dir:./data       # kill it while it runs, and start it again
"""

import sys
import tempfile
import time
from contextlib import suppress
from typing import Any

import fastness
from fastness.errors import WorldExists

app = fastness.HostApp()
WORDS_MAX = 6
State = dict[str, Any] | None


@app.program
def editor(state: State, event: fastness.Event, context: fastness.TurnContext) -> State:
    """Orders each article once, and publishes it when the critic has accepted it."""
    articles = state or {}
    if event.name == "order" and (topic := event.json()["topic"]) not in articles:
        context.mail("writer", {"topic": topic, "remark": None})
        return {**articles, topic: None}
    if event.name == "mail":
        article = event.json()
        articles = {**articles, article["topic"]: article["text"]}
        context.publish(articles)  # A document that others can read: worlds/editor.
    return articles


@app.program
def writer(state: State, event: fastness.Event, context: fastness.TurnContext) -> State:
    """Has the model write and rewrite, and sends each draft to the critic."""
    if event.name == "mail":
        context.call("model", event.json())
    if event.is_receipt("model"):
        if event.error is None:
            context.mail("critic", event.json())
        else:
            context.put("failures", {"error": event.error})
    return state


@app.program
def critic(state: State, event: fastness.Event, context: fastness.TurnContext) -> State:
    """Sends a draft that is too long back to the writer, and a good one to the editor."""
    if event.name == "mail":
        draft = event.json()
        if len(draft["text"].split()) > WORDS_MAX:
            context.mail("writer", {"topic": draft["topic"], "remark": f"at most {WORDS_MAX} words"})
        else:
            context.mail("editor", draft)
    return {"reviews": (state or {}).get("reviews", 0) + (event.name == "mail")}


@app.adapter("model")
def model(call: fastness.EffectCall) -> dict[str, Any]:
    """Write about a topic. Here a real agent calls its model, and passes `call.idempotency_key` if it takes one."""
    order = call.json()
    print(f"model: writes about {order['topic']}, remark: {order['remark']}")
    if order["remark"]:
        return {"topic": order["topic"], "text": "The moon pulls the sea."}
    return {"topic": order["topic"], "text": "Tides are the rise and fall of the sea, which the moon causes."}


def main(url: str) -> None:
    with fastness.open(url) as plane:
        for agent in (editor, writer, critic):
            with suppress(WorldExists):
                plane.world(agent.name).create(program=agent)
            plane.agents.register(agent.name, world=agent.name)
        plane.world("editor").send("order", {"topic": "tides"})
        with fastness.Host(plane, app):
            while (articles := plane.state("worlds/editor").get()) is None:
                time.sleep(0.05)
        print(f"article: {articles.value['tides']}")
        print(f"reviews: {plane.world('critic').restore(critic).state['reviews']}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(sys.argv[1] if len(sys.argv) > 1 else f"dir:{folder}")
