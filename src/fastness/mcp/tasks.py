"""For the workers of tools: report progress, and ask the person behind the client.

A tool that is a queue (`fastness mcp expose`) is served by any consumer of the queue. In a loop or the handler of a
worker:

    for message in plane.queue("resize").subscribe(wait_seconds=20):
        with task_of(message) as task:
            task.progress(1, 3, "reading the image")
            answer = task.ask("size", "How wide should it be?", {"type": "object", "properties": {...}})
            message.ack(result={"width": answer.content["width"]})

In the function of a task (`fastness.task`), without a block, because what it returns is the result:

    task = task_of()

In a workflow, with `await`:

    task = task_of(run)

A question returns the job to its queue. When the answer is there, the job is delivered again and its function starts
from the beginning: `ask` then returns the answer. So what comes before a question is done again.
"""

from typing import Any, overload

import msgspec

from fastness import AsyncMessage, Message, WorkflowRun, current_job
from fastness.errors import InvalidArgument
from fastness.mcp.message_tasks import AsyncTask
from fastness.mcp.questions import InputNeeded
from fastness.mcp.sync.message_tasks import Task
from fastness.mcp.task_rows import SIGNAL, Answer, checked_question

__all__ = ["Answer", "AsyncTask", "InputNeeded", "RunTask", "Task", "task_of"]


class RunTask:
    """The task of a workflow's run; see `task_of`.

    It uses what the run publishes (`run.state`): do not publish anything else in the same workflow.
    """

    def __init__(self, run: WorkflowRun) -> None:
        self.id = f"run:{run.id}"
        self._run = run
        self._progress: dict[str, Any] = {}
        self._questions: dict[str, Any] = {}

    async def progress(self, progress: float, total: float | None = None, message: str | None = None) -> None:
        """Report how far the run is."""
        self._progress = {"progress": float(progress), "total": total, "message": message}
        await self._publish()

    async def ask(self, key: str, message: str, schema: dict[str, Any] | None = None) -> Answer:
        """The answer to a question. The run needs no memory and no host while it waits.

        Raises:
            InvalidArgument: the question cannot be shown.
        """
        question = checked_question(key, message, schema)
        self._questions[key] = {"message": question.message, "schema": question.schema}
        await self._publish()
        value = await self._run.wait_for(SIGNAL + key)
        del self._questions[key]
        await self._publish()
        return msgspec.convert(value, Answer)

    async def _publish(self) -> None:
        questions = {"input_required": self._questions} if self._questions else {}
        await self._run.state({**self._progress, **questions})


@overload
def task_of(job: Message) -> Task: ...


@overload
def task_of(job: AsyncMessage) -> AsyncTask: ...


@overload
def task_of(job: WorkflowRun) -> RunTask: ...


@overload
def task_of(job: None = None) -> Any: ...


def task_of(job: Message | AsyncMessage | WorkflowRun | None = None) -> Any:
    """The task that a message or a run belongs to.

    Args:
        job: a received message, or the `run` of a workflow. Without it, the message of the task function that calls.

    Returns:
        A Task for a Message, an AsyncTask for an AsyncMessage, a RunTask for a run.

    Raises:
        InvalidArgument: it is none of these, or no task function is running.
    """
    found = current_job().message if job is None else job
    if isinstance(found, AsyncMessage):
        return AsyncTask(found)
    if isinstance(found, Message):
        return Task(found)
    if isinstance(found, WorkflowRun):
        return RunTask(found)
    if job is None:
        raise InvalidArgument("No task function is running; pass the message or the run: task_of(message)")
    raise InvalidArgument(f"{type(job).__name__} is neither a received message nor the run of a workflow")
