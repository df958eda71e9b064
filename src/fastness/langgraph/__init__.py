"""A checkpointer and a store of LangGraph, on a plane.

    import holdfast
    from holdfast.langgraph import HoldfastSaver, HoldfastStore

    with holdfast.open("dir:./data") as plane:
        graph = builder.compile(checkpointer=HoldfastSaver(plane), store=HoldfastStore(plane))
        graph.invoke({"messages": []}, {"configurable": {"thread_id": "7"}})

Both work on a `Plane` and on an `AsyncPlane`, in this process or in a server.
"""

try:
    import langgraph.checkpoint.base
    import langgraph.store.base  # noqa: F401
except ModuleNotFoundError as error:
    raise ImportError("LangGraph is not installed; run: pip install 'holdfast[langgraph]'") from error

from holdfast.langgraph.retention import Retention
from holdfast.langgraph.saver import HoldfastSaver
from holdfast.langgraph.store import HoldfastStore

__all__ = ["HoldfastSaver", "HoldfastStore", "Retention"]
