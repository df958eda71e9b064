"""Tasks: jobs of queues and runs of workflows that tools have started, as their owners see them.

    job:  ready, delayed, blocked, leased ──► working, or input_required while a question is open
          done ──► completed      dead letter ──► failed      cancelled ──► cancelled
    run:  running, completed, failed, cancelled, in the same way

Nothing about a task is in the memory of a server, so any server of the plane answers for it, also after a crash.

The owner is the agent that started it: a hash of its name is part of the job's correlation id, or of the run's id,
because those are kept with the outcome. For anybody else a task does not exist, in any state. Starting a task needs a
verb of the caller's token; what it has started the caller may follow and cancel, so such tokens need no verb that reads
the messages of others.
"""

import uuid
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Final, Literal

import mcp_types
import msgspec

from fastness import AsyncPlane, MessageInfo, RunInfo
from fastness.errors import (
    FastnessError,
    InvalidArgument,
    MessageCancelled,
    MessageFailed,
    MessageFinished,
    MessageLeased,
    MessageNotFound,
    NotAllowed,
    NotFound,
    ResultNotKept,
    ResultNotReady,
    RunEnded,
    RunNotFound,
    Validation,
)
from fastness.limits import (
    MCP_STATUS_CHARACTERS_MAX,
    MCP_TASK_ID_CHARACTERS_MAX,
    MCP_TASK_POLL_SECONDS,
)
from fastness.mcp.caller import Caller
from fastness.mcp.exposed_tools import ExposedTool, check_arguments, check_value, find_tool
from fastness.mcp.task_marks import job_mark, mark_of_job, mark_of_run, owner_of, run_mark
from fastness.mcp.task_results import result_of_value
from fastness.mcp.task_rows import (
    COLLECTION,
    ROWS_MAX,
    SIGNAL,
    Answer,
    Progress,
    Question,
    TaskRows,
    answer_row,
    cancelled_row,
    now_ms,
    read_rows,
)
from fastness.threads import run_in_thread

Status = Literal["working", "input_required", "completed", "failed", "cancelled"]
OnChange = Callable[["TaskView"], Awaitable[None]]

_RUN: Final = "run:"
_SKEW_MS: Final = 1_000  # By which the clocks of the plane and of this process may differ.
_FINISHED: Final = ("completed", "failed", "cancelled")
_JOB_STATUS: Final[dict[str, Status]] = {"done": "completed", "dead": "failed", "cancelled": "cancelled"}
_RUN_STATUS: Final[dict[str, Status]] = {"completed": "completed", "failed": "failed", "cancelled": "cancelled"}


@dataclass(frozen=True, kw_only=True)
class TaskView:
    """A task at one moment."""

    id: str
    status: Status
    created_ms: int
    updated_ms: int
    progress: Progress | None = None
    questions: dict[str, Question] = field(default_factory=dict)  # Those that wait for an answer.
    error: str | None = None  # Of a failed task.
    result: mcp_types.CallToolResult | None = None  # Of a completed one.
    ttl_ms: int | None = None  # From its creation; None: it is kept for as long as it has not ended.

    @property
    def has_ended(self) -> bool:
        """Whether its status is final."""
        return self.status in _FINISHED

    @property
    def text(self) -> str | None:
        """Its status in words, if there is more to say than the status."""
        if self.error is not None:
            return self.error
        if self.questions:
            return "; ".join(question.message for question in self.questions.values())[:MCP_STATUS_CHARACTERS_MAX]
        if self.progress is None or self.has_ended:
            return None
        if self.progress.message is not None and not self.progress.progress:
            return self.progress.message
        total = "" if self.progress.total is None else f" of {self.progress.total:g}"
        message = "" if self.progress.message is None else f": {self.progress.message}"
        return f"{self.progress.progress:g}{total}{message}"


async def create(caller: Caller, tool: ExposedTool, arguments: dict[str, Any]) -> str:
    """Start the job of a call; the id of its task. The job is durable when this returns.

    Raises:
        InvalidArgument: the arguments do not fit the tool's schema; nothing was started.
        FastnessError: the plane has refused the job.
    """
    await run_in_thread(check_arguments, tool, arguments)
    owner = owner_of(caller.universe, caller.agent, tool.target)
    number = uuid.uuid4().hex[:16]
    if tool.kind == "workflow":
        # A run that is started again under the same id by a repeated call of the client library is the same run.
        run = await caller.plane.workflows.start(tool.target, id=run_mark(owner, number, tool.name), **arguments)
        return _RUN + run.id
    body: Any = arguments if tool.task is None else {"task": tool.task, "kwargs": arguments}
    attributes = {"mcp-tool": tool.name} if tool.task is None else {"mcp-tool": tool.name, "fastness-task": tool.task}
    receipt = await caller.plane.queue(tool.target).put(
        body, keep_result=True, correlation_id=job_mark(owner, number, tool.name), attributes=attributes
    )
    return f"{tool.target}.{receipt.id}"


async def read(caller: Caller, task_id: str, *, with_result: bool = True) -> TaskView:
    """A task of the caller.

    Raises:
        NotFound: the caller has no such task; the same error for a task of another agent.
    """
    job = await _find(caller, task_id)
    return await job.view(with_result=with_result)


async def read_created(caller: Caller, task_id: str) -> TaskView:
    """A task that was created before; if it cannot be read now, that it exists."""
    try:
        return await read(caller, task_id, with_result=False)
    except FastnessError:
        return TaskView(id=task_id, status="working", created_ms=now_ms(), updated_ms=now_ms())


async def wait(
    caller: Caller,
    task_id: str,
    seconds: float,
    *,
    on_change: OnChange | None = None,
    stop_at_question: bool = True,
) -> TaskView:
    """A task of the caller, once it has ended, or has a question, or after `seconds`.

    Args:
        on_change: called with the task at first, and then about every second.
        stop_at_question: return when the task has an open question.

    Raises:
        NotFound: the caller has no such task.
    """
    deadline = monotonic() + seconds
    while True:
        job = await _find(caller, task_id)
        view = await job.view(with_result=True)
        if on_change is not None:
            await on_change(view)
        left = deadline - monotonic()
        if view.has_ended or left <= 0 or (stop_at_question and view.questions):
            return view
        await job.wait(min(left, MCP_TASK_POLL_SECONDS))


async def cancel(caller: Caller, task_id: str) -> TaskView:
    """Cancel a task of the caller: its job is not delivered any more, and its worker is told. What is known then.

    A task that has ended stays as it is.

    Raises:
        NotFound: the caller has no such task.
    """
    job = await _find(caller, task_id)
    await job.cancel()
    return await read(caller, task_id, with_result=False)


async def answer(caller: Caller, task_id: str, responses: Mapping[str, Any]) -> None:
    """Answer questions of a task of the caller. What answers no open question is ignored, whatever its form is.

    Raises:
        NotFound: the caller has no such task.
        InvalidArgument: an answer has no action, or does not fit the question's schema; nothing was answered.
    """
    job = await _find(caller, task_id)
    view = await job.view(with_result=False)
    taken = {key: _answer_of(each) for key, each in responses.items() if key in view.questions}
    for key, each in taken.items():
        if each.is_accepted:
            problems = await run_in_thread(check_value, view.questions[key].schema, each.content)
            if problems:
                raise InvalidArgument(f"The answer to {key!r} does not fit the question: {'; '.join(problems)}")
    if taken and not view.has_ended:
        await job.answer({key: msgspec.structs.replace(each, at_ms=now_ms()) for key, each in taken.items()})


def _answer_of(response: Any) -> Answer:
    if isinstance(response, Answer):
        return response
    if not isinstance(response, dict):
        raise InvalidArgument("An answer is an object with an action (accept, decline, cancel) and a content")
    fields = {"action": response.get("action"), "content": response.get("content") or {}}
    try:
        return msgspec.convert(fields, Answer)
    except msgspec.ValidationError as error:
        raise InvalidArgument(f"An answer has an action (accept, decline, cancel) and a content: {error}") from None


def questions_form(questions: Mapping[str, Question]) -> dict[str, Any]:
    """Questions as tools return them."""
    return {key: {"message": each.message, "schema": each.schema} for key, each in questions.items()}


class _Job:
    """A message that a tool has put."""

    def __init__(self, caller: Caller, task_id: str, info: MessageInfo, tool: str) -> None:
        self._caller = caller
        self._id = task_id
        self._info = info
        self._tool = tool
        self._name = task_id.rpartition(".")[0]

    async def view(self, *, with_result: bool) -> TaskView:
        info = self._info
        status: Status = _JOB_STATUS.get(info.state, "working")
        rows = await _rows(self._caller, self._id) if status == "working" else _NO_ROWS
        questions = rows.open_questions
        if status == "working" and rows.answers and not questions:
            await self._deliver_answered(rows)
        at = [info.created_ms, info.leased_ms, info.died_ms, info.finished_ms, *_times(rows)]
        result = None
        if status == "completed" and with_result:
            result = await self._result()
        return TaskView(
            id=self._id,
            status="input_required" if questions else status,
            created_ms=info.created_ms,
            updated_ms=max(at),
            progress=rows.progress,
            questions=questions,
            error=_failure_text(info.last_error) if status == "failed" else None,
            result=result,
            ttl_ms=await self._ttl_ms(status),
        )

    async def wait(self, seconds: float) -> None:
        with suppress(ResultNotReady, MessageFailed, MessageCancelled, ResultNotKept):
            await self._caller.own_rows.queue(self._name).result(self._info.id, wait_seconds=seconds)

    async def cancel(self) -> None:
        await self._caller.own_rows.queue(self._name).cancel(self._info.id)

    async def answer(self, answers: dict[str, Answer]) -> None:
        plane = self._caller.own_rows
        await plane.collection(COLLECTION).commit([answer_row(self._id, key, each) for key, each in answers.items()])
        await self._deliver(plane)

    async def _deliver_answered(self, rows: TaskRows) -> None:
        """Deliver a job that was answered while a worker had it, and that went back to its queue after that."""
        answered_ms = max(each.at_ms for each in rows.answers.values())
        # The times are those of two clocks. A job that used the answer and failed at once is only retried early, once.
        if self._info.state == "delayed" and self._info.leased_ms <= answered_ms + _SKEW_MS:
            await self._deliver(self._caller.own_rows)

    async def _deliver(self, plane: AsyncPlane) -> None:
        """Deliver the job now. If that fails, its delay ends by itself."""
        with suppress(MessageLeased, MessageFinished, MessageNotFound, NotAllowed):
            await plane.queue(self._name).update(self._info.id, delay_seconds=0)

    async def _result(self) -> mcp_types.CallToolResult:
        value = await self._caller.own_rows.queue(self._name).result(self._info.id)
        tool = await find_tool(self._caller.own_rows, self._tool)
        return await run_in_thread(result_of_value, value, None if tool is None else tool.output_schema, self._id)

    async def _ttl_ms(self, status: Status) -> int | None:
        if status == "working":
            return None
        try:
            policy = await self._caller.own_rows.queue(self._name).policy()
        except NotAllowed:
            return None
        kept = policy.dead_letter_retention_seconds if status == "failed" else policy.result_ttl_seconds
        ended_ms = max(self._info.finished_ms, self._info.died_ms)
        return ended_ms - self._info.created_ms + round(kept * 1_000)


class _Run:
    """A run that a tool has started."""

    def __init__(self, caller: Caller, task_id: str, info: RunInfo, tool: str) -> None:
        self._caller = caller
        self._id = task_id
        self._info = info
        self._tool = tool

    async def view(self, *, with_result: bool) -> TaskView:
        info = self._info
        rows = await _rows(self._caller, self._id)
        status: Status = _RUN_STATUS.get(info.state, "working")
        if rows.is_cancelled:  # Its code may still clean up. A status that was final stays so.
            status = "cancelled"
        published = await self._caller.own_rows.workflows.query(info.id) if status == "working" else None
        progress, asked = _published(published)
        questions = {key: each for key, each in asked.items() if key not in rows.answers}
        result = None
        if status == "completed" and with_result:
            value = await self._caller.own_rows.workflows.result(info.id)
            tool = await find_tool(self._caller.own_rows, self._tool)
            schema = None if tool is None else tool.output_schema
            result = await run_in_thread(result_of_value, value, schema, self._id)
        return TaskView(
            id=self._id,
            status="input_required" if questions else status,
            created_ms=info.started_ms,
            updated_ms=max([info.started_ms, info.ended_ms or 0, *_times(rows)]),
            progress=progress,
            questions=questions,
            error=_failure_text(info.error) if status == "failed" else None,
            result=result,
        )

    async def wait(self, seconds: float) -> None:
        await self._caller.own_rows.workflows.describe(self._info.id, wait_seconds=seconds)

    async def cancel(self) -> None:
        found = await self._caller.own_rows.workflows.cancel(self._info.id, "cancelled by the client of its tool")
        if found.state not in _RUN_STATUS:
            await self._caller.own_rows.collection(COLLECTION).commit([cancelled_row(self._id)])

    async def answer(self, answers: dict[str, Answer]) -> None:
        plane = self._caller.own_rows
        for key, each in answers.items():
            with suppress(RunEnded):
                await plane.workflows.signal(
                    self._info.id, SIGNAL + key, {"action": each.action, "content": each.content}
                )
        await plane.collection(COLLECTION).commit([answer_row(self._id, key, each) for key, each in answers.items()])


async def _find(caller: Caller, task_id: str) -> _Job | _Run:
    """The job of a task that the caller owns.

    Raises:
        NotFound: there is none. Nothing says whether another agent has such a task.
    """
    unknown = NotFound(
        f"Unknown task {task_id[:MCP_TASK_ID_CHARACTERS_MAX]!r}; check the id. A task is found by the agent that has "
        "started it, until some time after its end"
    )
    if len(task_id) > MCP_TASK_ID_CHARACTERS_MAX:
        raise unknown
    try:
        if task_id.startswith(_RUN):
            run = await caller.own_rows.workflows.describe(task_id.removeprefix(_RUN))
            mark = mark_of_run(run.id)
            if mark is not None and mark.owner == owner_of(caller.universe, caller.agent, run.workflow):
                return _Run(caller, task_id, run, mark.tool)
        else:
            queue, _, number = task_id.rpartition(".")
            info = await caller.own_rows.queue(queue).get(number)
            mark = mark_of_job(info.correlation_id)
            if mark is not None and mark.owner == owner_of(caller.universe, caller.agent, queue):
                return _Job(caller, f"{queue}.{info.id}", info, mark.tool)
    except (MessageNotFound, RunNotFound, Validation):
        raise unknown from None
    raise unknown


_NO_ROWS: Final = TaskRows(None, {}, {}, is_cancelled=False)


async def _rows(caller: Caller, task_id: str) -> TaskRows:
    try:
        page = await caller.own_rows.collection(COLLECTION).scan(task_id, limit=ROWS_MAX)
    except NotAllowed:  # Over a connection whose token has no access to collections: the status alone is known.
        return _NO_ROWS
    return read_rows(page.rows)


def _times(rows: TaskRows) -> list[int]:
    found = [each.at_ms for each in rows.questions.values()] + [each.at_ms for each in rows.answers.values()]
    return found if rows.progress is None else [*found, rows.progress.at_ms]


def _published(value: Any) -> tuple[Progress | None, dict[str, Question]]:
    """The progress and the questions in what a run has published. What has another form is shown as it is."""
    if value is None:
        return None, {}
    if not isinstance(value, dict) or not ({"progress", "input_required"} & value.keys()):
        return Progress(0.0, message=_shown(value)), {}
    progress: Progress | None = None
    with suppress(msgspec.ValidationError):
        if "progress" in value:
            progress = msgspec.convert({key: value.get(key) for key in ("progress", "total", "message")}, Progress)
    questions: dict[str, Question] = {}
    with suppress(msgspec.ValidationError):
        questions = msgspec.convert(value.get("input_required", {}), dict[str, Question])
    return progress, questions


def _shown(value: Any) -> str:
    try:
        return msgspec.json.encode(value).decode()[:MCP_STATUS_CHARACTERS_MAX]
    except (TypeError, ValueError):  # CBOR has values that JSON has not.
        return repr(value)[:MCP_STATUS_CHARACTERS_MAX]


def _failure_text(error: str | None) -> str:
    """The failure of a job for its owner: one line, because the rest is the worker's traceback."""
    lines = (error or "").strip().splitlines()
    return (lines[0] if lines else "the job failed, and no error was recorded")[:MCP_STATUS_CHARACTERS_MAX]
