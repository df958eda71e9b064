"""The checkpointer of LangGraph over a plane."""

import random
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from typing import Any

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import (
    BaseCheckpointSaver,
    ChannelVersions,
    Checkpoint,
    CheckpointMetadata,
    CheckpointTuple,
)
from langgraph.checkpoint.serde.base import SerializerProtocol

from fastness import AsyncPlane, Plane
from fastness.errors import InvalidArgument
from fastness.langgraph.checkpoints import Checkpoints
from fastness.langgraph.retention import Retention
from fastness.langgraph.serializer import AllowedType, strict
from fastness.plane_access import access_to


class FastnessSaver(BaseCheckpointSaver[int]):
    """Checkpoints of graphs, stored in a plane.

    With a `Plane` the asynchronous methods run in threads. With an `AsyncPlane` the synchronous methods work in other
    threads than that of its event loop. A plane for `graph.ainvoke` is best an `AsyncPlane`.

    Args:
        plane: where checkpoints are stored; it stays open.
        collection: the collection of the plane that has them.
        keep: what is deleted by itself; by default nothing is.
        serde: serializes values, such as an `EncryptedSerializer`. LangGraph's own serializer is always a strict one.
        allowed_types: types of your own that checkpoints may have: classes, or pairs of the names of a module and a
            class. What a checkpoint names besides them and LangGraph's safe types is refused, and never run.
    """

    def __init__(
        self,
        plane: Plane | AsyncPlane,
        *,
        collection: str = "langgraph",
        keep: Retention | None = None,
        serde: SerializerProtocol | None = None,
        allowed_types: Iterable[AllowedType] = (),
    ) -> None:
        super().__init__(serde=strict(serde, allowed_types))
        self._access = access_to(plane, collection)
        self._checkpoints = Checkpoints(self._access, keep or Retention())

    # Reading.

    def get_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """The checkpoint of `config`, or the newest one of its thread and namespace."""
        return self._access.run(self._checkpoints.get(self.serde, config))

    async def aget_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """As `get_tuple`."""
        return await self._access.run_async(self._checkpoints.get(self.serde, config))

    def list(
        self,
        config: RunnableConfig | None,
        *,
        filter: dict[str, Any] | None = None,
        before: RunnableConfig | None = None,
        limit: int | None = None,
    ) -> Iterator[CheckpointTuple]:
        """The checkpoints of a thread, of one namespace or of all, newest first.

        Without a thread those of all threads, one after the other.
        """
        return self._access.iterate(self._checkpoints.pages(self.serde, config, filter, before, limit))

    def alist(
        self,
        config: RunnableConfig | None,
        *,
        filter: dict[str, Any] | None = None,
        before: RunnableConfig | None = None,
        limit: int | None = None,
    ) -> AsyncIterator[CheckpointTuple]:
        """As `list`."""
        return self._access.iterate_async(self._checkpoints.pages(self.serde, config, filter, before, limit))

    # Writing.

    def put(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        """Store a checkpoint, durably; its configuration."""
        return self._access.run(self._checkpoints.put(self.serde, config, checkpoint, metadata, new_versions))

    async def aput(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        """As `put`."""
        return await self._access.run_async(
            self._checkpoints.put(self.serde, config, checkpoint, metadata, new_versions)
        )

    def put_writes(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = ""
    ) -> None:
        """Store what a task has written after a checkpoint, in one commit."""
        self._access.run(self._checkpoints.put_writes(self.serde, config, writes, task_id, task_path))

    async def aput_writes(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = ""
    ) -> None:
        """As `put_writes`."""
        await self._access.run_async(self._checkpoints.put_writes(self.serde, config, writes, task_id, task_path))

    # Deleting and copying.

    def delete_thread(self, thread_id: str) -> None:
        """Delete all checkpoints and writes of a thread."""
        self._access.run(self._checkpoints.delete_thread(str(thread_id)))

    async def adelete_thread(self, thread_id: str) -> None:
        """As `delete_thread`."""
        await self._access.run_async(self._checkpoints.delete_thread(str(thread_id)))

    def delete_for_runs(self, run_ids: Sequence[str]) -> None:
        """Delete the checkpoints that have one of these run ids in their metadata, with their writes."""
        self._access.run(self._checkpoints.delete_for_runs(_checked_ids("run_ids", run_ids)))

    async def adelete_for_runs(self, run_ids: Sequence[str]) -> None:
        """As `delete_for_runs`."""
        await self._access.run_async(self._checkpoints.delete_for_runs(_checked_ids("run_ids", run_ids)))

    def copy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        """Copy all checkpoints and writes of a thread to another thread.

        Long threads take several commits, oldest checkpoints first. What is there after a crash is complete up to its
        newest checkpoint, and copying again finishes it.
        """
        self._access.run(self._checkpoints.copy_thread(str(source_thread_id), str(target_thread_id)))

    async def acopy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        """As `copy_thread`."""
        await self._access.run_async(self._checkpoints.copy_thread(str(source_thread_id), str(target_thread_id)))

    def prune(self, thread_ids: Sequence[str], *, strategy: str = "keep_latest") -> None:
        """Delete all but the newest checkpoint of each namespace, or with the strategy "delete" all checkpoints.

        Older checkpoints from which the newest one's delta channels are rebuilt stay too.
        """
        self._access.run(self._checkpoints.prune(_checked_ids("thread_ids", thread_ids), strategy))

    async def aprune(self, thread_ids: Sequence[str], *, strategy: str = "keep_latest") -> None:
        """As `prune`."""
        await self._access.run_async(self._checkpoints.prune(_checked_ids("thread_ids", thread_ids), strategy))

    # Other.

    def get_next_version(self, current: int | None, channel: None) -> int:  # noqa: ARG002
        """The version after `current`. Threads of other savers may have texts as versions, and keep that."""
        if isinstance(current, str):
            number = int(current.partition(".")[0]) + 1
            return f"{number:032}.{random.random():016}"
        return 1 if current is None else current + 1


def _checked_ids(name: str, ids: Sequence[str]) -> list[str]:
    if isinstance(ids, str):
        raise InvalidArgument(f"{name} is one text; give a list of ids: [{ids!r}]")
    return [str(found) for found in ids]
