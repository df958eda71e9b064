"""The result of a job as the result of a tool."""

import base64
from typing import Any, Final

import mcp_types
import msgspec
from pydantic import ValidationError

from fastness.limits import MCP_RESULT_BYTES_MAX
from fastness.mcp.exposed_tools import check_value

_RESULT_FIELDS: Final = {"content", "structuredContent", "isError", "_meta"}


def result_of_value(value: Any, output_schema: dict[str, Any] | None, task_id: str) -> mcp_types.CallToolResult:
    """What a client gets for the value that a job was acknowledged with, or a run returned.

    An object is structured content and its JSON, text is text, bytes are an embedded resource. A value in the form of a
    tool's result (`{"content": […], "isError": true}`) is passed on as it is.
    """
    if isinstance(value, dict) and output_schema is None and "content" in value and value.keys() <= _RESULT_FIELDS:
        try:
            return mcp_types.CallToolResult.model_validate(value, by_name=False)
        except ValidationError:
            pass  # An object that happens to have such a field.
    if isinstance(value, bytes):
        return _sized([_blob(value, task_id)], None, len(value), task_id)
    try:
        encoded = msgspec.json.encode(value)
    except (TypeError, ValueError) as error:  # A workflow may return what CBOR has, and JSON has not.
        return problem(f"The result of task {task_id} is not JSON: {error}")
    content = mcp_types.TextContent(type="text", text=value if isinstance(value, str) else encoded.decode())
    structured = msgspec.json.decode(encoded) if isinstance(value, dict) else None
    if output_schema is not None:
        problems = check_value(output_schema, value if structured is None else structured)
        if problems:
            said = f"The result of task {task_id} does not fit the output schema of its tool: {'; '.join(problems)}"
            return problem(said)
    return _sized([content], structured, len(encoded), task_id)


def problem(text: str, structured: dict[str, Any] | None = None) -> mcp_types.CallToolResult:
    """A result that says what went wrong."""
    content = mcp_types.TextContent(type="text", text=text)
    return mcp_types.CallToolResult(content=[content], structured_content=structured, is_error=True)


def wire_form(result: mcp_types.CallToolResult) -> dict[str, Any]:
    """The result as JSON has it, without the `resultType` of 2026-07-28."""
    return result.model_dump(by_alias=True, mode="json", exclude_none=True, exclude={"result_type"})


def _sized(
    content: list[mcp_types.ContentBlock], structured: dict[str, Any] | None, size: int, task_id: str
) -> mcp_types.CallToolResult:
    if size > MCP_RESULT_BYTES_MAX:
        return problem(
            f"The result of task {task_id} has {size} bytes, more than the {MCP_RESULT_BYTES_MAX} that a tool returns. "
            "Its worker should store it as a blob, and return the hash."
        )
    return mcp_types.CallToolResult(content=content, structured_content=structured)


def _blob(value: bytes, task_id: str) -> mcp_types.EmbeddedResource:
    contents = mcp_types.BlobResourceContents(
        uri=f"fastness://tasks/{task_id}/result",
        mime_type="application/octet-stream",
        blob=base64.b64encode(value).decode(),
    )
    return mcp_types.EmbeddedResource(type="resource", resource=contents)
