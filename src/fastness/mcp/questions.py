"""Questions of tasks, in the worker that asks them."""

from collections.abc import Sequence

from fastness import AsyncMessage, Message, Row, TaskDeferred
from fastness.errors import InvalidArgument
from fastness.limits import MCP_QUESTIONS_MAX
from fastness.mcp.task_marks import mark_of_job
from fastness.mcp.task_rows import Answer, read_rows


class InputNeeded(TaskDeferred):
    """A task has asked, and its job is back in the queue until there is an answer. Let it end the function."""

    def __init__(self, key: str) -> None:
        super().__init__(f"the task waits for the answer to {key!r}")
        self.key = key


def was_put_by_a_tool(message: Message | AsyncMessage) -> bool:
    """Whether a tool has put the message, so that a client can be asked."""
    return mark_of_job(message.correlation_id) is not None


def checked_answer(message: Message | AsyncMessage, key: str, rows: Sequence[Row]) -> Answer | None:
    """The answer to a question; None if the task may ask it."""
    if not was_put_by_a_tool(message):
        raise InvalidArgument(
            f"Message {message.id} of {message.queue} was not put by a tool, so there is no client to ask; "
            "leave the question out for such messages (is_watched)"
        )
    found = read_rows(rows)
    if key not in found.questions and len(found.questions) >= MCP_QUESTIONS_MAX:
        raise InvalidArgument(f"A task asks at most {MCP_QUESTIONS_MAX} questions; {key!r} is one more")
    return found.answers.get(key)
