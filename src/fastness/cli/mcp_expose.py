"""`fastness mcp expose`: queues and workflows as tools of agents."""

from types import ModuleType
from typing import Any

import click

from fastness.cli import connect, printing, values
from fastness.cli.commands import LeafCommand
from fastness.errors import Unsupported


@click.command(
    cls=LeafCommand,
    examples=[
        "fastness mcp expose resize --schema resize.json --description 'Resizes an image.'",
        'fastness mcp expose orders --name place_order --schema \'{"type": "object"}\' --workflow',
    ],
)
@click.argument("name", metavar="QUEUE")
@click.option("--schema", metavar="FILE", required=True, help="JSON Schema of the arguments: a file, - or JSON.")
@click.option("--name", "tool_name", metavar="TOOL", help="The tool's name; by default that of the queue.")
@click.option("--description", metavar="TEXT", help="What the tool does; a model reads it.")
@click.option("--output-schema", metavar="FILE", help="JSON Schema of the result, if it is an object.")
@click.option("--workflow", is_flag=True, help="QUEUE is the name of a workflow.")
@click.option("--task", metavar="NAME", help="Call this task of the queue with the arguments.")
def expose(
    *,
    name: str,
    schema: str,
    tool_name: str | None,
    description: str | None,
    output_schema: str | None,
    workflow: bool,
    task: str | None,
) -> None:
    """Offer a queue, or a workflow, as a tool to agents.

    A call of the tool puts a message with the arguments into the queue, or starts a run of the workflow. Any consumer
    of the queue does the work; the result that it acknowledges the message with is the result of the tool. A tool of
    the same name is replaced.
    """
    exposing = _exposing()
    given, result = _read_schema(schema), None if output_schema is None else _read_schema(output_schema)
    with connect.open_plane(create=True) as plane:
        tool = exposing.expose(
            plane,
            name,
            given,
            name=tool_name,
            description=description,
            output_schema=result,
            is_workflow=workflow,
            task=task,
        )
    printing.result(f"The {tool.kind} {tool.target} is the tool {tool.name}", printing.fields(tool))


@click.command("list", cls=LeafCommand, examples=["fastness mcp list --json"])
def list_() -> None:
    """List the queues and workflows that are tools."""
    exposing = _exposing()
    with connect.open_plane() as plane:
        found = exposing.exposed(plane)
    columns = ("name", "kind", "target", "description")
    printing.rows([printing.fields(tool) for tool in found], columns, empty="No queue or workflow is a tool.")


@click.command(cls=LeafCommand, examples=["fastness mcp conceal resize"])
@click.argument("tool")
def conceal(tool: str) -> None:
    """Offer a tool no more. Its jobs go on, and the agents that started them still find them."""
    exposing = _exposing()
    with connect.open_plane() as plane:
        exposing.conceal(plane, tool)
    printing.result(f"{tool} is no tool any more", {"name": tool, "concealed": True})


def _exposing() -> ModuleType:
    """The module that needs the SDK, which may not be installed."""
    try:
        from fastness.mcp import exposing
    except ImportError as error:
        raise Unsupported(str(error)) from error
    return exposing


def _read_schema(given: str) -> Any:
    """A schema: JSON itself, or the file that has it."""
    if given.lstrip().startswith("{"):
        return values.parse_json(given)
    with values.open_input(None, given) as stream:
        return values.parse_json(stream.read())
