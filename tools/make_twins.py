"""Generate the synchronous modules and the stubs of lazy exports, or check that they are up to date.

python tools/make_twins.py           write src/fastness/{handles,runtime,mcp}/sync/ and the __init__.pyi files
python tools/make_twins.py --check   exit 1 if a file there differs from what would be written
"""

import ast
import io
import re
import subprocess
import sys
import textwrap
import tokenize
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "fastness"
NOT_TWINNED = {  # These serve both threads and event loops, or only one of the two.
    "handles": (
        "__init__",
        "arguments",
        "failed_attempts",
        "opening",
        "push_listening",
        "task_control",
        "task_flow",
        "workflow_types",
    ),
    "runtime": (
        "__init__",
        "background",
        "cancellation",
        "consumer_options",
        "duty",
        "eager_tasks",
        "publishing",
        "rate_limits",
        "quotas",
        "repeat_detector",
        "timers",
        "waiting_consumers",
    ),
}
TWINNED = {"mcp": ("message_tasks",)}  # The others serve event loops only.

WORDS = {
    "asyncio": "time",  # For `sleep`.
    "aiter": "iter",
    "anext": "next",
    "__aenter__": "__enter__",
    "__aexit__": "__exit__",
    "__aiter__": "__iter__",
    "__anext__": "__next__",
    "StopAsyncIteration": "StopIteration",
    "aclosing": "closing",
    "asynccontextmanager": "contextmanager",
}
HEADER = '"""Generated from {source} by tools/make_twins.py; change that file instead."""\n\n'


def twin(source: str, package: str, name: str) -> str:
    """The synchronous form of an asynchronous module."""
    tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    lines = source.splitlines(keepends=True)
    for index in reversed(range(len(tokens))):
        token = tokens[index]
        quoted = token.type == tokenize.STRING and re.fullmatch(r'"Async[A-Z][\w\[\], |]*"', token.string)
        if token.type != tokenize.NAME and not quoted:
            continue
        row, start = token.start[0] - 1, token.start[1]
        end = token.end[1]
        if token.string in ("async", "await"):
            replacement, end = "", tokens[index + 1].start[1]
        else:
            replacement = WORDS.get(token.string) or re.sub(r"\bAsync(?=[A-Z])", "", token.string)
            replacement = re.sub(r"(?<=\w)_async$", "", replacement)  # Lower layers have both forms under two names.
        lines[row] = lines[row][:start] + replacement + lines[row][end:]
    body = "".join(lines)
    body = re.sub(r"\bAwaitable\[(\w+)\]", r"\1", body)
    body = re.sub(r"^(from collections\.abc import .*?)\bAwaitable, ", r"\1", body, flags=re.MULTILINE)
    twinned = "|".join(path.stem for path in _twinned(package))
    body = re.sub(rf"from fastness\.{package}\.(?=(?:{twinned}) import)", f"from fastness.{package}.sync.", body)
    docstring_end = body.index('"""', 3) + 3
    return HEADER.format(source=f"{package}/{name}") + body[docstring_end:].lstrip("\n")


def stub(source: str, package: str) -> str:
    """What type checkers and editors see of a package that calls `lazy_exports`."""
    called = next(each for each in ast.walk(ast.parse(source)) if isinstance(each, ast.Call))
    exports = ast.literal_eval(called.args[1])
    lines = re.findall(r"^from .* as .*$", source, re.MULTILINE)
    lines += [f"from {package}.{module} import {', '.join(names.split())}" for module, names in exports.items()]
    names = textwrap.fill(str([name for names in exports.values() for name in names.split()]), 120).replace("'", '"')
    header = HEADER.format(source=f"{package.replace('.', '/')}/__init__.py")
    return header + "\n".join(lines) + f"\n\n_MODULE_OF: dict[str, str]\n# fmt: off\n__all__ = \\\n{names}\n"


def _twinned(package: str) -> list[Path]:
    """The modules of a package that have a twin: those of `TWINNED`, or all but subpackages and `NOT_TWINNED`."""
    modules = sorted((SOURCE / package).glob("*.py"))
    if package in TWINNED:
        return [path for path in modules if path.stem in TWINNED[package]]
    return [path for path in modules if path.stem not in NOT_TWINNED[package]]


def format_code(text: str, path: Path) -> str:
    for command in (["check", "--fix", "--quiet", "--select", "I"], ["format"]):
        ruff = [sys.executable, "-m", "ruff", *command, "--stdin-filename", str(path), "-"]
        text = subprocess.run(ruff, input=text, capture_output=True, text=True, check=True).stdout
    return text


def main() -> int:
    check = "--check" in sys.argv[1:]
    packages = (*NOT_TWINNED, *TWINNED)
    expected: dict[Path, str] = {}
    for package in packages:
        folder = SOURCE / package / "sync"
        expected[folder / "__init__.py"] = (
            '"""Synchronous modules, generated from the asynchronous ones in the parent package."""\n'
        )
        for module in _twinned(package):
            path = folder / module.name
            expected[path] = format_code(twin(module.read_text(), package, module.name), path)
    for init in SOURCE.rglob("__init__.py"):
        if "lazy_exports(" in (source := init.read_text()):
            package = ".".join(init.parent.relative_to(SOURCE.parent).parts)
            expected[init.with_suffix(".pyi")] = format_code(stub(source, package), init.with_suffix(".pyi"))
    stale = [path for path, text in expected.items() if not path.exists() or path.read_text() != text]
    stale += [path for package in packages for path in (SOURCE / package / "sync").glob("*.py") if path not in expected]
    if check:
        for path in stale:
            print(f"{path} is out of date; run: make twins")
        return 1 if stale else 0
    for path in stale:
        if path in expected:
            path.parent.mkdir(exist_ok=True)
            path.write_text(expected[path])
        else:
            path.unlink()
    print(f"{len(stale)} of {len(expected)} twins and stubs rewritten")
    return 0


if __name__ == "__main__":
    sys.exit(main())
