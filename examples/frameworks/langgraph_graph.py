"""A LangGraph graph that survives: it waits for an approval, and continues in another process where it was.

    python langgraph_graph.py                 in memory
    python langgraph_graph.py dir:./data      the first run drafts and waits, the second one approves and publishes

It needs no network: the model is one of langchain-core's fake chat models. With a real one, write
init_chat_model("openai:gpt-5").
"""

import sys
from typing import Any

from langchain_core.language_models import BaseChatModel, FakeListChatModel
from langchain_core.runnables import RunnableConfig
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.graph.state import CompiledStateGraph
from langgraph.store.base import BaseStore
from langgraph.types import Command, interrupt

import fastness
from fastness.langgraph import FastnessSaver, FastnessStore, Retention

model: BaseChatModel = FakeListChatModel(responses=["Tides follow the moon."])


def draft(state: MessagesState) -> dict[str, Any]:
    print("model: asked for a draft")
    return {"messages": [model.invoke(state["messages"])]}


def approve(state: MessagesState) -> Command[str]:
    """Ends this run until a person has answered; the answer is then what `interrupt` returns."""
    answer = interrupt({"text": state["messages"][-1].text, "question": "Publish it?"})
    return Command(goto="publish" if answer == "yes" else END)


def publish(state: MessagesState, *, store: BaseStore) -> dict[str, Any]:
    """Keeps the article beyond this thread."""
    text = state["messages"][-1].text
    store.put(("articles", "ada"), "tides", {"text": text, "words": len(text.split())})
    print(f"published: {text}")
    return {}


def make_graph(plane: fastness.Plane) -> "CompiledStateGraph[Any, Any, Any, Any]":
    builder = StateGraph(MessagesState)
    builder.add_node("draft", draft)
    builder.add_node("approve", approve, destinations=("publish", END))
    builder.add_node("publish", publish)
    builder.add_edge(START, "draft")
    builder.add_edge("draft", "approve")
    builder.add_edge("publish", END)
    saver = FastnessSaver(plane, keep=Retention(checkpoints=100, days=30))
    return builder.compile(checkpointer=saver, store=FastnessStore(plane))


def main(url: str) -> None:
    thread: RunnableConfig = {"configurable": {"thread_id": "article-7"}}
    with fastness.open(url) as plane:
        graph = make_graph(plane)
        state = graph.get_state(thread)
        if state.created_at is None:
            graph.invoke({"messages": [("user", "Write about tides.")]}, thread)
        elif state.interrupts:
            print(f"approving: {state.interrupts[0].value['text']}")
            graph.invoke(Command(resume="yes"), thread)
        else:
            graph.invoke(None, thread)  # The process was killed: continue after the last finished step.

        state = graph.get_state(thread)
        print(f"next: {', '.join(state.next) or 'nothing'}; {len(list(graph.get_state_history(thread)))} checkpoints")
        for item in FastnessStore(plane).search(("articles",), filter={"words": {"$gte": 3}}):
            print(f"stored: {item.key} of {item.namespace[-1]}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "memory:")
