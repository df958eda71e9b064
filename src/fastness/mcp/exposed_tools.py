"""Queues and workflows that are exposed as tools: how they are stored, listed and checked.

    collection "mcp-tools"    partition "tools"    (tool name,)  ->  ExposedTool as JSON

The schemas are checked when a tool is exposed, and again before a server uses them first: a row may have been written
in another way. A check of a value takes a bounded time, but up to a second: `check_value` and `check_arguments` are
called in threads.
"""

import logging
import re
from collections.abc import Iterable
from functools import lru_cache
from math import isfinite
from sys import float_info
from typing import Any, Final, Literal

import mcp_types
import msgspec
from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError, best_match
from referencing import Registry, Resource
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012

from fastness import AsyncPlane, PutRow, Row
from fastness.errors import InvalidArgument
from fastness.limits import (
    MCP_EXPOSED_TOOLS_MAX,
    MCP_SCHEMA_BYTES_MAX,
    MCP_SCHEMA_DEPTH_MAX,
    MCP_TOOL_DESCRIPTION_CHARACTERS_MAX,
    MCP_VALIDATION_SECONDS,
)
from fastness.mcp.errors import with_fields
from fastness.mcp.schema_validator import BoundedValidator, ValidationTooLong, check_pattern, errors_of
from fastness.names import checked_name

_log = logging.getLogger(__name__)

COLLECTION: Final = "mcp-tools"
PARTITION: Final = "tools"
_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}\Z")  # What the clients of all models accept.
_DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"
_HEADER: Final = "x-mcp-header"  # Makes clients repeat an argument in a header of the request.
_PROBLEMS_MAX: Final = 5  # That an error names; a model corrects a few at a time.
_VALUE_CHARACTERS_MAX: Final = 200  # Of a value that an error quotes.


class ExposedTool(msgspec.Struct, frozen=True, omit_defaults=True):
    """A queue or workflow that is a tool. `target` is its name.

    Calls of a queue with a `task` are calls of the task of that name, with the arguments as keyword arguments. Other
    queues get the arguments as the body of a message. A workflow gets them as keyword arguments.
    """

    name: str
    kind: Literal["queue", "workflow"]
    target: str
    description: str
    input_schema: dict[str, Any]
    output_schema: dict[str, Any] | None = None
    task: str | None = None

    @property
    def verb(self) -> str:
        """What the caller's token must allow."""
        return "queue:put" if self.kind == "queue" else "run:start"


def checked_tool(
    target: str,
    input_schema: object,
    *,
    name: str | None = None,
    description: str | None = None,
    output_schema: object = None,
    is_workflow: bool = False,
    task: str | None = None,
    reserved: Iterable[str] = (),
) -> ExposedTool:
    """A tool, if its name and schemas can be used.

    Raises:
        InvalidArgument, InvalidName: they cannot; the message says why.
    """
    checked_name("workflow" if is_workflow else "queue", target)
    if task is not None and is_workflow:
        raise InvalidArgument("A tool is a workflow or a task of a queue, not both; leave one of them out")
    if target.startswith("run:"):  # The ids of tasks that are runs begin so.
        raise InvalidArgument(f"Queue {target!r} cannot be a tool, because its name begins with 'run:'; choose another")
    chosen = re.sub(r"[^A-Za-z0-9_-]", "_", target)[:64] if name is None else name
    if not _NAME.match(chosen):
        raise InvalidArgument(f"{chosen[:80]!r} cannot be the name of a tool; use 1 to 64 letters, digits, _ and -")
    if chosen in reserved:
        raise InvalidArgument(f"{chosen!r} is a tool of Fastness itself; choose another name for the tool of {target}")
    kind: Literal["queue", "workflow"] = "workflow" if is_workflow else "queue"
    text = description or f"Runs a job of the {kind} {target} and returns its result. The job may take long."
    if len(text) > MCP_TOOL_DESCRIPTION_CHARACTERS_MAX:
        raise InvalidArgument(
            f"The description has {len(text)} characters; at most {MCP_TOOL_DESCRIPTION_CHARACTERS_MAX} are allowed"
        )
    schema = checked_schema(input_schema, "input schema")
    if is_workflow and "id" in schema.get("properties", {}):
        raise InvalidArgument(
            "The input schema has a property 'id', which is that of the run; call the argument of the workflow "
            "something else"
        )
    output = None if output_schema is None else checked_schema(output_schema, "output schema")
    return ExposedTool(chosen, kind, target, text, schema, output, task)


def checked_schema(schema: object, what: str) -> dict[str, Any]:
    """The schema, if it is JSON Schema 2020-12 for an object, of bounded size, and refers to nothing outside of itself.

    Raises:
        InvalidArgument: it is not.
    """
    if not isinstance(schema, dict):
        raise InvalidArgument(f"The {what} must be a JSON object, not {type(schema).__name__}")
    try:
        size = len(msgspec.json.encode(schema))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgument(f"The {what} is not JSON: {error}") from None
    if size > MCP_SCHEMA_BYTES_MAX:
        raise InvalidArgument(f"The {what} has {size} bytes; at most {MCP_SCHEMA_BYTES_MAX} are allowed")
    dialect = schema.get("$schema", _DIALECT)
    if not isinstance(dialect, str) or dialect.rstrip("#") != _DIALECT:
        raise InvalidArgument(f"The {what} is of another dialect; leave $schema out, or set it to {_DIALECT}")
    if schema.get("type") != "object":
        raise InvalidArgument(f'The {what} must have "type": "object" at its root: arguments and results have names')
    _check_content(schema, what, 1)
    try:
        problem = best_match(errors_of(_META, schema))
    except RecursionError:
        raise InvalidArgument(f"The {what} is nested too deep") from None
    except ValidationTooLong:
        raise InvalidArgument(f"The {what} takes too long to check; make it smaller") from None
    if problem is not None:
        raise InvalidArgument(f"The {what} is not valid JSON Schema: {_place(problem)}: {problem.message}")
    _check_patterns(schema, what)
    _check_references(schema, what)
    return schema


def check_value(schema: dict[str, Any], value: object) -> list[str]:
    """What is wrong with a value, at most five problems; none if it fits the schema."""
    try:
        return _problems(_checked_validator(msgspec.json.encode(schema)), value)
    except InvalidArgument as error:
        return [f"$: it cannot be checked: {error}"]


def check_arguments(tool: ExposedTool, arguments: dict[str, Any]) -> None:
    """Check the arguments of a call.

    Raises:
        InvalidArgument: they do not fit the schema; names each wrong argument.
    """
    try:
        validator = _checked_validator(msgspec.json.encode(tool.input_schema))
    except InvalidArgument as error:
        raise InvalidArgument(
            f"The tool {tool.name} cannot be called: {error}. It has to be exposed again with another schema"
        ) from None
    problems = _number_problems(arguments) or _problems(validator, arguments)
    if tool.kind == "workflow" and "id" in arguments and not problems:
        problems = ["id: this argument cannot be passed to a workflow"]
    if problems:
        said = f"The arguments of {tool.name} are wrong: {'; '.join(problems)}"
        raise with_fields(InvalidArgument(said), path=problems[0].partition(":")[0])


def row_of(tool: ExposedTool) -> PutRow:
    """The row that stores a tool."""
    return PutRow(PARTITION, (tool.name,), msgspec.json.encode(tool))


def tools_of(rows: Iterable[Row]) -> list[ExposedTool]:
    """The tools that rows store, without those that this version cannot read."""
    found = [_decoded(row.value) for row in rows]
    return [tool for tool in found if tool is not None]


async def find_tool(plane: AsyncPlane, name: str) -> ExposedTool | None:
    """The exposed tool of a name."""
    if not _NAME.match(name):
        return None
    row = await plane.collection(COLLECTION).get(PARTITION, (name,))
    return None if row is None else _decoded(row.value)


async def list_tools(plane: AsyncPlane) -> list[ExposedTool]:
    """The exposed tools of a universe, in the order of their names."""
    page = await plane.collection(COLLECTION).scan(PARTITION, limit=MCP_EXPOSED_TOOLS_MAX)
    return tools_of(page.rows)


def listed(tool: ExposedTool) -> mcp_types.Tool:
    """The tool as `tools/list` shows it."""
    return mcp_types.Tool(
        name=tool.name,
        description=tool.description,
        input_schema=tool.input_schema,
        output_schema=tool.output_schema,
        annotations=mcp_types.ToolAnnotations(read_only_hint=False, idempotent_hint=False),
        execution=mcp_types.ToolExecution(task_support="optional"),
    )


@lru_cache(maxsize=256)
def _decoded(value: bytes) -> ExposedTool | None:
    try:
        return msgspec.json.decode(value, type=ExposedTool)
    except msgspec.MsgspecError as error:  # One row must not hide the other tools.
        _log.warning("an exposed tool cannot be read: %s", error)
        return None


@lru_cache(maxsize=256)
def _checked_validator(schema: bytes) -> Any:
    """The validator of a stored schema.

    Raises:
        InvalidArgument: the schema cannot be used. Only checked ones are stored by this version.
    """
    return _validator(checked_schema(msgspec.json.decode(schema), "schema"))


def _validator(schema: dict[str, Any]) -> Any:
    registry: Registry[Any] = Registry()  # Without a way to retrieve anything: no call reads from the network.
    return BoundedValidator(schema, registry=registry)


_META: Final = BoundedValidator(Draft202012Validator.META_SCHEMA)


def _problems(validator: Any, value: object) -> list[str]:
    found: list[str] = []
    try:
        for error in errors_of(validator, value):
            best: ValidationError = best_match([error]) or error
            found.append(f"{_place(best)}: {_shortened(best.message)}")
            if len(found) == _PROBLEMS_MAX:
                break
    except RecursionError:
        return ["$: it is nested too deep"]
    except ValidationTooLong:
        return [
            f"$: checking it takes longer than {MCP_VALIDATION_SECONDS:g} s; send fewer items, or large data as a blob"
        ]
    return found


def _number_problems(arguments: dict[str, Any]) -> list[str]:
    """The first number that other programs could not read, if there is one: it is infinite, or larger than a float."""
    pending: list[tuple[str, Any]] = list(arguments.items())
    while pending:
        place, each = pending.pop()
        if isinstance(each, dict):
            pending += [(f"{place}.{name}", child) for name, child in each.items()]
        elif isinstance(each, list):
            pending += [(f"{place}[{number}]", child) for number, child in enumerate(each)]
        elif (isinstance(each, float) and not isfinite(each)) or (isinstance(each, int) and abs(each) > float_info.max):
            return [f"{place}: the number is too large; send a smaller one, or text"]
    return []


def _place(error: ValidationError) -> str:
    """Where a problem is, as in `items[0].name`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error.absolute_path)
    return text.removeprefix(".") or "$"


def _shortened(text: str) -> str:
    return text if len(text) <= _VALUE_CHARACTERS_MAX else f"{text[:_VALUE_CHARACTERS_MAX]}…"


def _check_content(value: object, what: str, depth: int) -> None:
    if depth > MCP_SCHEMA_DEPTH_MAX:
        raise InvalidArgument(f"The {what} is nested deeper than {MCP_SCHEMA_DEPTH_MAX} levels")
    if isinstance(value, dict) and _HEADER in value:
        raise InvalidArgument(f"The {what} has {_HEADER}; leave it out: servers check no headers of arguments")
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for child in children:
        _check_content(child, what, depth + 1)


def _check_patterns(value: object, what: str) -> None:
    if isinstance(value, dict):
        by_pattern = value.get("patternProperties")
        if isinstance(by_pattern, dict) and "unevaluatedProperties" in value:
            raise InvalidArgument(
                f"The {what} has patternProperties together with unevaluatedProperties; use additionalProperties"
            )
        patterns = [*by_pattern] if isinstance(by_pattern, dict) else []
        if isinstance(value.get("pattern"), str):
            patterns.append(value["pattern"])
        for pattern in patterns:
            try:
                check_pattern(pattern)
            except InvalidArgument as error:
                raise InvalidArgument(f"The {what} has a pattern that cannot be used: {error}") from None
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for child in children:
        _check_patterns(child, what)


def _check_references(schema: dict[str, Any], what: str) -> None:
    resource: Resource[Any] = Resource.from_contents(schema, default_specification=DRAFT202012)
    registry: Registry[Any] = Registry().with_resource("", resource)
    for reference in _references(schema):
        if not reference.startswith("#"):
            raise InvalidArgument(
                f"The {what} refers to {reference[:200]!r}; put that schema into $defs, and refer to #/$defs/…"
            )
        try:
            registry.resolver().lookup(reference)
        except Unresolvable:
            raise InvalidArgument(f"The {what} refers to {reference[:200]!r}, which it does not have") from None
    try:  # A reference that leads to itself has no end.
        list(errors_of(_validator(schema), {}))
    except RecursionError:
        raise InvalidArgument(f"The {what} has a reference that leads back to itself") from None
    except ValidationTooLong:
        raise InvalidArgument(f"The {what} takes too long for any value; use fewer references") from None


def _references(value: object) -> Iterable[str]:
    if isinstance(value, dict):
        for key, child in value.items():
            if key in ("$ref", "$dynamicRef") and isinstance(child, str):
                yield child
            elif key == "$id" and isinstance(child, str):
                yield child  # Relative references would be resolved against it.
            else:
                yield from _references(child)
    elif isinstance(value, list):
        for child in value:
            yield from _references(child)
