"""Generate docs/reference/ from the code, or check that it is up to date.

python tools/make_reference.py           write docs/reference/*.md
python tools/make_reference.py --check   exit 1 if a file there differs from what would be written

Commands come from the click command tree, endpoints from the OpenAPI document, settings from their struct, errors from
their classes, limits from limits.py with its comments, and the Python API from docstrings and signatures.
"""

import ast
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import click
import msgspec

from fastness.cli import exit_codes
from fastness.cli.commands import global_options
from fastness.cli.main import root
from fastness.errors import CLASSES, FastnessError
from fastness.remedies import OTHER_CODES, REMEDIES
from fastness.server.http.routes import ENDPOINTS
from fastness.server.openapi import document
from fastness.server.settings import Settings
from fastness.wire.problems import status_of

sys.path.insert(0, str(Path(__file__).parent))  # Tests run this file from elsewhere.
import python_reference
from check_links import slug_of

ROOT: Final = Path(__file__).parent.parent
PAGES: Final = ROOT / "docs" / "reference"
_SOURCE: Final = ROOT / "src" / "fastness"
_SCHEMA: Final = "#/components/schemas/"
OTHER_ENDPOINTS: Final = {
    "/v1/stream": "the WebSocket stream for many concurrent calls: [protocol.md](../protocol.md)",
    "/v1/relay": "the WebSocket relay for agents' mail: [relay.md](../relay.md)",
    "/mcp": "the Model Context Protocol: [serve agents with MCP](../how-to/mcp.md)",
    "/.well-known/oauth-protected-resource": "which tokens `/mcp` accepts (RFC 9728); also with `/mcp` appended",
    "/openapi.json": "the OpenAPI document",
    "/docs": "the OpenAPI document in a browser",
    "/docs/errors": "every error code with its cause and remedy; `/docs/errors/CODE` has one",
    "/healthz": "liveness check",
    "/readyz": "readiness check",
    "/metrics": "Prometheus metrics: [metrics.md](../metrics.md)",
    "/console": "the web console: [console.md](../console.md)",
}
_PARAMETERS: Final = {  # Parameters with one meaning everywhere, which have no description of their own.
    "universe": "The tenant; default: `main`.",
    "tier": "The durability of the acknowledgement: `critical` or `important`.",
    "limit": "The maximum number of items.",
    "after": "Start after this item.",
    "wait_seconds": "How long to wait; the server waits for 20 s at most.",
}
_RANGES: Final = ((("ge", "minimum"), "≥ {}"), (("gt", "exclusiveMinimum"), "> {}"), (("le", "maximum"), "≤ {}"))


def main() -> None:
    pages = {
        "commands": commands(),
        "endpoints": endpoints(),
        "settings": settings(),
        "errors": errors_page(),
        "limits": limits(),
        **python_reference.pages(),
    }
    if "--check" in sys.argv[1:]:
        stale = [name for name, text in pages.items() if _read(PAGES / f"{name}.md") != text]
        stale += [name for name in _written() if name not in pages]
        if stale:
            print(f"docs/reference is out of date ({', '.join(stale)}); run: python tools/make_reference.py")
            sys.exit(1)
        return
    PAGES.mkdir(parents=True, exist_ok=True)
    for name in _written() - pages.keys():
        (PAGES / f"{name}.md").unlink()
    for name, text in pages.items():
        (PAGES / f"{name}.md").parent.mkdir(exist_ok=True)
        (PAGES / f"{name}.md").write_text(text)


def _written() -> set[str]:
    """The names of the pages that exist."""
    return {str(page.relative_to(PAGES).with_suffix("")) for page in PAGES.rglob("*.md")}


def commands() -> str:
    """Every command, its arguments, options and examples."""
    lines = _head("Commands", "the command tree", "`fastness COMMAND --help` shows the same in a terminal.")
    lines += ["## Global options", ""]
    shown = [option for option in global_options(hidden=False) if isinstance(option, click.Option)]
    lines += _options(shown)
    lines += ["## Exit codes", "", *_table(("code", "meaning"), [(str(c), m) for c, m in exit_codes.MEANINGS.items()])]
    context = click.Context(root, info_name="fastness")
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
    if not isinstance(command, click.Group):
        yield from _use(command, context)
        return
    if command.invoke_without_command:
        yield from _use(command, context)
    for name in command.list_commands(context):
        subcommand = command.get_command(context, name)
        if subcommand is not None and not subcommand.hidden:
            yield from _command(subcommand, click.Context(subcommand, info_name=name, parent=context))


def _use(command: click.Command, context: click.Context) -> Iterator[str]:
    """The arguments, options, aliases and examples of a command that can be run."""
    words = [piece for parameter in command.params for piece in _usage(parameter, context)]
    yield from (f"    {' '.join([context.command_path, *words])}", "")
    # The values of global options are not passed to a command.
    own = [each for each in command.params if isinstance(each, click.Option) and not each.hidden and each.expose_value]
    yield from _options([option for option in own if option.name != "global_objects"])
    aliases = getattr(command, "aliases", ())
    if aliases and not isinstance(command, click.Group):  # Those of a group are of its commands.
        yield from (f"Aliases: {', '.join(f'`{alias}`' for alias in aliases)}.", "")
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
    """Every endpoint with its request and responses, and every schema."""
    openapi = document(ENDPOINTS)
    lines = _head(
        "Endpoints",
        "the OpenAPI document",
        "A server has the same at `/openapi.json`, and at `/docs` for a browser. Errors are problems (RFC 9457); "
        "[errors.md](errors.md) lists their codes, and [protocol.md](../protocol.md) has what is common to all calls.",
    )
    tags = {tag["name"]: tag["description"] for tag in openapi["tags"]}
    by_tag: dict[str, list[tuple[str, str, dict[str, Any]]]] = {name: [] for name in tags}
    for path, methods in openapi["paths"].items():
        for method, operation in methods.items():
            by_tag[operation["tags"][0]].append((method.upper(), path, operation))
    common = openapi["components"]["parameters"]
    lines += ["## Common parameters", "", *_parameters(common.values())]
    for tag, operations in by_tag.items():
        lines += [f"## {tag.capitalize()}", "", tags[tag], ""]
        for method, path, operation in operations:
            lines += _operation(method, path, operation)
    lines += ["## Other endpoints", "", *_other_endpoints()]
    lines += ["## Schemas", ""]
    for name, schema in openapi["components"]["schemas"].items():
        lines += _schema(name, schema)
    return _page(lines)


def _operation(method: str, path: str, operation: Mapping[str, Any]) -> list[str]:
    lines = [f"### `{method} {path}`", "", operation["summary"], ""]
    own = [parameter for parameter in operation.get("parameters", ()) if "$ref" not in parameter]
    lines += _parameters(own)
    request_body = _contents(operation.get("requestBody", {}))
    responses = [
        f"{status}: {_contents(answer) or answer.get('description', '')}"
        for status, answer in operation["responses"].items()
        if status != "default"
    ]
    if request_body:
        lines += [f"Takes {request_body}.", ""]
        for content in operation["requestBody"]["content"].values():
            if "properties" in content.get("schema", {}):  # An inline schema.
                lines += _fields(content["schema"])
    lines += [f"Answers {'; '.join(each.rstrip('.') for each in responses)}.", ""]
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


def _other_endpoints() -> list[str]:
    return _table(("path", "purpose"), [(f"`{path}`", about) for path, about in OTHER_ENDPOINTS.items()])


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
        (
            f"`{field}`{' (required)' if field in required else ''}",
            _type(kind),
            _default(kind),
            kind.get("description", ""),
        )
        for field, kind in schema["properties"].items()
    ]
    if not any(meaning for *_, meaning in rows):
        return _table(("field", "type", "default"), [row[:3] for row in rows])
    return _table(("field", "type", "default", "meaning"), rows)


def _default(kind: Mapping[str, Any]) -> str:
    return f"`{msgspec.json.encode(kind['default']).decode()}`" if "default" in kind else ""


def _type(schema: Mapping[str, Any]) -> str:
    """A JSON schema as text."""
    if "$ref" in schema:
        name = schema["$ref"].removeprefix(_SCHEMA)
        return f"[{name}](#{slug_of(name)})"
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
    bounds = [words.format(_bound(schema[name])) for (_, name), words in _RANGES if name in schema]
    if kind == "string" and "maxLength" in schema:
        bounds.append(f"at most {schema['maxLength']} characters")
    if schema.get("format") == "binary" or schema.get("contentEncoding") == "base64":
        return "bytes" if schema.get("format") == "binary" else "base64"
    name = {"string": "text", None: "anything"}.get(kind, str(kind))
    return f"{name} ({', '.join(bounds)})" if bounds else name


def _bound(bound: float) -> str:
    return f"{bound:,.0f}" if bound == int(bound) else str(bound)


def settings() -> str:
    """Every setting of a server: its names in the file, the environment and the flags, and its comment."""
    lines = _head(
        "Settings",
        "the settings struct",
        "`fastness serve` reads a TOML file (`--config`, or `FASTNESS_CONFIG`), then the environment, then flags; "
        "later sources override earlier ones. `tls_cert` can also be written as `cert` in a table `[tls]`.",
    )
    comments = _comments(_SOURCE / "server" / "settings.py", "Settings")
    rows = []
    serve = root.get_command(click.Context(root), "serve")
    assert serve is not None
    flags = {option.name: option for option in serve.params if isinstance(option, click.Option)}
    for field in msgspec.structs.fields(Settings):
        default = "" if field.default is None else f"`{msgspec.json.encode(field.default).decode()}`"
        option = flags.get(field.name)
        names = f"`{field.name}` `FASTNESS_{field.name.upper()}`" + (f" `{option.opts[0]}`" if option else "")
        kind = _type(msgspec.json.schema(field.type)).replace(" or null", "")
        help = re.sub(r"\s*\[default:.*", "", (option and option.help) or "")
        rows.append((names, kind, default, comments[field.name] or help))
    lines += _table(("setting", "type", "default", "meaning"), rows)
    return _page(lines)


def errors_page() -> str:
    """Every error: its code, whether to retry, its HTTP status and its exit code."""
    lines = _head(
        "Errors",
        "`src/fastness/errors.py` and `src/fastness/remedies.py`",
        "Every error is a `fastness.FastnessError`. `code` and `retry` are stable; the message is for people, and says "
        "what to do next. Over HTTP an error is a problem (RFC 9457) with this status; commands exit with this code. "
        "[Causes and remedies](#causes-and-remedies) has a section for each code. `fastness explain CODE` prints it, a "
        "server has it at `/docs/errors/CODE`, and `error.help` names the command.",
    )
    lines += ["## Values of `retry`", ""]
    lines += _table(
        ("retry", "what to do"),
        [
            ("`never`", "The same request will fail again; change it."),
            ("`refresh`", "Read the current state, then decide."),
            ("`later`", "The same request may succeed after a pause."),
            (
                "`idempotent`",
                "It may have happened; repeat it only with an idempotency key, or after reading the current state.",
            ),
        ],
    )
    classes = list(CLASSES.values())
    for base_class in [each for each in classes if each.__base__ in (FastnessError, Exception)]:
        members = [each for each in classes if issubclass(each, base_class)]
        if base_class is FastnessError:
            members = [base_class]
        lines += [f"## {base_class.__name__}", ""]
        rows = []
        for each in members:
            blank = each.__new__(each)
            row = (
                f"[`{each.code}`](#{each.code})",
                each.__name__,
                each.retry,
                str(status_of(blank)),
                str(exit_codes.code_of(blank)),
            )
            rows.append((*row, _sentence(each.__doc__)))
        lines += _table(("code", "class", "retry", "HTTP", "exit", "meaning"), rows)
    lines += ["## Codes without a class", ""]
    lines += [
        "Answers of the HTTP API to requests that it refuses before an operation starts, and of the command line.",
        "",
    ]
    others = [(f"[`{code}`](#{code})", str(found.status or ""), found.cause) for code, found in OTHER_CODES.items()]
    lines += _table(("code", "HTTP", "cause"), others)
    lines += ["## Causes and remedies", ""]
    for code, remedy in REMEDIES.items():
        lines += [f"### `{code}`", "", f"**Cause.** {remedy.cause}", "", f"**Remedy.** {remedy.remedy}", ""]
        if remedy.see:
            lines += [f"See {', '.join(_page_link(page) for page in remedy.see)}.", ""]
    return _page(lines)


def _page_link(page: str) -> str:
    """A link to a page of docs/ from docs/reference/, with the page's title."""
    title = _read(ROOT / "docs" / page).partition("\n")[0].removeprefix("# ") or page  # check_links.py finds these.
    return f"[{title}]({os.path.relpath(page, 'reference')})"


def limits() -> str:
    """Every limit, its value and its reason."""
    lines = _head(
        "Limits",
        "`src/fastness/limits.py`",
        "A request that exceeds a limit raises a typed error that names it, and nothing is written. Names include "
        "their units.",
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
    value: Any = eval(text, {"__builtins__": {}})  # Evaluates only the arithmetic of constants in limits.py.
    return f"{value:,}" if isinstance(value, int | float) else str(value)


def _comments(path: Path, struct: str) -> dict[str, str]:
    """The trailing comments of a struct's fields."""
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
    made = f"<!-- Generated by tools/make_reference.py from {source}. Change that and run the tool again. -->"
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
