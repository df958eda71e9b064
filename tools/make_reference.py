"""Write docs/reference/ from the code, or check that it is current.

python tools/make_reference.py           write docs/reference/*.md
python tools/make_reference.py --check   exit 1 if a file there differs from what would be written

Each page comes from where the thing itself is: commands from the tree of click, endpoints from the OpenAPI document,
settings from their struct, errors from their classes, limits from limits.py with its comments.
"""

import ast
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import click
import msgspec

from holdfast import errors
from holdfast.cli import exit_codes
from holdfast.cli.commands import global_options
from holdfast.cli.main import root
from holdfast.errors import HoldfastError
from holdfast.server.http.routes import ENDPOINTS
from holdfast.server.openapi import document
from holdfast.server.settings import Settings
from holdfast.wire.problems import status_of

ROOT: Final = Path(__file__).parent.parent
PAGES: Final = ROOT / "docs" / "reference"
_SOURCE: Final = ROOT / "src" / "holdfast"
_SCHEMA: Final = "#/components/schemas/"
OTHER_DOORS: Final = {
    "/v1/stream": "the stream of the Python client: [protocol.md](../protocol.md)",
    "/v1/relay": "mail for agents of any language: [relay.md](../relay.md)",
    "/openapi.json": "this page, for programs",
    "/docs": "this page, for people",
    "/healthz": "whether the process lives",
    "/readyz": "whether the plane answers",
    "/metrics": "Prometheus: [metrics.md](../metrics.md)",
    "/console": "the web console: [console.md](../console.md)",
}
_PARAMETERS: Final = {  # Those that mean the same everywhere, and so say nothing of themselves.
    "universe": "The tenant; `main` if nothing is said.",
    "tier": "The promise that the acknowledgement is to carry.",
    "limit": "At most so many.",
    "after": "The first one behind this.",
}
_RANGES: Final = ((("ge", "minimum"), "≥ {}"), (("gt", "exclusiveMinimum"), "> {}"), (("le", "maximum"), "≤ {}"))


def main() -> None:
    pages = {
        "commands": commands(),
        "endpoints": endpoints(),
        "settings": settings(),
        "errors": errors_page(),
        "limits": limits(),
    }
    if "--check" in sys.argv[1:]:
        stale = [name for name, text in pages.items() if _read(PAGES / f"{name}.md") != text]
        if stale:
            print(f"docs/reference is not current ({', '.join(stale)}); run: python tools/make_reference.py")
            sys.exit(1)
        return
    PAGES.mkdir(parents=True, exist_ok=True)
    for name, text in pages.items():
        (PAGES / f"{name}.md").write_text(text)


def commands() -> str:
    """Every command, its arguments, options and examples."""
    lines = _head("Commands", "the tree of commands", "`holdfast COMMAND --help` says the same in a terminal.")
    lines += ["## Options of every command", ""]
    shown = [option for option in global_options(hidden=False) if isinstance(option, click.Option)]
    lines += _options(shown)
    lines += ["## Exit codes", "", *_table(("code", "meaning"), [(str(c), m) for c, m in exit_codes.MEANINGS.items()])]
    context = click.Context(root, info_name="holdfast")
    for name in root.list_commands(context):
        command = root.get_command(context, name)
        if command is not None and not command.hidden:
            lines += _command(command, click.Context(command, info_name=name, parent=context))
    return _page(lines)


def _command(command: click.Command, context: click.Context) -> Iterator[str]:
    depth = context.command_path.count(" ")
    yield f"{'#' * min(depth + 1, 4)} {context.command_path}"
    yield ""
    yield from (_paragraph(part) for part in (command.help or "").split("\n\n"))
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            if below is not None and not below.hidden:
                yield from _command(below, click.Context(below, info_name=name, parent=context))
        return
    words = [piece for parameter in command.params for piece in _usage(parameter, context)]
    yield from (f"    {' '.join([context.command_path, *words])}", "")
    everywhere = {option.opts[0] for option in global_options(hidden=False)}
    own = [
        option
        for option in command.params
        if isinstance(option, click.Option) and not option.hidden and option.opts[0] not in everywhere - {"--objects"}
    ]
    yield from _options([option for option in own if option.name != "global_objects"])
    examples = getattr(command, "examples", ())
    if examples:
        yield from ("For example:", "", *(f"    {example}" for example in examples), "")


def _usage(parameter: click.Parameter, context: click.Context) -> Iterator[str]:
    if isinstance(parameter, click.Argument):
        yield parameter.make_metavar(context)


def _options(options: Iterable[click.Option]) -> list[str]:
    rows = []
    for option in options:
        names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
        kind = "" if option.is_flag else (option.metavar or _kind_of_option(option))
        rows.append((f"{names} {kind}".strip(), option.help or ""))
    return _table(("option", "meaning"), rows) if rows else []


def _kind_of_option(option: click.Option) -> str:
    if isinstance(option.type, click.Choice):
        return " or ".join(map(str, option.type.choices))
    return option.type.name.upper()


def endpoints() -> str:
    """Every endpoint with what it takes and gives, and every schema that they name."""
    spoken = document(ENDPOINTS)
    lines = _head(
        "Endpoints",
        "the OpenAPI document",
        "A server has the same at `/openapi.json`, and at `/docs` for people. Errors are problems (RFC 9457); "
        "[errors.md](errors.md) has their codes, and [protocol.md](../protocol.md) what holds for all calls.",
    )
    tags = {tag["name"]: tag["description"] for tag in spoken["tags"]}
    by_tag: dict[str, list[tuple[str, str, dict[str, Any]]]] = {name: [] for name in tags}
    for path, methods in spoken["paths"].items():
        for method, operation in methods.items():
            by_tag[operation["tags"][0]].append((method.upper(), path, operation))
    common = spoken["components"]["parameters"]
    lines += ["## What every call takes", "", *_parameters(common.values())]
    for tag, operations in by_tag.items():
        lines += [f"## {tag.capitalize()}", "", tags[tag], ""]
        for method, path, operation in operations:
            lines += _operation(method, path, operation)
    lines += ["## Other doors", "", *_other_doors()]
    lines += ["## Schemas", ""]
    for name, schema in spoken["components"]["schemas"].items():
        lines += _schema(name, schema)
    return _page(lines)


def _operation(method: str, path: str, operation: Mapping[str, Any]) -> list[str]:
    lines = [f"### `{method} {path}`", "", f"{operation['summary']}.", ""]
    own = [parameter for parameter in operation.get("parameters", ()) if "$ref" not in parameter]
    lines += _parameters(own)
    taken = _contents(operation.get("requestBody", {}))
    given = [
        f"{status}: {_contents(answer) or answer.get('description', '')}"
        for status, answer in operation["responses"].items()
        if status != "default"
    ]
    if taken:
        lines += [f"Takes {taken}.", ""]
        for content in operation["requestBody"]["content"].values():
            if "properties" in content.get("schema", {}):  # A body that has no name elsewhere.
                lines += _fields(content["schema"])
    lines += [f"Answers {'; '.join(each.rstrip('.') for each in given)}.", ""]
    return lines


def _contents(body: Mapping[str, Any]) -> str:
    by_kind: dict[str, list[str]] = {}
    for media, content in body.get("content", {}).items():
        by_kind.setdefault(_type(content.get("schema", {})), []).append(f"`{media}`")
    return ", or ".join(f"{' or '.join(media)}: {kind}" for kind, media in by_kind.items())


def _parameters(parameters: Iterable[Mapping[str, Any]]) -> list[str]:
    rows = [
        (
            f"`{each['name']}`{' (required)' if each.get('required') else ''}",
            each["in"],
            _type(each.get("schema", {})),
            each.get("description") or _PARAMETERS.get(each["name"], ""),
        )
        for each in parameters
    ]
    return _table(("name", "in", "type", "meaning"), rows) if rows else []


def _other_doors() -> list[str]:
    return _table(("path", "what it is"), [(f"`{path}`", about) for path, about in OTHER_DOORS.items()])


def _schema(name: str, schema: Mapping[str, Any]) -> list[str]:
    lines = [f"### {name}", ""]
    if schema.get("description"):
        lines += [schema["description"], ""]
    if schema.get("properties"):
        return lines + _fields(schema)
    return [*lines, _type({key: value for key, value in schema.items() if key != "description"}), ""]


def _fields(schema: Mapping[str, Any]) -> list[str]:
    required = set(schema.get("required", ()))
    rows = [
        (f"`{field}`{' (required)' if field in required else ''}", _type(kind), _default(kind))
        for field, kind in schema["properties"].items()
    ]
    return _table(("field", "type", "default"), rows)


def _default(kind: Mapping[str, Any]) -> str:
    return f"`{msgspec.json.encode(kind['default']).decode()}`" if "default" in kind else ""


def _type(schema: Mapping[str, Any]) -> str:
    """A JSON schema in words."""
    if "$ref" in schema:
        name = schema["$ref"].removeprefix(_SCHEMA)
        return f"[{name}](#{name.lower()})"
    for word in ("anyOf", "oneOf"):
        if word in schema:
            return " or ".join(dict.fromkeys(_type(each) for each in schema[word]))
    if "enum" in schema:
        return " or ".join(f"`{value}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    kind = schema.get("type")
    if kind == "array":
        parts = [*schema.get("prefixItems", ()), schema.get("items")]
        return "list of " + (", ".join(_type(each) for each in parts if isinstance(each, dict)) or "anything")
    if kind == "object":
        return str(schema.get("title", "object"))
    bounds = [words.format(f"{schema[name]:,}") for (_, name), words in _RANGES if name in schema]
    if kind == "string" and "maxLength" in schema:
        bounds.append(f"at most {schema['maxLength']} characters")
    if schema.get("format") == "binary" or schema.get("contentEncoding") == "base64":
        return "bytes" if schema.get("format") == "binary" else "base64"
    name = {"string": "text", None: "anything"}.get(kind, str(kind))
    return f"{name} ({', '.join(bounds)})" if bounds else name


def settings() -> str:
    """Every setting of a server, its three spellings and what its comment says."""
    lines = _head(
        "Settings",
        "the struct of settings",
        "Of `holdfast serve`: a TOML file (`--config`, or `HOLDFAST_CONFIG`), then the environment, then flags; what "
        "comes later decides. `tls_cert` is also `cert` in a table `[tls]`.",
    )
    comments = _comments(_SOURCE / "server" / "settings.py", "Settings")
    rows = []
    serve = root.get_command(click.Context(root), "serve")
    assert serve is not None
    flags = {option.name: option for option in serve.params if isinstance(option, click.Option)}
    for field in msgspec.structs.fields(Settings):
        default = "" if field.default is None else f"`{msgspec.json.encode(field.default).decode()}`"
        option = flags.get(field.name)
        names = f"`{field.name}` `HOLDFAST_{field.name.upper()}`" + (f" `{option.opts[0]}`" if option else "")
        kind = _type(msgspec.json.schema(field.type)).replace(" or null", "")
        help = re.sub(r"\s*\[default:.*", "", (option and option.help) or "")
        rows.append((names, kind, default, comments[field.name] or help))
    lines += _table(("setting", "type", "default", "meaning"), rows)
    return _page(lines)


def errors_page() -> str:
    """Every error: its code, what to do about it, and how it looks over HTTP and to a shell."""
    lines = _head(
        "Errors",
        "the classes of errors",
        "Every error is a `holdfast.HoldfastError`. `code` and `retry` are API; the message is for people, and says "
        "what to do next. Over HTTP it is a problem (RFC 9457) with this status; commands exit with this code.",
    )
    lines += ["## What `retry` says", ""]
    lines += _table(
        ("retry", "what a caller may do"),
        [
            ("`never`", "The same request will fail again; change it."),
            ("`refresh`", "Read the current state, then decide."),
            ("`later`", "The same request may succeed after a pause."),
            ("`idempotent`", "It may have happened; repeat it only with an idempotency key, or after a look."),
        ],
    )
    families = [each for each in _classes() if each.__base__ in (HoldfastError, Exception)]
    for family in families:
        members = [each for each in _classes() if each is family or family in each.__mro__[1:]]
        if family is HoldfastError:
            members = [family]
        lines += [f"## {family.__name__}", ""]
        rows = []
        for each in members:
            blank = each.__new__(each)
            row = (f"`{each.code}`", each.__name__, each.retry, str(status_of(blank)), str(exit_codes.code_of(blank)))
            rows.append((*row, _sentence(each.__doc__)))
        lines += _table(("code", "class", "retry", "HTTP", "exit", "meaning"), rows)
    return _page(lines)


def _classes() -> list[type[HoldfastError]]:
    return [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, HoldfastError)]


def limits() -> str:
    """Every limit, its value, and its reason."""
    lines = _head(
        "Limits",
        "`src/holdfast/limits.py`",
        "Crossing one is a typed error that names it, and nothing is written. Numbers are bytes, seconds or counts, as "
        "their names say.",
    )
    section: list[tuple[str, str, str]] = []
    for line in (_SOURCE / "limits.py").read_text().splitlines():
        if line.startswith("# "):
            lines += [*_table(("limit", "value", "why"), section)] if section else []
            section = []
            lines += [f"## {line[2:].rstrip('.')}", ""]
        elif found := re.fullmatch(r"(\w+): Final = (.+?)(?:  # (.*))?", line):
            name, value, why = found.groups()
            section.append((f"`{name}`", f"{_number(value)}", why or ""))
    lines += _table(("limit", "value", "why"), section)
    return _page(lines)


def _number(text: str) -> str:
    value: Any = eval(text, {"__builtins__": {}})  # Only the arithmetic of our own constants.
    return f"{value:,}"


def _comments(path: Path, struct: str) -> dict[str, str]:
    """The comments behind the fields of a struct."""
    source = path.read_text()
    [found] = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == struct]
    rows = source.splitlines()
    comments = {}
    for node in found.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            _, mark, comment = rows[(node.end_lineno or node.lineno) - 1].partition("  # ")
            comments[node.target.id] = comment if mark else ""
    return comments


def _head(title: str, source: str, about: str) -> list[str]:
    made = f"<!-- Made by tools/make_reference.py from {source}. Change that, then run it again. -->"
    return [f"# {title}", "", made, "", about, ""]


def _table(columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in row) + " |" for row in rows]
    return [*lines, ""]


def _paragraph(text: str) -> str:
    return " ".join(text.split()) + "\n"


def _sentence(text: str | None) -> str:
    return " ".join((text or "").split("\n\n")[0].split())


def _page(lines: Iterable[str]) -> str:
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


if __name__ == "__main__":
    main()
