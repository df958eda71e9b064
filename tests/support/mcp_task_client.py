"""The task methods of both revisions of MCP over the SDK's client, which has none of its own."""

from typing import Any, Literal

import mcp_types
from mcp import Client
from mcp.client.extension import ClientExtension, ResultClaim

EXTENSION = "io.modelcontextprotocol/tasks"


class CreatedTask(mcp_types.Result):
    """The answer of a server of 2026-07-28 that has made a task."""

    result_type: Literal["task"] = "task"
    task_id: str
    status: str


class GetTask(mcp_types.GetTaskRequest):
    name_param = "taskId"


class CancelTask(mcp_types.CancelTaskRequest):
    name_param = "taskId"


class GetPayload(mcp_types.GetTaskPayloadRequest):
    name_param = "taskId"


class UpdateTaskParams(mcp_types.RequestParams):
    task_id: str
    input_responses: dict[str, Any]


class UpdateTask(mcp_types.Request[UpdateTaskParams, Literal["tasks/update"]]):
    method: Literal["tasks/update"] = "tasks/update"
    params: UpdateTaskParams
    name_param = "taskId"


class AnyResult(mcp_types.Result, extra="allow"):
    """The raw fields of an answer."""


class TaskExtension(ClientExtension):
    """Declares the extension. The tests ask for the handle of a task and poll by themselves."""

    identifier = EXTENSION

    def claims(self) -> list[ResultClaim[Any]]:
        return [ResultClaim(result_type="task", model=CreatedTask, resolve=self._resolve)]

    async def _resolve(self, created: Any, context: Any) -> Any:
        raise AssertionError(f"nothing waits for {created.task_id} here")


class TaskClient:
    """The task methods of the revision that a client speaks."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.session = client.session
        self.is_modern = client.protocol_version == "2026-07-28"

    async def start(self, tool: str, **arguments: Any) -> str:
        """Call a tool as a task; its id."""
        if self.is_modern:
            created = await self.session.call_tool(tool, arguments, allow_claimed=True)
            assert isinstance(created, CreatedTask), created
            assert created.status == "working"
            return created.task_id
        params = mcp_types.CallToolRequestParams(
            name=tool, arguments=arguments, task=mcp_types.TaskMetadata(ttl=60_000)
        )
        made = await self.session.send_request(mcp_types.CallToolRequest(params=params), mcp_types.CreateTaskResult)
        assert made.task.status == "working"
        return made.task.task_id

    async def get(self, task_id: str) -> dict[str, Any]:
        request = GetTask(params=mcp_types.GetTaskRequestParams(task_id=task_id))
        return (await self.session.send_request(request, AnyResult)).model_dump(by_alias=True)

    async def cancel(self, task_id: str) -> dict[str, Any]:
        request = CancelTask(params=mcp_types.CancelTaskRequestParams(task_id=task_id))
        return (await self.session.send_request(request, AnyResult)).model_dump(by_alias=True)

    async def answer(self, task_id: str, **responses: Any) -> None:
        params = UpdateTaskParams(task_id=task_id, input_responses=responses)
        await self.session.send_request(UpdateTask(params=params), AnyResult)

    async def payload(self, task_id: str) -> mcp_types.CallToolResult:
        """tasks/result, which 2025-11-25 has."""
        request = GetPayload(params=mcp_types.GetTaskPayloadRequestParams(task_id=task_id))
        return await self.session.send_request(request, mcp_types.CallToolResult)

    async def result(self, task_id: str) -> mcp_types.CallToolResult:
        """The result of a completed task; in 2025-11-25, as soon as it is completed."""
        if not self.is_modern:
            return await self.payload(task_id)
        found = await self.get(task_id)
        assert found["status"] == "completed", found
        return mcp_types.CallToolResult.model_validate(found["result"], by_name=False)
