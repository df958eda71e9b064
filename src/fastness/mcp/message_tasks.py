"""The task of a message, for event loops; `fastness.mcp.sync` has the same for threads."""

from types import TracebackType
from typing import Any, Self

from fastness import AsyncMessage
from fastness.limits import MCP_ANSWER_DELAY_SECONDS
from fastness.mcp.questions import InputNeeded, checked_answer, was_put_by_a_tool
from fastness.mcp.task_rows import COLLECTION, ROWS_MAX, Answer, checked_question, progress_row, question_row


class AsyncTask:
    """The task of a message; see `fastness.mcp.tasks.task_of`."""

    def __init__(self, message: AsyncMessage) -> None:
        self.message = message
        self.id = f"{message.queue}.{message.id}"
        self._rows = message.collection(COLLECTION)

    @property
    def is_watched(self) -> bool:
        """Whether a tool has put the message. Of other messages, progress is not stored."""
        return was_put_by_a_tool(self.message)

    async def progress(self, progress: float, total: float | None = None, message: str | None = None) -> None:
        """Report how far the task is. The client gets it when it asks for the status.

        Each report is a commit. A report of less than before is stored, but clients that wait do not see it.

        Raises:
            MessageCancelled: the task was cancelled; stop.
        """
        self.message.raise_if_cancelled()
        if self.is_watched:
            await self._rows.commit([progress_row(self.id, progress, total, message)])

    async def ask(self, key: str, message: str, schema: dict[str, Any] | None = None) -> Answer:
        """The answer to a question, if there is one; otherwise the job goes back to its queue until there is one.

        Args:
            key: names the question within the task. The same key is the same question.
            message: what the person reads.
            schema: JSON Schema of an object whose properties are text, numbers, booleans or choices; without it, the
                question can only be accepted or declined.

        Raises:
            InputNeeded: there is no answer yet. Do not catch it.
            InvalidArgument: the question cannot be shown, or no tool has put the message, so it has no owner to ask.
        """
        question = checked_question(key, message, schema)
        answer = checked_answer(self.message, key, (await self._rows.scan(self.id, limit=ROWS_MAX)).rows)
        if answer is not None:
            return answer
        # The question comes last: an answer then finds the job in the queue, and has it delivered at once.
        await self.message.nack(intent="defer", delay_seconds=MCP_ANSWER_DELAY_SECONDS)
        await self._rows.commit([question_row(self.id, key, question)])
        raise InputNeeded(key)

    async def __aenter__(self) -> Self:
        await self.message.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if isinstance(error, InputNeeded):
            return True
        await self.message.__aexit__(kind, error, trace)
        return False
