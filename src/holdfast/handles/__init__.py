"""What a user holds. Every handle is written once, here, for asyncio; `sync/` is generated from it.

Those for threads and those for event loops are loaded when the first of them is asked for.
"""

from typing import TYPE_CHECKING, Final

from holdfast._lazy_imports import lazily

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

__getattr__, __dir__ = lazily(globals(), _HOMES)
