"""What a user holds. Every handle is written once, here, for asyncio; `sync/` is generated from it."""

from holdfast.handles.opening import Opening
from holdfast.handles.plane import AsyncPlane
from holdfast.handles.sync.plane import Plane
from holdfast.handles.workers import AsyncWorker, RestartPolicy, Worker

__all__ = ["AsyncPlane", "AsyncWorker", "Opening", "Plane", "RestartPolicy", "Worker"]
