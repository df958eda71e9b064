"""Tools over tasks, for clients that do not have tasks themselves."""

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from fastness.errors import InvalidArgument
from fastness.limits import MCP_TASK_ID_CHARACTERS_MAX, MCP_WAIT_SECONDS_MAX
from fastness.mcp import durable_tasks
from fastness.mcp.caller import Caller
from fastness.mcp.durable_tasks import TaskView, questions_form
from fastness.mcp.task_results import wire_form
from fastness.mcp.task_rows import Answer
from fastness.mcp.tool import Tool, ToolInput, ToolOutput

TaskId = Annotated[
    str,
    Meta(description="The id of a task that you have started.", min_length=1, max_length=MCP_TASK_ID_CHARACTERS_MAX),
]
WaitSeconds = Annotated[
    float, Meta(description="How long to wait for the end of the task.", ge=0, le=MCP_WAIT_SECONDS_MAX)
]


class TaskStatusInput(ToolInput, frozen=True):
    task_id: TaskId
    wait_seconds: WaitSeconds = 0.0


class TaskInput(ToolInput, frozen=True):
    task_id: TaskId


class TaskAnswerInput(ToolInput, frozen=True):
    task_id: TaskId
    key: Annotated[str, Meta(description="Which question, from task_status.", min_length=1, max_length=64)]
    action: Annotated[
        Literal["accept", "decline", "cancel"],
        Meta(description="accept: content has the answer. decline: the person refuses. cancel: no decision."),
    ] = "accept"
    content: Annotated[dict[str, Any], Meta(description="The answer, as the schema of the question says.")] = (
        msgspec.field(default_factory=dict)
    )


class TaskOutput(ToolOutput, frozen=True):
    task_id: Annotated[str, Meta(description="The id of the task.")]
    status: Annotated[
        Literal["working", "input_required", "completed", "failed", "cancelled"],
        Meta(description="input_required: call task_answer. The last three are final."),
    ]
    message: Annotated[str | None, Meta(description="How far it is, what it asks, or why it failed.")] = None
    progress: Annotated[float | None, Meta(description="How far it is; compare it with total.")] = None
    total: Annotated[float | None, Meta(description="The progress at its end, if that is known.")] = None
    questions: Annotated[
        dict[str, Any], Meta(description="Open questions by their keys, each with its message and JSON Schema.")
    ] = msgspec.field(default_factory=dict)
    result: Annotated[
        dict[str, Any] | None,
        Meta(description="Of a completed task: the result of the tool, with content, structuredContent and isError."),
    ] = None


def _output(view: TaskView) -> TaskOutput:
    progress = view.progress
    return TaskOutput(
        task_id=view.id,
        status=view.status,
        message=view.text,
        progress=None if progress is None else progress.progress,
        total=None if progress is None else progress.total,
        questions=questions_form(view.questions),
        result=None if view.result is None else wire_form(view.result),
    )


async def _status(caller: Caller, asked: TaskStatusInput) -> TaskOutput:
    return _output(await durable_tasks.wait(caller, asked.task_id, asked.wait_seconds))


async def _cancel(caller: Caller, asked: TaskInput) -> TaskOutput:
    return _output(await durable_tasks.cancel(caller, asked.task_id))


async def _answer(caller: Caller, asked: TaskAnswerInput) -> TaskOutput:
    view = await durable_tasks.read(caller, asked.task_id, with_result=False)
    if asked.key not in view.questions:
        keys = ", ".join(view.questions) or "none"
        raise InvalidArgument(f"Task {view.id} has no open question {asked.key!r}; open questions: {keys}")
    await durable_tasks.answer(caller, asked.task_id, {asked.key: Answer(asked.action, asked.content)})
    return _output(await durable_tasks.read(caller, asked.task_id))


TASK_STATUS: Final = Tool(
    name="task_status",
    title="Status of a task",
    description=(
        "The status of a task that one of your tool calls has started: how far it is, what it asks, and its result. "
        "Works after a restart too. Give wait_seconds instead of calling it again and again."
    ),
    input=TaskStatusInput,
    output=TaskOutput,
    call=_status,
    verbs=(),  # The owner of a task may do this.
    read_only=True,
)
TASK_CANCEL: Final = Tool(
    name="task_cancel",
    title="Cancel a task",
    description=(
        "Cancel a task that one of your tool calls has started. Its job is not run any more, and its worker is told "
        "to stop. A task that has ended stays as it is."
    ),
    input=TaskInput,
    output=TaskOutput,
    call=_cancel,
    verbs=(),  # The owner of a task may do this.
    destructive=True,
    idempotent=True,
)
TASK_ANSWER: Final = Tool(
    name="task_answer",
    title="Answer a task",
    description=(
        "Answer a question of a task with status input_required. Ask the person you work for: do not invent an answer. "
        "The first answer to a question counts."
    ),
    input=TaskAnswerInput,
    output=TaskOutput,
    call=_answer,
    verbs=(),  # The owner of a task may do this.
)

TOOLS: Final[tuple[Tool[Any, Any], ...]] = (TASK_STATUS, TASK_CANCEL, TASK_ANSWER)
