"""The two task protocols of MCP, and calls of clients that have neither.

                   2025-11-25 (core)                            2026-07-28 (extension io.modelcontextprotocol/tasks)
    created by     the client: `task` in tools/call             the server, if the client has declared the extension
    status         tasks/get                                    tasks/get, with the result, error or questions
    result         tasks/result, which waits                    in tasks/get
    questions      elicitation/create during tasks/result       tasks/update
    cancel         tasks/cancel: the task                       tasks/cancel: nothing

The ids are the same in both. Without tasks, a call of an exposed tool waits for a bounded time, with notifications of
progress. If the job takes longer, the answer has the task's id, and the tools task_status, task_answer and task_cancel
go on from there. The job runs on in any case: only a cancel of the task ends it.
"""

import logging
from collections.abc import Mapping
from datetime import UTC, datetime
from time import monotonic
from typing import Any, Final

import mcp_types
from mcp.server.context import CallNext, HandlerResult
from mcp.shared.exceptions import MCPError, NoBackChannelError
from mcp.shared.inbound import MCP_NAME_HEADER, decode_header_value
from mcp.shared.message import ServerMessageMetadata
from mcp_types.version import MODERN_PROTOCOL_VERSIONS
from pydantic import Field

from fastness.errors import FastnessError, InvalidArgument, NotAllowed
from fastness.limits import MCP_QUESTIONS_MAX, MCP_TASK_POLL_SECONDS, MCP_TASK_WAIT_SECONDS
from fastness.mcp import durable_tasks
from fastness.mcp.caller import Caller
from fastness.mcp.dispatch import FastnessServer, RequestContext
from fastness.mcp.durable_tasks import TaskView, questions_form
from fastness.mcp.exposed_tools import ExposedTool, find_tool, list_tools, listed
from fastness.mcp.task_results import problem, wire_form
from fastness.mcp.task_rows import Answer, Question
from fastness.mcp.tools import TOOLS

_log = logging.getLogger(__name__)

EXTENSION: Final = "io.modelcontextprotocol/tasks"
_RELATED: Final = "io.modelcontextprotocol/related-task"
_CORE_TASKS: Final = "2025-11-25"
_POLL_MS: Final = round(MCP_TASK_POLL_SECONDS * 1_000)


class UpdateTaskParams(mcp_types.RequestParams):
    """The parameters of tasks/update."""

    task_id: str
    input_responses: dict[str, Any] = Field(max_length=MCP_QUESTIONS_MAX)


def add_tasks(server: FastnessServer) -> None:
    """Offer exposed queues and workflows as tools, and their jobs as tasks, in both protocols."""
    protocols = TaskProtocols()
    server.add_tool_source(protocols)
    server.handle("tasks/get", mcp_types.GetTaskRequestParams, protocols.get)
    server.handle("tasks/result", mcp_types.GetTaskPayloadRequestParams, protocols.result)
    server.handle("tasks/update", UpdateTaskParams, protocols.update)
    server.handle("tasks/cancel", mcp_types.CancelTaskRequestParams, protocols.cancel)
    server.extensions[EXTENSION] = {}
    server.add_capabilities(_with_core_tasks)

    async def call_as_task(ctx: RequestContext, call_next: CallNext) -> HandlerResult:
        # Not in the handler of tools/call, whose results the SDK checks for the shape of a finished call.
        params = ctx.params or {}
        if ctx.method != "tools/call" or ctx.protocol_version != _CORE_TASKS or params.get("task") is None:
            return await call_next(ctx)
        asked = mcp_types.CallToolRequestParams.model_validate(params, by_name=False)
        return await protocols.create(server.caller_of(ctx), asked)

    server.middleware.append(call_as_task)


class TaskProtocols:
    """The handlers of tasks. They have no state."""

    async def list_tools(self, caller: Caller) -> list[mcp_types.Tool]:
        """The exposed tools that the caller may call."""
        try:
            found = await list_tools(caller.own_rows)
        except NotAllowed:  # Over a connection whose token has no access to collections.
            return []
        return [listed(tool) for tool in found if _may_call(caller, tool)]

    async def call_tool(
        self, context: RequestContext, caller: Caller, params: mcp_types.CallToolRequestParams
    ) -> HandlerResult | None:
        """Call an exposed tool: as a task of 2026-07-28, or waiting for the result."""
        tool = await self._find(caller, params.name)
        if tool is None:
            return None
        is_modern = context.protocol_version in MODERN_PROTOCOL_VERSIONS
        if params.request_state is not None and is_modern:  # The client has the answers to our questions.
            task_id = params.request_state
            await durable_tasks.answer(caller, task_id, _raw_responses(context))
            return await _wait_for_result(context, caller, tool, task_id)
        task_id = await durable_tasks.create(caller, tool, params.arguments or {})
        if is_modern and _declares_tasks(context):
            return {"resultType": "task", **_modern_form(await durable_tasks.read_created(caller, task_id))}
        return await _wait_for_result(context, caller, tool, task_id)

    async def create(self, caller: Caller, params: mcp_types.CallToolRequestParams) -> dict[str, Any]:
        """Start a task of 2025-11-25."""
        if any(params.name == own.name for own in TOOLS):
            raise MCPError(
                code=mcp_types.METHOD_NOT_FOUND,
                message=f"Tool {params.name} does not run as a task; call it without the parameter task",
            )
        tool = await self._find(caller, params.name)
        if tool is None:
            raise MCPError(code=mcp_types.INVALID_PARAMS, message=f"Unknown tool {params.name[:128]!r}; list the tools")
        task_id = await durable_tasks.create(caller, tool, params.arguments or {})
        view = await durable_tasks.read_created(caller, task_id)
        # `content` is not part of this result, but clients that expect the result of a tool refuse one without it.
        text = f"Task {task_id} was started. It goes on without this connection; get its status with its id."
        return {"task": _core_form(view), "content": [{"type": "text", "text": text}]}

    async def get(
        self, context: RequestContext, caller: Caller, params: mcp_types.GetTaskRequestParams
    ) -> dict[str, Any]:
        """The task, as `tasks/get` returns it."""
        is_modern = _check_protocol(context, params.task_id)
        view = await durable_tasks.read(caller, params.task_id, with_result=is_modern)
        return _detailed_form(view) if is_modern else _core_form(view)

    async def result(
        self, context: RequestContext, caller: Caller, params: mcp_types.GetTaskPayloadRequestParams
    ) -> dict[str, Any]:
        """The result of a task of 2025-11-25. Waits until the task has ended, and asks its questions meanwhile."""
        if context.protocol_version != _CORE_TASKS:
            raise _method_not_found(context)
        view = await _wait_and_ask(context, caller, params.task_id)
        if view.status == "completed" and view.result is not None:
            found = wire_form(view.result)
            found["_meta"] = {**found.get("_meta", {}), _RELATED: {"taskId": view.id}}
            return found
        if view.status == "failed":
            raise MCPError(code=mcp_types.INTERNAL_ERROR, message=f"Task {view.id} failed: {view.error}")
        if view.status == "cancelled":
            raise MCPError(code=mcp_types.INVALID_PARAMS, message=f"Task {view.id} was cancelled; it has no result")
        raise MCPError(
            code=mcp_types.REQUEST_TIMEOUT,
            message=f"Task {view.id} has not ended within {MCP_TASK_WAIT_SECONDS:g} s and goes on; call tasks/result "
            "again, or poll tasks/get",
        )

    async def update(self, context: RequestContext, caller: Caller, params: UpdateTaskParams) -> dict[str, Any]:
        """Answer questions of a task of 2026-07-28."""
        if not _check_protocol(context, params.task_id):
            raise _method_not_found(context)
        await durable_tasks.answer(caller, params.task_id, params.input_responses)
        return {}

    async def cancel(
        self, context: RequestContext, caller: Caller, params: mcp_types.CancelTaskRequestParams
    ) -> dict[str, Any]:
        """Cancel a task."""
        is_modern = _check_protocol(context, params.task_id)
        if not is_modern:
            before = await durable_tasks.read(caller, params.task_id, with_result=False)
            if before.has_ended:
                raise MCPError(
                    code=mcp_types.INVALID_PARAMS,
                    message=f"Task {before.id} cannot be cancelled: it is {before.status}",
                )
        view = await durable_tasks.cancel(caller, params.task_id)
        return {} if is_modern else _core_form(view)

    async def _find(self, caller: Caller, name: str) -> ExposedTool | None:
        try:
            tool = await find_tool(caller.own_rows, name)
        except NotAllowed:
            return None
        return tool if tool is not None and _may_call(caller, tool) else None


def _may_call(caller: Caller, tool: ExposedTool) -> bool:
    is_own_queue = tool.kind == "workflow" or caller.may_use_queue(tool.target)
    return is_own_queue and caller.is_allowed(tool.verb)


async def _wait_for_result(
    context: RequestContext, caller: Caller, tool: ExposedTool, task_id: str
) -> mcp_types.CallToolResult | mcp_types.InputRequiredResult:
    """The result of a task for a client that waits for it; after a bounded time, how to go on."""
    try:
        view = await _wait_and_ask(context, caller, task_id)
    except FastnessError as error:  # As when the server stops. The job goes on, and must not be started again.
        view = await durable_tasks.read_created(caller, task_id)
        _log.info("a call of %s has stopped waiting for task %s: %s", tool.name, task_id, error)
    if view.result is not None:
        return view.result
    if view.status == "failed":
        return problem(f"The job of {tool.name} failed: {view.error}", {"task_id": task_id, "status": view.status})
    if view.status == "cancelled":
        return problem(f"The job of {tool.name} was cancelled.", {"task_id": task_id, "status": view.status})
    if view.questions and context.protocol_version in MODERN_PROTOCOL_VERSIONS and _can_elicit(context):
        requests = {key: _elicitation(question) for key, question in view.questions.items()}
        return mcp_types.InputRequiredResult(input_requests=dict(requests), request_state=task_id)
    return _pending(tool, view)


async def _wait_and_ask(context: RequestContext, caller: Caller, task_id: str) -> TaskView:
    """Wait for a task for a bounded time, with reports of progress; ask its questions if the client can be asked."""
    can_ask = context.protocol_version not in MODERN_PROTOCOL_VERSIONS and _can_elicit(context)
    waits_on = context.protocol_version not in MODERN_PROTOCOL_VERSIONS and context.method == "tasks/result"
    loop_end = monotonic() + MCP_TASK_WAIT_SECONDS
    reported = -1.0

    async def report(view: TaskView) -> None:
        nonlocal reported
        if view.progress is not None and view.progress.progress > reported:
            reported = view.progress.progress
            await caller.report_progress(reported, view.progress.total, view.progress.message)

    while True:
        left = max(loop_end - monotonic(), 0.0)
        stop = can_ask or not waits_on
        view = await durable_tasks.wait(caller, task_id, left, on_change=report, stop_at_question=stop)
        if view.has_ended or not view.questions or not can_ask or monotonic() >= loop_end:
            return view
        answers = await _ask(context, view, loop_end)
        if not answers:
            return view
        try:
            await durable_tasks.answer(caller, task_id, answers)
        except InvalidArgument as error:  # Ask again, for as long as the call waits.
            await caller.report_progress(max(reported, 0.0), None, str(error))


async def _ask(context: RequestContext, view: TaskView, ends_at: float) -> dict[str, Answer]:
    """Ask a client of 2025-11-25, until a time of `monotonic`; the answers that it gave by then."""
    answers: dict[str, Answer] = {}
    for key, question in view.questions.items():
        seconds = ends_at - monotonic()
        if seconds <= 0:
            break
        request = _elicitation(question, {_RELATED: {"taskId": view.id}})
        metadata = ServerMessageMetadata(related_request_id=context.request_id)
        try:
            found = await context.session.send_request(
                request, mcp_types.ElicitResult, request_read_timeout_seconds=max(seconds, 0.1), metadata=metadata
            )
        except (MCPError, NoBackChannelError):  # It cannot be asked, or does not answer: the task waits on.
            continue
        answers[key] = Answer(found.action, dict(found.content or {}))
    return answers


def _elicitation(question: Question, meta: dict[str, Any] | None = None) -> mcp_types.ElicitRequest:
    params: dict[str, Any] = {"mode": "form", "message": question.message, "requestedSchema": question.schema}
    if meta is not None:
        params["_meta"] = meta
    return mcp_types.ElicitRequest.model_validate({"method": "elicitation/create", "params": params}, by_name=False)


def _pending(tool: ExposedTool, view: TaskView) -> mcp_types.CallToolResult:
    """The answer to a call whose job takes longer than the call waits."""
    structured: dict[str, Any] = {"task_id": view.id, "status": view.status}
    if view.text is not None:
        structured["message"] = view.text
    if view.questions:
        structured["questions"] = questions_form(view.questions)
        text = (
            f"Task {view.id} of {tool.name} waits for answers: {view.text}. Call task_answer with this task_id, then "
            "task_status for the result. Do not call the tool again: that would start another job."
        )
    else:
        text = (
            f"Task {view.id} of {tool.name} is still running. Call task_status with this task_id and wait_seconds for "
            "its result. Do not call the tool again: that would start another job."
        )
    content = mcp_types.TextContent(type="text", text=text)
    # A result that does not fit the output schema is refused by clients, unless it is marked as an error.
    is_error = tool.output_schema is not None
    return mcp_types.CallToolResult(content=[content], structured_content=structured, is_error=is_error)


def _core_form(view: TaskView) -> dict[str, Any]:
    """A task of 2025-11-25."""
    return _task_form(view) | {"ttl": view.ttl_ms, "pollInterval": _POLL_MS}


def _modern_form(view: TaskView) -> dict[str, Any]:
    """A task of 2026-07-28."""
    return _task_form(view) | {"ttlMs": view.ttl_ms, "pollIntervalMs": _POLL_MS}


def _detailed_form(view: TaskView) -> dict[str, Any]:
    """A task of 2026-07-28 with its result, error or questions."""
    found = _modern_form(view)
    if view.result is not None:
        found["result"] = {"resultType": "complete", **wire_form(view.result)}
    if view.status == "failed":
        found["error"] = {"code": mcp_types.INTERNAL_ERROR, "message": view.error}
    if view.questions:
        requests = {key: _elicitation(question) for key, question in view.questions.items()}
        found["inputRequests"] = {
            key: each.model_dump(by_alias=True, mode="json", exclude_none=True) for key, each in requests.items()
        }
    return found


def _task_form(view: TaskView) -> dict[str, Any]:
    found = {
        "taskId": view.id,
        "status": view.status,
        "createdAt": _timestamp(view.created_ms),
        "lastUpdatedAt": _timestamp(view.updated_ms),
    }
    return found if view.text is None else found | {"statusMessage": view.text}


def _timestamp(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1_000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _raw_responses(context: RequestContext) -> Mapping[str, Any]:
    found = (context.params or {}).get("inputResponses")
    return found if isinstance(found, dict) else {}


def _check_protocol(context: RequestContext, task_id: str) -> bool:
    """Whether the request is one of 2026-07-28.

    Raises:
        MCPError: its header names another task; its client has not declared the extension; or the revision has no
            tasks.
    """
    if context.protocol_version in MODERN_PROTOCOL_VERSIONS:
        _check_name_header(context, task_id)
        check_tasks_declared(context)
        return True
    if context.protocol_version != _CORE_TASKS:
        raise _method_not_found(context)
    return False


def _check_name_header(context: RequestContext, task_id: str) -> None:
    """Check the header by which balancers route requests of a task. The SDK checks it for methods of the core only."""
    request: Any = context.request  # None over stdio.
    if request is not None and decode_header_value(request.headers.get(MCP_NAME_HEADER)) != task_id:
        raise MCPError(
            code=mcp_types.HEADER_MISMATCH,
            message=f"{MCP_NAME_HEADER} header does not match the request body's 'taskId' parameter; send the same id",
        )


def _method_not_found(context: RequestContext) -> MCPError:
    return MCPError(code=mcp_types.METHOD_NOT_FOUND, message="Method not found", data=context.method)


def check_tasks_declared(context: RequestContext) -> None:
    """Raise MCPError if the client of a request of 2026-07-28 has not declared the extension."""
    if not _declares_tasks(context):
        raise MCPError(
            code=mcp_types.MISSING_REQUIRED_CLIENT_CAPABILITY,
            message=f"Missing required client capability: the extension {EXTENSION}",
            data={"requiredCapabilities": {"extensions": {EXTENSION: {}}}},
        )


def _declares_tasks(context: RequestContext) -> bool:
    declared = context.session.client_capabilities
    return declared is not None and EXTENSION in (declared.extensions or {})


def _can_elicit(context: RequestContext) -> bool:
    declared = context.session.client_capabilities
    return declared is not None and declared.elicitation is not None


def _with_core_tasks(found: mcp_types.ServerCapabilities, is_modern: bool) -> mcp_types.ServerCapabilities:
    if is_modern:
        return found
    call = mcp_types.ServerTasksRequestsCapability.model_validate({"tools": {"call": {}}})
    cancel = mcp_types.TasksCancelCapability()
    return found.model_copy(update={"tasks": mcp_types.ServerTasksCapability(cancel=cancel, requests=call)})
