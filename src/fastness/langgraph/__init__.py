"""A checkpointer and a store of LangGraph, on a plane.

    import fastness
    from fastness.langgraph import FastnessSaver, FastnessStore

    with fastness.open("dir:./data") as plane:
        graph = builder.compile(checkpointer=FastnessSaver(plane), store=FastnessStore(plane))
        graph.invoke({"messages": []}, {"configurable": {"thread_id": "7"}})

Both work on a `Plane` and on an `AsyncPlane`, in this process or in a server.
"""

from fastness.extras import how_to_install

try:
    import langgraph.checkpoint.base
    import langgraph.store.base  # noqa: F401
except ModuleNotFoundError as error:
    raise ImportError(f"LangGraph is not installed; {how_to_install('langgraph')}") from error

from fastness.langgraph.retention import Retention
from fastness.langgraph.saver import FastnessSaver
from fastness.langgraph.store import FastnessStore

__all__ = ["FastnessSaver", "FastnessStore", "Retention"]
