"""Check the Python in the documents with mypy: the blocks, and what code spans say of the API.

python tools/check_documents.py    exit 1 and name each line that mypy refuses

A block becomes a module in build/documents, on the lines that it has in its page; it may import what the page saves
under a name. A span such as `plane.queue("jobs").put(…, priority=7)` becomes an expression, whose members and
arguments must exist.
"""

import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import fastness

sys.path.insert(0, str(Path(__file__).parent))  # Tests run this file from elsewhere.
from check_links import ROOT
from check_names import codes, known_metrics, pages

_TITLE: Final = re.compile(r"^```python title=(\S+)\.py$", re.MULTILINE)
_NOT_RUN: Final = re.compile(r"^<!-- not run: ", re.MULTILINE)
_DOTTED: Final = re.compile(r"(?<![\w./-])[A-Za-z]\w*(?:\.[A-Za-z_]\w*)+(?![\w/-])")
_FILE: Final = re.compile(r".*\.(?:py|md|toml|yml|json|conf|service)")
# What the spans of all pages call by these names.
_VALUES: Final = ("Plane", "Queue", "Message", "World", "Mailbox", "Worker", "Host")
_CLASSES: Final = [name for name in fastness.__all__ if name[0].isupper()]
_NAMES: Final = {"fastness", *_CLASSES, *map(str.lower, _VALUES)}
_SPANS: Final = "spans"
_OF_SPANS: Final = ("[attr-defined]", "Unexpected keyword argument")  # Their values are placeholders.


def main() -> None:
    written = [page for page in pages() if "reference" not in page.parts]  # The others are generated from the code.
    problems = problems_of(written, ROOT, ROOT / "build" / "documents")
    print(*problems, sep="\n", end="\n" if problems else "")
    sys.exit(1 if problems else 0)


def problems_of(documents: Iterable[Path], root: Path, target: Path) -> list[str]:
    """What is wrong in the documents of `root`, as `docs/page.md:12: ...`; writes the modules to `target`."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    (target / "__init__.py").touch()
    written = {write_modules(page, root, target).name: page for page in documents}
    problems = []
    command = [sys.executable, "-m", "mypy", "--no-error-summary", "--hide-error-context", str(target)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):
        sys.exit(done.stdout + done.stderr)
    for line in done.stdout.splitlines():
        path, number, message = line.split(":", 2)
        module = Path(path)  # Of the folder where the module was when mypy put it into its cache.
        page = written[module.parent.name]
        placeholder = module.stem == _SPANS and not any(each in message for each in _OF_SPANS)
        fragment = "[name-defined]" in message and _NOT_RUN.search(page.read_text())  # Of a program of the reader.
        if not (": note:" in line or placeholder or fragment):
            problems.append(f"{page.relative_to(root)}:{number}:{message}")
    return problems


def write_modules(page: Path, root: Path, target: Path) -> Path:
    """Write a package with the Python of a page; returns its folder."""
    text = page.read_text()
    folder = target / re.sub(r"\W", "_", str(page.relative_to(root).with_suffix("")))
    folder.mkdir()
    (folder / "__init__.py").touch()
    titles = {text.count("\n", 0, each.end()) + 2: each[1] for each in _TITLE.finditer(text)}
    saved = {title.rpartition("/")[2]: title.replace("/", "_") for title in titles.values()}
    for number, language, code in codes(text):
        if language == "python":
            name = titles.get(number, f"line_{number}").replace("/", "_")
            (folder / f"{name}.py").write_text("\n" * (number - 1) + _with_relative_imports(code, saved))
    (folder / f"{_SPANS}.py").write_text(_module_of_spans(text))
    return folder


def _with_relative_imports(code: str, saved: dict[str, str]) -> str:
    for name, module in saved.items():
        code = re.sub(rf"^( *)from {name} import ", rf"\1from .{module} import ", code, flags=re.MULTILINE)
        code = re.sub(rf"^( *)import {name}$", rf"\1from . import {module} as {name}", code, flags=re.MULTILINE)
    return code


def _module_of_spans(text: str) -> str:
    """A function with the expressions of each line, on that line."""
    lines: dict[int, list[str]] = {}
    modules = {"fastness"}
    for number, expression in _expressions(text):
        lines.setdefault(number, []).append(ast.unparse(expression))
        modules.update(_modules(ast.unparse(expression)))
    values = [f"{name.lower()}: fastness.{name}" for name in _VALUES]
    head = "; ".join(
        [*(f"import {each}" for each in sorted(modules)), f"from fastness import {', '.join(_CLASSES)}", *values]
    )
    rows = [
        f"async def line_{n}() -> None: {'; '.join(lines[n])}" if n in lines else ""
        for n in range(2, max(lines, default=1) + 1)
    ]
    return "\n".join([head, *rows, ""])


def _expressions(text: str) -> Iterator[tuple[int, ast.Expression]]:
    """The expressions of code spans that use a name of Fastness, with their lines."""
    for number, language, code in codes(text):
        if language == "inline" and not _FILE.fullmatch(code):
            plain = re.sub(r"=(?=[,)])", "=...", code.removeprefix("@").replace("…", "..."))
            # In a span that is no expression, such as a statement, only the names are checked.
            for parsed in _parsed(plain) or [each for dotted in _DOTTED.findall(code) for each in _parsed(dotted)]:
                names = {node.id for node in ast.walk(parsed) if isinstance(node, ast.Name)}
                if names & _NAMES and ast.unparse(parsed).replace(".", "_") not in known_metrics():  # OpenTelemetry's.
                    yield number, parsed


def _parsed(code: str) -> list[ast.Expression]:
    with suppress(SyntaxError):
        return [ast.parse(code, mode="eval")]
    return []


def _modules(expression: str) -> list[str]:
    """The modules in names such as `fastness.testing.clock.ManualClock`."""
    found = []
    for dotted in re.findall(r"\bfastness(?:\.\w+)+", expression):
        parts = dotted.split(".")
        for end in range(2, len(parts) + 1):
            path = ROOT.joinpath("src", *parts[:end])
            if path.is_dir() or path.with_suffix(".py").exists():
                found.append(".".join(parts[:end]))
    return found


if __name__ == "__main__":
    main()
