"""The Python reference: every exported name of `fastness`, `fastness.errors` and `fastness.testing` as Markdown.

`pages()` gives a page for each section: classes with the methods of the blocking and the asyncio class side by side,
and where they work; then each method with its signature, arguments and errors. tools/make_reference.py writes them.
"""

import ast
import inspect
import re
import textwrap
import typing
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from functools import cache
from importlib import import_module
from typing import Any, Final

import msgspec

import fastness
from check_links import slug_of
from fastness import testing
from fastness.errors import CLASSES, FastnessError
from fastness.wire.fields import bare, description_of
from fastness.wire.requests import Request

# The pages, and the modules whose exports they have. A module that is not listed belongs to its longest listed prefix.
SECTIONS: Final[dict[str, tuple[str, tuple[str, ...]]]] = {
    "opening": ("Opening a plane", ("fastness", "plane", "opening", "clock", "nodes", "planes")),
    "queues": ("Queues and messages", ("queues", "messages", "receipts")),
    "workers": ("Workers", ("handles.workers",)),
    "tasks": ("Tasks", ("tasks", "task_control")),
    "mail": ("Mail", ("mailboxes", "mail")),
    "agents": ("Agents", ("agents", "encryption")),
    "pushes": ("Pushes", ("ingress",)),
    "leases": ("Leases and locks", ("leases", "locks", "wire.transport")),
    "state": ("State", ("states",)),
    "entities": ("Entities", ("entities", "tiers")),
    "collections": ("Collections", ("collections",)),
    "worlds": ("Worlds", ("worlds", "inboxes", "restores")),
    "workflows": ("Workflows and programs", ("hosts", "runs", "run_timeline", "hosting")),
    "effects": ("Effects and timers", ("effects", "timers")),
    "blobs": ("Blobs and session logs", ("blobs", "activity")),
    "transactions": ("Transactions", ("atomic", "within", "kv", "pairs", "fastness.plane")),
    "administration": ("Administration", ("tokens", "backups", "space", "audit")),
}
_OTHERS: Final = "administration"
_ALIASES: Final = {
    "InboxItem": "One of `DomainEvent`, `EffectReceipt`, `InboundMessage`, `TimerFired` and `Control`.",
    "Reducer": "`Callable[[state, Entry], state]`: a pure function that applies an entry to a world's state.",
    "RowChange": "One of `PutRow`, `DeleteRow` and `DeleteRows`.",
    "RowKey": "`tuple[str | int, ...]`: the key of a row, 1 to 8 texts or integers of 64 bits.",
    "WorkerOutcome": "What became of a message: `acked`, `settled`, `failed`, `deferred`, `cancelled` or `lost`.",
}
_EMBEDDED: Final = "embedded only"
_BOTH: Final = "embedded, remote"


def pages() -> dict[str, str]:
    """The text of each page, by its path below docs/reference without `.md`."""
    names = _names_by_page()
    made = {f"python/{page}": _page(_TITLES[page], _exports(members)) for page, members in names.items()}
    return {"python": _index(names), **made}


_TITLES: Final = {
    **{page: title for page, (title, _) in SECTIONS.items()},
    "errors": "Errors",
    "testing": "Testing",
}


_ERRORS: Final = {each.__name__ for each in CLASSES.values()}


@cache
def _names_by_page() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {page: [] for page in (*SECTIONS, "errors")}
    for name in sorted(fastness.__all__, key=lambda name: (name.removeprefix("Async").lower(), name)):
        found[page_of(name)].append(name)
    found["errors"] += sorted(_ERRORS - set(fastness.__all__))
    found["testing"] = sorted(testing.__all__)
    return {page: sorted(names, key=_is_data) for page, names in found.items() if names}


def _is_data(name: str) -> bool:
    """Whether a name is a struct, which is listed after what returns it."""
    found = exported(name)
    return not inspect.isroutine(found) and not (inspect.isclass(found) and not issubclass(found, msgspec.Struct))


def page_of(name: str) -> str:
    """The page of an exported name of `fastness`."""
    if name in ("FastnessError", "RetryAdvice"):
        return "errors"
    module = fastness._MODULE_OF[name]
    parts = module.split(".")
    for page, (_, modules) in SECTIONS.items():
        if module in modules or ".".join(parts[-2:]) in modules:
            return page
    for page, (_, modules) in SECTIONS.items():
        if parts[-1] in modules or (len(parts) > 1 and parts[1] in modules):
            return page
    return _OTHERS


_MODULE_OF: Final = {
    **dict.fromkeys(testing.__all__, "fastness.testing"),
    **dict.fromkeys(_ERRORS, "fastness.errors"),
    **dict.fromkeys(fastness.__all__, "fastness"),
}


@cache
def _links() -> dict[str, str]:
    """The address of every exported name, from a page of the reference."""
    found = {name: f"{page}.md#{_anchor(name)}" for page, names in _names_by_page().items() for name in names}
    return {name: found[name.removeprefix("Async")] if _is_twin(name) else address for name, address in found.items()}


def _heading(name: str) -> str:
    """The heading of an exported name. A function is written with its module: `Program` and `program` are two names."""
    return f"{_MODULE_OF[name]}.{name}" if inspect.isroutine(exported(name)) else name


def _anchor(name: str) -> str:
    return slug_of(_heading(name))


def _is_twin(name: str) -> bool:
    """Whether a class is the asyncio form of one that is documented."""
    return name.startswith("Async") and name.removeprefix("Async") in _MODULE_OF


def _index(names: dict[str, list[str]]) -> str:
    lines = _head("Python API", "`fastness`, `fastness.errors` and `fastness.testing`")
    about = (
        "These names are the public API; everything else may change. A class whose name starts with `Async` is for "
        "asyncio: it has the same methods, and those that do something are awaited. All handles work in the same way "
        "on an embedded plane (`fastness.open`) and with a server (`fastness.connect`), except where *embedded only* "
        "is written."
    )
    lines += [about, ""]
    for page, members in names.items():
        shown = [name for name in members if not _is_twin(name)]
        lines += [f"## {_TITLES[page]}", "", f"[{_TITLES[page]}](python/{page}.md) has the details.", ""]
        rows = []
        for name in shown:
            twin = f" `Async{name}`" if f"Async{name}" in _MODULE_OF else ""
            rows.append((f"[`{name}`](python/{page}.md#{_anchor(name)}){twin}", _first_sentence(name)))
        lines += _table(("name", "meaning"), rows)
    return _joined(lines)


def _exports(members: list[str]) -> Iterator[str]:
    for name in members:
        if not _is_twin(name):
            yield from _export(name)


def exported(name: str) -> Any:
    """The object of an exported name."""
    return getattr(import_module(_MODULE_OF[name]), name)


def _export(name: str) -> Iterator[str]:
    found = exported(name)
    twin = exported(f"Async{name}") if f"Async{name}" in _MODULE_OF else None
    yield from (f"## `{_heading(name)}`", "")
    if inspect.isroutine(found):
        yield from _function(f"{_MODULE_OF[name]}.{name}", found)
    elif inspect.isclass(found) and issubclass(found, FastnessError):
        yield from _error(name, found)
    elif inspect.isclass(found):
        yield from _class(name, found, twin)
    else:
        yield from (_ALIASES.get(name, _first_line(found)), "")


def _error(name: str, found: type[FastnessError]) -> Iterator[str]:
    bases = [each.__name__ for each in found.__mro__[1:] if issubclass(each, FastnessError)]
    yield from _code(f"class {_MODULE_OF[name]}.{name}({bases[0] if bases else 'Exception'})")
    yield from documentation(found)
    yield f"Code [`{found.code}`](../errors.md#{found.code}), retry `{found.retry}`."
    yield ""
    yield from _types([bases[0]] if bases else [])


def _class(name: str, found: type, twin: type | None) -> Iterator[str]:
    own = f"{_MODULE_OF[name]}.{name}"
    words = [f"class {own}{_constructor(found)}"]
    if twin is not None:
        words.append(f"class {_MODULE_OF[name]}.Async{name}{_constructor(twin)}")
    yield from _code("\n".join(words))
    yield from documentation(found)
    if issubclass(found, Enum):
        yield from _table(("member", "value"), [(f"`{name}.{each.name}`", f"`{each.value!r}`") for each in found])
        return
    fields = _fields(found)
    if fields:
        yield from _table(("field", "type", "default", "meaning"), fields)
    members = list(_members(found))
    rows = [_row(name, member, part, twin) for member, part in members]
    if rows and twin is not None:
        yield from _table((f"`{name}`", f"`Async{name}`", "where", "meaning"), rows)
    elif rows:
        yield from _table(("member", "where", "meaning"), [(row[0], row[2], row[3]) for row in rows])
    for member, part in members:
        if not isinstance(part, property):
            yield from (f"### `{name}.{member}`", "")
            yield from _method(name, member, part, twin)


def _row(name: str, member: str, part: Any, twin: type | None) -> tuple[str, str, str, str]:
    link = f"`{member}`" if isinstance(part, property) else f"[`{member}`](#{slug_of(f'{name}.{member}')})"
    other = "" if twin is None else inspect.getattr_static(twin, member, None)
    return link, "" if twin is None else _asynchronous(member, _plain(other)), where(_plain(other) or part), _line(part)


def _asynchronous(member: str, part: Any) -> str:
    """How the asyncio form of a member is used."""
    if part is None:
        return ""
    if isinstance(part, property):
        return f"`{member}`"
    function = inspect.unwrap(part)
    if inspect.iscoroutinefunction(function):
        return f"`await {member}`"
    if inspect.isasyncgenfunction(function):
        wrapped = function is not part
        return f"`async with {member}`" if wrapped else f"`async for … in {member}`"
    returned = str(inspect.signature(function).return_annotation)
    return f"`async for … in {member}`" if "AsyncIterator" in returned else f"`{member}`"


def where(part: Any) -> str:
    """Whether a member works on an embedded plane only, or with a server, too."""
    function = part.fget if isinstance(part, property) else part
    if not inspect.isfunction(function):
        return _BOTH
    if "NotEmbedded:" in (function.__doc__ or ""):
        return _EMBEDDED
    plain = inspect.unwrap(function)
    used = (plain.__globals__.get(each) for each in plain.__code__.co_names)
    requests = [each for each in used if isinstance(each, type) and issubclass(each, Request) and each is not Request]
    return _EMBEDDED if requests and not any(each.operation.network for each in requests) else _BOTH


def _method(name: str, member: str, part: Any, twin: type | None) -> Iterator[str]:
    words = [f"{_variable(name)}.{member}{signature(part)}"]
    other = None if twin is None else _plain(inspect.getattr_static(twin, member, None))
    if other is not None and not isinstance(other, property):
        is_awaited = _asynchronous(member, other).startswith("`await")
        text = f"{'await ' if is_awaited else ''}{_variable(f'Async{name}')}.{member}"
        is_same = signature(other, returns=False) == signature(part, returns=False) != "()"
        arrow = signature(other).rpartition(" -> ")[2]
        words.append(f"{text}(…) -> {arrow}  # The same arguments." if is_same else f"{text}{signature(other)}")
    yield from _code("\n".join(words))
    yield from _types(re.findall(r"\w+", " ".join(words)), without=name)
    yield from documentation(part)


def _function(path: str, function: Callable[..., Any]) -> Iterator[str]:
    text = f"{'await ' if inspect.iscoroutinefunction(function) else ''}{path}{signature(function)}"
    yield from _code(text)
    yield from _types(re.findall(r"\w+", text))
    yield from documentation(function)


def _types(names: list[str], *, without: str = "") -> Iterator[str]:
    links = _links()
    found = dict.fromkeys(each for each in names if each in links and each[0].isupper() and each != without)
    if found:
        yield from (f"See {', '.join(f'[`{each}`]({links[each]})' for each in found)}.", "")


def _members(found: type) -> Iterator[tuple[str, Any]]:
    """The public methods and properties of a class, with those that it inherits from private classes."""
    seen: set[str] = set()
    for kind in found.__mro__:
        if kind.__module__.partition(".")[0] != "fastness" or (kind is not found and not kind.__name__.startswith("_")):
            continue
        for key, part in vars(kind).items():
            plain = _plain(part)
            if not key.startswith("_") and key not in seen and plain is not None:
                seen.add(key)
                yield key, plain


def _plain(part: Any) -> Any:
    """A function or a property; None for anything else."""
    if isinstance(part, (classmethod, staticmethod)):
        part = part.__func__
    return part if inspect.isfunction(part) or isinstance(part, property) else None


def _fields(found: type) -> list[tuple[str, str, str, str]]:
    if not issubclass(found, msgspec.Struct):
        return []
    comments = _comments(found)
    rows = []
    for field in msgspec.structs.fields(found):
        default = "" if field.default is msgspec.NODEFAULT else f"`{_shown_default(field.default)}`"
        if field.default_factory is not msgspec.NODEFAULT:
            default = f"`{_shown_default(field.default_factory)}()`"
        meaning = description_of(field.type) or comments.get(field.name, "")
        rows.append((f"`{field.name}`", f"`{_annotation(bare(field.type))}`", default, meaning))
    return rows


@cache
def _comments(found: type) -> dict[str, str]:
    """The trailing comments of the fields of a struct and its bases."""
    comments: dict[str, str] = {}
    for kind in reversed(found.__mro__):
        if kind.__module__.partition(".")[0] != "fastness":
            continue
        source = textwrap.dedent(inspect.getsource(kind))
        rows = source.splitlines()
        [tree] = ast.parse(source).body
        assert isinstance(tree, ast.ClassDef)
        for node in tree.body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                _, mark, comment = rows[(node.end_lineno or node.lineno) - 1].partition("  # ")
                comments[node.target.id] = "" if comment.startswith(("type:", "noqa")) else comment if mark else ""
    return comments


def _constructor(found: type) -> str:
    """The parameters of a class that its users create; handles are returned by methods."""
    if issubclass(found, (msgspec.Struct, Enum)) or "__init__" not in vars(found):
        return ""
    text = signature(vars(found)["__init__"], returns=False)
    return "" if "transport" in text.lower() or text == "()" else text


def signature(function: Any, *, returns: bool = True) -> str:
    """The parameters of a function with their types and defaults, and what it returns."""
    found = inspect.signature(function)
    shown = []
    star = False
    for parameter in found.parameters.values():
        if parameter.name in ("self", "cls"):
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not star:
            shown.append("*")
            star = True
        name = parameter.name
        if parameter.kind is parameter.VAR_POSITIONAL:
            name, star = f"*{name}", True
        elif parameter.kind is parameter.VAR_KEYWORD:
            name = f"**{name}"
        text = name if parameter.annotation is parameter.empty else f"{name}: {_annotation(parameter.annotation)}"
        if parameter.default is not parameter.empty:
            text += f" = {_shown_default(parameter.default)}"
        shown.append(text)
    arrow = ""
    if returns and found.return_annotation is not found.empty:
        arrow = f" -> {_annotation(found.return_annotation)}"
    one_line = f"({', '.join(shown)}){arrow}"
    if len(one_line) <= 80:
        return one_line
    return "(\n    " + ",\n    ".join(shown) + f",\n){arrow}"


def _annotation(kind: Any) -> str:
    """A type as it is written in the code, without modules."""
    if typing.get_origin(kind) is typing.Unpack:  # Its own text is not the same in every version of Python.
        return f"Unpack[{_annotation(*typing.get_args(kind))}]"
    text = kind if isinstance(kind, str) else inspect.formatannotation(kind)
    text = re.sub(r"ForwardRef\('([^']*)'\)", r"\1", text)
    text = re.sub(r"(?<![\w'\"])(?:[A-Za-z_]\w*\.)+(?=[A-Za-z_])", "", text)
    return text.replace("NoneType", "None").replace("'", '"') if '"' not in text else text


def _shown_default(default: object) -> str:
    if isinstance(default, Enum):
        return f"{type(default).__name__}.{default.name}"
    return getattr(default, "__name__", None) or repr(default)


def documentation(found: object) -> list[str]:
    """The docstring as Markdown: paragraphs, with arguments and errors as lists."""
    lines: list[str] = []
    links = _links()
    for section in (inspect.getdoc(found) or "").split("\n\n"):
        title, _, rest = section.partition("\n")
        if title in ("Args:", "Raises:"):
            lines += [f"{'Arguments' if title == 'Args:' else 'Raises'}:", ""]
            for names, text in re.findall(r"^    (\w[\w, ]*): (.*(?:\n {8}.*)*)", rest, re.MULTILINE):
                shown = [
                    f"[`{each}`]({links[each]})" if title == "Raises:" and each in links else f"`{each}`"
                    for each in names.split(", ")
                ]
                lines.append(f"- {', '.join(shown)}: {_paragraph(text)}")
            lines.append("")
        elif section.startswith("    ") or "\n    " in section:
            lines += ["```python", inspect.cleandoc(section), "```", ""]
        else:
            lines += [_paragraph(section), ""]
    return lines


def _variable(name: str) -> str:
    """The name of a variable with an object of a class."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()


def _first_sentence(name: str) -> str:
    found = exported(name)
    documented = inspect.isclass(found) or inspect.isroutine(found)
    return _line(found) if documented else _ALIASES.get(name, _first_line(found))


def _first_line(found: object) -> str:
    return " ".join(typing.get_type_hints(found)) if inspect.ismodule(found) else f"`{_annotation(found)}`"


def _line(found: object) -> str:
    return " ".join((inspect.getdoc(found) or "").split("\n\n")[0].split())


def _head(title: str, source: str) -> list[str]:
    made = f"<!-- Generated by tools/make_reference.py from {source}. Change that and run the tool again. -->"
    return [f"# {title}", "", made, ""]


def _page(title: str, lines: Iterator[str]) -> str:
    return _joined([*_head(title, "docstrings and signatures"), *lines])


def _code(text: str) -> list[str]:
    return ["```python", text, "```", ""]


def _table(columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in row) + " |" for row in rows]
    return [*lines, ""]


def _paragraph(text: str) -> str:
    return " ".join(text.split())


def _joined(lines: list[str]) -> str:
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"
