"""What a user holds. Every handle is written once, here, for asyncio; `sync/` is generated from it.

Those for threads and those for event loops are loaded when the first of them is asked for.
"""

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from holdfast.handles.opening import Opening
    from holdfast.handles.plane import AsyncPlane
    from holdfast.handles.sync.plane import Plane
    from holdfast.handles.workers import AsyncWorker, RestartPolicy, Worker

__all__ = ["AsyncPlane", "AsyncWorker", "Opening", "Plane", "RestartPolicy", "Worker"]

_HOMES: Final = {
    "AsyncPlane": "holdfast.handles.plane",
    "AsyncWorker": "holdfast.handles.workers",
    "Opening": "holdfast.handles.opening",
    "Plane": "holdfast.handles.sync.plane",
    "RestartPolicy": "holdfast.handles.workers",
    "Worker": "holdfast.handles.workers",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    found = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
