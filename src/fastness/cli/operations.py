"""Commands that are one request: arguments, options, bounds and help are those of the request.

    operation(queue, "purge", PurgeQueue, "Removed {count:,} messages from {queue}")
    operation(timer, "list", ListTimers, columns=("due_at", "world", "timer_id"))

A field that has help is an option, and another one that is required is an argument. A command is written as a function
where a person needs more than the operation.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from inspect import cleandoc
from typing import Any

import click
import msgspec

from fastness.cli import connect, existing, printing, values
from fastness.cli.commands import LeafCommand
from fastness.cli.field_options import option_of, type_of
from fastness.errors import NotFound
from fastness.handles.sync.plane import Plane
from fastness.limits import READ_ENTRIES_MAX
from fastness.wire.fields import default_of, description_of
from fastness.wire.requests import Committed, Request, answer_type
from fastness.wire.type_checks import bounds_of

Fields = dict[str, Any]
Text = str | Callable[[Fields], str]


def operation(
    group: click.Group,
    name: str,
    request: type[Request[Any]],
    text: Text = "",
    *,
    help: str = "",
    columns: Sequence[str] = (),
    empty: str = "",
    limit: tuple[str, int] = ("--limit", 1_000),
    show: Callable[[Any], Fields] | None = None,
    arguments: Mapping[str, str] = {},
    given: Mapping[str, Any] = {},
    confirm: Text = "",
    missing: str = "",
    create: bool = False,
    examples: Sequence[str] = (),
) -> None:
    """Add a command that makes a request and prints its answer: all of it, or `text`, or a list as a table.

    Args:
        group: gets the command.
        name: of the command.
        request: what it asks for.
        text: what it prints, with the fields of its arguments and of the answer.
        help: of the command; by default that of the request.
        columns: of the table of a list.
        empty: what it prints if the list is empty.
        limit: the option for the length of a list, and its default.
        show: the fields of an answer, or of an item of a list, where they are not those of `printing.fields`.
        arguments: the metavars of arguments that have another one, or are optional fields.
        given: fields that the command sets.
        confirm: what it asks first, unless `--yes` is given.
        missing: the error if the first field of the answer is nothing.
        create: whether it may create the plane.
        examples: of its use.
    """
    metavars = {
        field.name: arguments.get(field.name, field.name.upper())
        for field in msgspec.structs.fields(request)
        if field.name in arguments or (field.required and field.name not in given and not description_of(field.type))
    }

    def run(*, yes: bool = True, **typed: Any) -> None:
        if confirm:
            values.confirm(_formatted(confirm, typed), yes=yes)
        with connect.open_plane(create=create) as plane:
            if "queue" in typed and not create:
                existing.check_queue(plane, typed["queue"])
            if columns:
                existing.check_world(plane, typed.get("world"))
                found = _items(plane, request, typed)
                rows = [{columns[0]: each} if isinstance(each, str) else (show or _shown)(each) for each in found]
                printing.rows(rows, columns, empty=empty or f"No {answer_type(request).__struct_fields__[0]}.")
                return
            answer = _call(plane, request, {**typed, **given})
        if missing and not getattr(answer, answer.__struct_fields__[0]):
            raise NotFound(missing.format(**typed))
        shown = (show or _shown)(answer)
        if not text:
            printing.record(shown)
            return
        fields = {**{field: typed[field] for field in metavars if not isinstance(typed[field], tuple)}, **shown}
        printing.result(_formatted(text, fields), fields)

    parameters: list[click.Parameter] = []
    for field in msgspec.structs.fields(request):
        if field.name in metavars:
            metavar = metavars[field.name]
            count, required = -1 if "…" in metavar else 1, not metavar.startswith("[")
            kind = type_of(field)
            parameters.append(click.Argument([field.name], metavar=metavar, type=kind, nargs=count, required=required))
        elif columns and field.name == "after":
            start, where = default_of(field), "Start after this item."
            parameters.append(click.Option(["--after"], type=type_of(field), default=start, help=where))
        elif columns and field.name == "limit":
            is_paged = "next" in answer_type(request).__struct_fields__
            most = READ_ENTRIES_MAX if is_paged else bounds_of(field.type)["maximum"]
            count, range = min(limit[1], most), click.IntRange(1, most)
            of_list = f"The maximum number of results.  [default: {count}]"
            parameters.append(click.Option([limit[0], "limit"], type=range, default=count, help=of_list))
        elif field.name not in given and description_of(field.type):
            parameters.append(option_of(field))
    if confirm:
        parameters.append(click.Option(["--yes"], is_flag=True, help="Do not ask for confirmation."))
    routes = request.operation.http
    if columns or given or not request.__doc__:  # The text is about other uses of the request too.
        help = help or next((route.summary for route in routes if route.fixed == given), routes[0].summary)
    words = {each.name or "": each.opts[0] for each in parameters} | metavars
    help = re.sub("`([a-z_]+)`", lambda found: words.get(found[1], found[0]), help or cleandoc(request.__doc__ or ""))
    group.add_command(LeafCommand(name, params=parameters, callback=run, help=help, examples=examples))


def _items(plane: Plane, request: type[Request[Any]], typed: Fields) -> list[Any]:
    """The items of all pages, at most `limit`."""
    found: list[Any] = []
    while True:
        left = {"limit": typed["limit"] - len(found)} if "limit" in typed else {}
        page = _call(plane, request, {**typed, **left})
        found += getattr(page, page.__struct_fields__[0])
        following = getattr(page, "next", None)
        if following is None or len(found) >= typed["limit"]:
            return found
        typed = {**typed, "after": following}


def _call(plane: Plane, request: type[Request[Any]], typed: Mapping[str, Any]) -> Any:
    """The answer to a request with these fields, in the universe of the plane."""
    given: Fields = {}
    for field in msgspec.structs.fields(request):
        value = typed.get(field.name)
        if field.name == "universe":
            value = value or plane.universe
        if field.name == "limit" and value is not None:
            value = min(value, bounds_of(field.type).get("maximum", value))
        if isinstance(value, tuple):
            value = list(value) or None
        if value is not None:
            given[field.name] = value
    return plane._transport.call(request(**given))


def _shown(answer: Any) -> Fields:
    return {} if isinstance(answer, Committed) else printing.fields(answer)


def _formatted(text: Text, fields: Fields) -> str:
    return text(fields) if callable(text) else text.format(**fields)
