"""Expose queues and workflows as tools, list them, and conceal them again.

    expose(plane, "resize", {"type": "object", "properties": {"width": {"type": "integer"}}})

The tools of a universe are stored in it: every MCP server of the plane offers them from then on.
"""

from fastness import AsyncPlane, DeleteRow, Plane
from fastness.errors import InvalidArgument, NotFound
from fastness.limits import MCP_EXPOSED_TOOLS_MAX
from fastness.mcp.exposed_tools import COLLECTION, PARTITION, ExposedTool, checked_tool, list_tools, row_of, tools_of
from fastness.mcp.tools import TOOLS


def expose(
    plane: Plane,
    target: str,
    input_schema: object,
    *,
    name: str | None = None,
    description: str | None = None,
    output_schema: object = None,
    is_workflow: bool = False,
    task: str | None = None,
) -> ExposedTool:
    """Offer a queue or a workflow as a tool; replaces the tool of the same name.

    A call of the tool puts a message with the arguments as its JSON body into the queue, or starts a run of the
    workflow with them as keyword arguments. The result of the job is the result of the call.

    Args:
        plane: where the queue is; the tool is offered in its universe.
        target: the name of the queue or workflow.
        input_schema: JSON Schema (2020-12) of the arguments, with `"type": "object"` at its root.
        name: of the tool; by default that of the queue or workflow.
        description: what a model reads to decide whether to call it.
        output_schema: JSON Schema of the result, if it is always an object.
        is_workflow: the target is a workflow.
        task: the name of a task (`fastness.task`) of the queue, which is called with the arguments.

    Raises:
        InvalidArgument, InvalidName: the name or a schema cannot be used, or there are too many tools.
    """
    tool = _checked(target, input_schema, name, description, output_schema, is_workflow=is_workflow, task=task)
    rows = plane.collection(COLLECTION)
    _check_room(tools_of(rows.scan(PARTITION, limit=MCP_EXPOSED_TOOLS_MAX).rows), tool)
    rows.commit([row_of(tool)])
    return tool


async def expose_async(
    plane: AsyncPlane,
    target: str,
    input_schema: object,
    *,
    name: str | None = None,
    description: str | None = None,
    output_schema: object = None,
    is_workflow: bool = False,
    task: str | None = None,
) -> ExposedTool:
    """`expose` for asyncio."""
    tool = _checked(target, input_schema, name, description, output_schema, is_workflow=is_workflow, task=task)
    _check_room(await list_tools(plane), tool)
    await plane.collection(COLLECTION).commit([row_of(tool)])
    return tool


def exposed(plane: Plane) -> list[ExposedTool]:
    """The queues and workflows that are tools, in the order of the tools' names."""
    return tools_of(plane.collection(COLLECTION).scan(PARTITION, limit=MCP_EXPOSED_TOOLS_MAX).rows)


async def exposed_async(plane: AsyncPlane) -> list[ExposedTool]:
    """`exposed` for asyncio."""
    return await list_tools(plane)


def conceal(plane: Plane, name: str) -> None:
    """Offer a tool no more. Its tasks go on, and their owners still find them.

    Raises:
        NotFound: there is no such tool.
    """
    rows = plane.collection(COLLECTION)
    if rows.get(PARTITION, (name,)) is None:
        raise _not_exposed(name)
    rows.commit([DeleteRow(PARTITION, (name,))])


async def conceal_async(plane: AsyncPlane, name: str) -> None:
    """`conceal` for asyncio."""
    rows = plane.collection(COLLECTION)
    if await rows.get(PARTITION, (name,)) is None:
        raise _not_exposed(name)
    await rows.commit([DeleteRow(PARTITION, (name,))])


def _checked(
    target: str,
    input_schema: object,
    name: str | None,
    description: str | None,
    output_schema: object,
    *,
    is_workflow: bool,
    task: str | None,
) -> ExposedTool:
    return checked_tool(
        target,
        input_schema,
        name=name,
        description=description,
        output_schema=output_schema,
        is_workflow=is_workflow,
        task=task,
        reserved={tool.name for tool in TOOLS},
    )


def _check_room(found: list[ExposedTool], tool: ExposedTool) -> None:
    if len(found) >= MCP_EXPOSED_TOOLS_MAX and tool.name not in {each.name for each in found}:
        raise InvalidArgument(
            f"{len(found)} tools are exposed, the most that a universe can have; conceal one first: "
            f"fastness mcp conceal {found[0].name}"
        )


def _not_exposed(name: str) -> NotFound:
    return NotFound(f"No tool {name[:80]!r} is exposed; list them with: fastness mcp list")
