"""Options that are fields of a struct: their names, types, bounds and help are those of the fields.

`delay_seconds` is `--delay SECONDS`, `attributes` is `--attribute NAME=TEXT`, and a field that is true or false is a
flag.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from types import NoneType
from typing import Any, Final, Literal, get_args, get_origin

import click
import msgspec
from click.shell_completion import CompletionItem

from fastness.cli import values
from fastness.cli.durations import SECONDS, NoValue, OrNone
from fastness.cli.sizes import SIZE
from fastness.limits import READ_ENTRIES_MAX
from fastness.wire.fields import bare, default_of, described_fields, description_of
from fastness.wire.type_checks import bounds_of

_UNITS: Final = re.compile("_(seconds|per_second|hash)$")
_FIELD: Final = re.compile("`([a-z_]+)`")


class WordOrSeconds(click.ParamType[Any]):
    """One of some words, or a duration."""

    def __init__(self, words: Iterable[str]) -> None:
        self._words = [*words]
        self.name = "|".join((*self._words, SECONDS.name))

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value if value in self._words else SECONDS.convert(value, param, ctx)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
        del ctx, param
        return [CompletionItem(word) for word in self._words if word.startswith(incomplete)]


def field_options(
    struct: type[msgspec.Struct],
    *,
    changes: bool = False,
    names: Mapping[str, str] = {},
    types: Mapping[str, click.ParamType[Any]] = {},
    without: Iterable[str] = (),
) -> Callable[[Any], Any]:
    """Add an option for each field that has help. The command passes what it receives to `given`.

    Args:
        struct: whose fields they are.
        changes: the options change what is stored: `none` removes a value, and a flag can be set and cleared.
        names: the names of options that do not follow from the names of their fields.
        types: the types of options that do not follow from the types of their fields.
        without: fields that are no options.
    """
    fields = [field for field in described_fields(struct) if field.name not in without]
    options = {field.name: names.get(field.name) or _option_name(field) for field in fields}

    def add(command: Any) -> Any:
        for field in reversed(fields):
            kind = types.get(field.name)
            command.__click_params__ = getattr(command, "__click_params__", [])
            command.__click_params__.append(option_of(field, options, kind, changes=changes))
        return command

    return add


def option_of(
    field: msgspec.structs.FieldInfo,
    names: Mapping[str, str] = {},
    kind: click.ParamType[Any] | None = None,
    *,
    changes: bool = False,
) -> click.Option:
    """The option for a field. `names` has the options of the fields that its help may mention."""
    whole, default = bare(field.type), default_of(field)
    help = _FIELD.sub(lambda found: names.get(found[1], found[0]), description_of(field.type))
    if (
        not changes
        and default
        and isinstance(default, str | int | float)
        and default is not True
        and "default" not in help
    ):
        help += f"  [default: {default}]"
    name = names.get(field.name) or _option_name(field)
    given: dict[str, Any] = {"help": help, "required": field.required}
    if whole is bool:
        name = f"{name}/--no-{name[2:]}" if changes else name
        given |= {"is_flag": True, "default": None}
    elif get_origin(whole) is dict:
        given |= {"multiple": True, "metavar": "NAME=TEXT", "callback": _attributes}
    elif get_origin(whole) is list:
        given |= {"multiple": True, "callback": lambda _ctx, _option, texts: list(texts) or None}
    else:
        kind = kind or type_of(field)
        given["type"] = OrNone(kind) if changes and NoneType in get_args(whole) else kind
    return click.Option([name, field.name], **given)


def limit_option(name: str, default: int, most: int = READ_ENTRIES_MAX, field: str = "limit") -> Callable[[Any], Any]:
    """Add the option for the length of a list."""
    help = f"The maximum number of results.  [default: {default}]"
    return click.option(name, field, type=click.IntRange(1, most), default=default, help=help)


def given(options: Mapping[str, Any]) -> Any:
    """The options that were given, by the names of their fields."""
    return {name: None if each is NoValue.NONE else each for name, each in options.items() if each is not None}


def _option_name(field: msgspec.structs.FieldInfo) -> str:
    name = field.name.removesuffix("s") if get_origin(bare(field.type)) in (dict, list) else field.name
    return f"--{_UNITS.sub('', name).replace('_', '-')}"


def type_of(field: msgspec.structs.FieldInfo) -> click.ParamType[Any]:
    """The type of an option or argument for a field."""
    whole = bare(field.type)
    kinds = [each for each in get_args(whole) if each is not NoneType] or [whole]
    if get_origin(whole) is Literal:
        return click.Choice(kinds)
    words = [word for each in kinds if get_origin(each) is Literal for word in get_args(each)]
    if words:
        return WordOrSeconds(words)
    if field.name.endswith("seconds"):
        return SECONDS
    if field.name.endswith("bytes"):
        return SIZE
    bounds = bounds_of(field.type)
    if "enum" in bounds:
        return click.Choice(bounds["enum"])
    limits = bounds.get("minimum"), bounds.get("maximum")
    if kinds == [int]:
        return click.INT if limits == (None, None) else click.IntRange(*limits)
    if kinds == [float]:
        return click.FLOAT if limits == (None, None) else click.FloatRange(*limits)
    return click.STRING


def _attributes(_ctx: click.Context, _option: click.Parameter, pairs: Iterable[str]) -> dict[str, str] | None:
    return dict(map(values.parse_attribute, pairs)) or None
