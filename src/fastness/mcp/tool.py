"""Tools: a name, a description, and a function from an input struct to an output struct."""

from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from typing import Any, Generic, Self, TypeVar, cast

import mcp_types
import msgspec

from fastness.errors import InvalidArgument
from fastness.mcp.caller import Caller
from fastness.mcp.errors import invalid_argument
from fastness.mcp.schemas import schema_of


class ToolInput(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The arguments of a tool. Each field is annotated with `Meta(description=…)` and its bounds."""


class ToolOutput(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of a tool. Each field is annotated with `Meta(description=…)`."""

    @classmethod
    def of(cls, found: object, **given: Any) -> Self:
        """The answer with these fields, and with those that `found` has; of its `due_ms` comes `due_at` in UTC."""
        fields = {
            name: utc(getattr(found, f"{name[:-3]}_ms")) if name.endswith("_at") else getattr(found, name)
            for name in cls.__struct_fields__
            if name not in given and hasattr(found, f"{name[:-3]}_ms" if name.endswith("_at") else name)
        }
        return cls(**fields, **given)


def utc(ms: int) -> str:
    """A time in milliseconds since 1970 as text."""
    return datetime.fromtimestamp(ms / 1_000, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


Input = TypeVar("Input", bound=ToolInput)
Output = TypeVar("Output", bound=ToolOutput)


def with_fields_of(struct: type[msgspec.Struct], names: Collection[str]) -> Callable[[type[Input]], type[Input]]:
    """Add fields of a struct to an input, with their types, help and defaults; its own fields come first."""

    def add(kind: type[Input]) -> type[Input]:
        own = msgspec.structs.fields(kind)
        known = {field.name for field in own}
        added = [field for field in msgspec.structs.fields(struct) if field.name in names and field.name not in known]
        found: Any = msgspec.defstruct(
            kind.__name__,
            [(field.name, field.type, _default(field)) for field in (*own, *added)],
            bases=(ToolInput,),
            module=kind.__module__,
            frozen=True,
            kw_only=True,
        )
        return cast("type[Input]", found)

    return add


def _default(field: msgspec.structs.FieldInfo) -> Any:
    return field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()


@dataclass(frozen=True, kw_only=True)
class Tool(Generic[Input, Output]):
    """A tool that is part of Fastness.

    Attributes:
        name: lower-case words joined by underscores.
        title: the name that people see.
        description: what a model reads: what the tool does, when to use it, what to do with the answer.
        call: does the work. It raises FastnessError for what the model can act on.
        read_only: it changes nothing.
        destructive: it may delete or replace what others wrote.
        idempotent: a repeated call with the same arguments changes nothing more.
        verbs: what the caller's token must allow; the tool is not listed otherwise.
    """

    name: str
    title: str
    description: str
    input: type[Input]
    output: type[Output]
    call: Callable[[Caller, Input], Awaitable[Output]]
    verbs: tuple[str, ...]
    read_only: bool = False
    destructive: bool = False
    idempotent: bool = False

    @cached_property
    def listed(self) -> mcp_types.Tool:
        """The tool as `tools/list` shows it."""
        return mcp_types.Tool(
            name=self.name,
            title=self.title,
            description=self.description,
            input_schema=schema_of(self.input),
            output_schema=schema_of(self.output),
            annotations=mcp_types.ToolAnnotations(
                title=self.title,
                read_only_hint=self.read_only,
                destructive_hint=self.destructive,
                idempotent_hint=self.idempotent or self.read_only,
                open_world_hint=False,
            ),
        )

    def is_allowed(self, caller: Caller) -> bool:
        """Whether the caller's token has every verb of the tool."""
        return all(caller.is_allowed(verb) for verb in self.verbs)

    async def answer(self, caller: Caller, arguments: dict[str, Any]) -> mcp_types.CallToolResult:
        """Call the tool.

        Raises:
            FastnessError: the call was refused, or an argument is wrong.
        """
        output = await self.call(caller, converted(arguments, self.input))
        return result_of(msgspec.to_builtins(output))


def converted(arguments: dict[str, Any], kind: type[Input]) -> Input:
    """The arguments as a struct.

    Raises:
        InvalidArgument: a field is missing, unknown, or has a wrong type or value; it names the field's path.
    """
    check_text(arguments)
    try:
        return msgspec.convert(arguments, kind)
    except msgspec.ValidationError as error:
        raise invalid_argument(error) from None


def check_text(arguments: Any) -> None:
    """Check that all text in the arguments can be stored.

    Raises:
        InvalidArgument: some has half of a surrogate pair, which JSON can escape and UTF-8 lacks.
    """
    pending = [arguments]
    while pending:
        each = pending.pop()
        if isinstance(each, dict):
            pending += [*each, *each.values()]
        elif isinstance(each, list):
            pending += each
        elif isinstance(each, str) and not each.isascii():
            try:
                each.encode()
            except UnicodeEncodeError:
                shown = ascii(each[:60])
                raise InvalidArgument(f"{shown} is not valid Unicode text: it has half of a surrogate pair") from None


def result_of(structured: dict[str, Any]) -> mcp_types.CallToolResult:
    """The result of a tool that succeeded. Clients that read no structured content get the same as text."""
    text = msgspec.json.encode(structured).decode()
    content = [mcp_types.TextContent(type="text", text=text)]
    return mcp_types.CallToolResult(content=list(content), structured_content=structured)
