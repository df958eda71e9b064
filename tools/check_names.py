"""Check that the names of Fastness in the documents exist, as the code has them now.

python tools/check_names.py    exit 1 and name each one that does not exist

commands     `fastness queue put --delay 5`, in prose and in shell blocks; `--delay` by itself
targets      `make test`
variables    `FASTNESS_URL`
settings     `log_format = "json"`, the keys of a TOML block, the setting `log_format`
metrics      `fastness_calls_in_flight`: those of docs/metrics.md, which a test compares with the registry
endpoints    `GET /v1/leases/{key}`

tools/check_documents.py checks names of Python.
"""

import re
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Final

import click
import msgspec

from fastness.cli.commands import CommandGroup
from fastness.cli.main import root
from fastness.server.http.routes import ENDPOINTS
from fastness.server.settings import Settings

sys.path.insert(0, str(Path(__file__).parent))  # Tests run this file from elsewhere.
from check_links import ROOT, documents, prose_lines

# The changelog has names of earlier versions, the other page names of other products: tests/unit/test_coming_from.py.
_LEFT_OUT: Final = ("CHANGELOG.md", "docs/coming-from/others.md")
_SHELL: Final = ("", "sh", "console", "ini", "yaml")
_BLOCK: Final = re.compile(r"^```(\w*).*?\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_INDENTED: Final = re.compile(r"(?:^ {4}.*\n?)+", re.MULTILINE)
_SPAN: Final = re.compile(r"(`+)(.+?)(?<!`)\1(?!`)", re.DOTALL)
_WORD: Final = re.compile(r"'[^']*'|\"[^\"]*\"|\$\(|[|&;()<>]+|#.*|[^\s|&;()<>'\"]+")
_SEPARATOR: Final = re.compile(r"[|&;()<>]+|\$\(|#.*")
_BEFORE: Final = re.compile(r"[|&;(]+|\$\(|\w+=\S*|\$|!|exec|nice|sudo|if|until|while|do|then")  # A command follows.
_TOML: Final = re.compile(r"(\w+) = (?:\"[^\"]*\"|[\d.]+|true|false|\[.*\])")
_SETTING: Final = re.compile(r"\bsettings? `(\w+)`|^\| `(\w+)` \| `--")
_ENDPOINT: Final = re.compile(r"\b(GET|PUT|POST|DELETE|PATCH) +(?:https?://[\w.:]+)?(/v1(?:/[\w.:{}<>$-]*[\w}>])+)")
_WEBSOCKETS: Final = ("/v1/stream", "/v1/relay")


def main() -> None:
    problems = [f"{page.relative_to(ROOT)}:{problem}" for page in pages() for problem in problems_of(page.read_text())]
    print(*problems, sep="\n", end="\n" if problems else "")
    sys.exit(1 if problems else 0)


def pages() -> list[Path]:
    """The documents that are checked."""
    return [page for page in documents(ROOT) if not str(page.relative_to(ROOT)).startswith(_LEFT_OUT)]


def problems_of(text: str) -> Iterator[str]:
    """The names in a document that do not exist, as `12: ...`."""
    for number, language, code in codes(text):
        for find in _FINDERS:
            yield from (f"{number}: {problem}" for problem in find(language, code))
    for number, line in prose_lines(text):
        named = (found[1] or found[2] for found in _SETTING.finditer(line))
        yield from (f"{number}: no setting is called {name}" for name in named if name not in _SETTINGS)


def codes(text: str) -> Iterator[tuple[int, str, str]]:
    """The code of a document: its line, its language (`inline` in prose), and itself."""
    for found in _BLOCK.finditer(text):
        yield text.count("\n", 0, found.start(2)) + 1, found[1], found[2]
    prose = dict(prose_lines(text))
    plain = "\n".join(prose.get(number, "") for number in range(1, text.count("\n") + 2))
    for found in _INDENTED.finditer(plain):
        yield plain.count("\n", 0, found.start()) + 1, "", found[0]
    for paragraph in re.finditer(r"(?:.+\n?)+", plain):
        for found in _SPAN.finditer(paragraph[0]):
            number = plain.count("\n", 0, paragraph.start() + found.start()) + 1
            yield number, "inline", found[2].replace("\n", " ")


def commands(language: str, code: str) -> Iterator[str]:
    if language == "inline" and re.match(r"--[a-z]", code):
        if _name_of(code) not in options():
            yield f"no command has the option {_name_of(code)}"
    elif language in ("inline", *_SHELL):
        named = [code.split()] if language == "inline" and re.match(r"[a-z-]+ .", code) else []
        short = [words for words in named if _exists(words[0])]  # `queue put` without the name of the program.
        yield from filter(None, map(command_problem, [*calls(code), *short]))


def calls(code: str) -> Iterator[list[str]]:
    """The words after `fastness` of each call in a shell's code."""
    code = re.sub(r"\"(\$\([^\"]*?\))\"", r"\1", code.replace("\\\n", " "))  # "$(fastness …)" has a call, too.
    for line in code.splitlines():
        words = _WORD.findall(line)
        for at, word in enumerate(words):
            called = words[at + 1 :]
            # Behind other words, as in `docker run fastness serve`, it is a call if a command follows.
            begins = at == 0 or _BEFORE.fullmatch(words[at - 1])
            if word.rpartition("/")[2] == "fastness" and called and (begins or _exists(called[0])):
                end = next((n for n, each in enumerate(called) if _SEPARATOR.fullmatch(each)), len(called))
                yield called[:end]


def _exists(command: str) -> bool:
    return root.get_command(click.Context(root), command) is not None


def command_problem(words: list[str]) -> str:
    """Why `fastness WORDS…` is not a command with these options; empty if it is one."""
    command: click.Command = root
    context = click.Context(root, info_name="fastness")
    values = 0  # How many of the next words are the value of an option.
    for word in words:
        if word == "--":
            break
        if values:
            values -= 1
        elif word.startswith("-") and word != "-":
            known = {name: each for each in command.get_params(context) for name in (*each.opts, *each.secondary_opts)}
            option = known.get(_name_of(word))
            if option is None:
                return f"`{context.command_path}` has no option {_name_of(word)}"
            flag = isinstance(option, click.Option) and (option.is_flag or option.count)
            values = 0 if flag or "=" in word else option.nargs
        elif isinstance(command, click.Group):
            if not re.fullmatch(r"[a-z][a-z-]*", word):
                break  # A placeholder, such as `COMMAND`.
            found = command.get_command(context, word)
            if found is None:
                # A group that parses its arguments itself, `push`, has a command that need not be named.
                own = type(command).parse_args is not CommandGroup.parse_args
                return "" if own else f"`{context.command_path}` has no command {word}"
            command, context = found, click.Context(found, info_name=word, parent=context)
    return ""


def _name_of(option: str) -> str:
    return re.split(r"[=\s,/]", option)[0].rstrip("….")


@cache
def options() -> frozenset[str]:
    """The options of all commands, and of the tools of this repository."""
    found: set[str] = set()

    def walk(command: click.Command, context: click.Context) -> None:
        for each in command.get_params(context):
            found.update(each.opts, each.secondary_opts)
        if isinstance(command, click.Group):
            for name in command.list_commands(context):
                child = command.get_command(context, name)
                assert child is not None
                walk(child, click.Context(child, info_name=name, parent=context))

    walk(root, click.Context(root, info_name="fastness"))
    for folder in ("tools", "benches", "tests"):
        for file in (ROOT / folder).glob("*.py"):
            found.update(re.findall(r"\"(--[a-z-]+)\"", file.read_text()))
    return frozenset(found)


def targets(language: str, code: str) -> Iterator[str]:
    if language in ("inline", *_SHELL):
        for name in re.findall(r"(?:^ *|[;&] *)make ([a-z-]+)", code, re.MULTILINE):
            if name not in known_targets():
                yield f"no target of make is called {name}"


@cache
def known_targets() -> frozenset[str]:
    return frozenset(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def variables(language: str, code: str) -> Iterator[str]:
    del language
    for name in re.findall(r"\bFASTNESS_[A-Z_]*[A-Z]\b", code):
        if name not in known_variables():
            yield f"no variable is called {name}"


@cache
def known_variables() -> frozenset[str]:
    """The variables of the settings, and those in the code."""
    files = [*(ROOT / "src").rglob("*.py"), *(each for each in (ROOT / "deploy").rglob("*") if each.is_file())]
    named = {name for file in files for name in re.findall(r"FASTNESS_[A-Z_]+", file.read_text(errors="ignore"))}
    return frozenset(named | {f"FASTNESS_{name.upper()}" for name in _SETTINGS})


def settings(language: str, code: str) -> Iterator[str]:
    lines = code.partition("\n[")[0].splitlines() if language == "toml" else [code] if language == "inline" else []
    for found in map(_TOML.match, lines):
        if found and found[1] not in _SETTINGS and not code.startswith("["):
            yield f"no setting is called {found[1]}"


def metrics(language: str, code: str) -> Iterator[str]:
    del language
    for name in re.findall(r"\bfastness(?:_[a-z]+){2,}\b", code):
        if not known_metrics() & {name, re.sub(r"_(?:bucket|sum|count)$", "", name)}:
            yield f"no metric is called {name}"


@cache
def known_metrics() -> frozenset[str]:
    return frozenset(re.findall(r"`(fastness_\w+)`", (ROOT / "docs" / "metrics.md").read_text()))


def endpoints(language: str, code: str) -> Iterator[str]:
    for method, path in _ENDPOINT.findall(code):
        if path not in _WEBSOCKETS and not any(each.method == method and _fits(path, each.path) for each in ENDPOINTS):
            yield f"no endpoint is called {method} {path}"
    if language == "inline" and re.fullmatch(r"/v1(?:/[\w{}<>-]+)+/?…?", code):
        path = code.rstrip("/…")
        if path not in _WEBSOCKETS and not any(_begins(path, each.path) for each in ENDPOINTS):
            yield f"no endpoint begins with {path}"


def _begins(path: str, pattern: str) -> bool:
    parts, known = path.split("/"), pattern.split("/")
    fits = all(part in ("", each) or each.startswith("{") for part, each in zip(parts, known, strict=False))
    return fits and len(parts) <= len(known)


def _fits(path: str, pattern: str) -> bool:
    any_path = re.sub(r"\{\w+:path\}", ".+", pattern)
    return re.fullmatch(re.sub(r"\{\w+\}", "[^/]+", any_path), path) is not None


_SETTINGS: Final = frozenset(each.name for each in msgspec.structs.fields(Settings))
_FINDERS: Final[tuple[Callable[[str, str], Iterator[str]], ...]] = (
    commands,
    targets,
    variables,
    settings,
    metrics,
    endpoints,
)


if __name__ == "__main__":
    main()
