"""The test files that a change can reach.

A test is chosen when it imports a changed module, or one at most two imports above it; when its name has a word of the
changed module's path, as test_queue_groups.py and layers/queues/put.py have; or when it was changed itself, or imports
what was. Modules that import nearly everything say nothing about a test, so they are not followed.

The tests that run again through a client are chosen when the client, the wire or the server was changed; all of them.
"""

import ast
import re
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import grimp

ROOT: Final = Path(__file__).resolve().parents[2]
HUBS: Final = ("cli", "demo", "opening", "pipeline", "plane", "server", "testing")
IMPORTS_UP: Final = 2
THROUGH_CLIENT: Final = "tests/end_to_end/test_through_client.py"
REMOTE: Final = ("client", "wire", "server")
COMMON: Final = "fastness.layers.wire.handles.sync.runtime.plane.server.client.http"


def changed_files(since: str) -> list[str]:
    """What differs from a commit, committed or not."""
    listed = [["git", "diff", "--name-only", since], ["git", "ls-files", "--others", "--exclude-standard"]]
    texts = [subprocess.run(each, cwd=ROOT, check=True, capture_output=True, text=True).stdout for each in listed]
    return sorted(set("".join(texts).splitlines()))


def whole_files(changed: Iterable[str]) -> list[str]:
    """The test files of which no test may wait for its part of the rotation."""
    sources = (name for file in changed if (name := _module(file, "src")) is not None)
    return [THROUGH_CLIENT] if any(_package(name) in REMOTE for name in sources) else []


def tests_of(changed: Iterable[str]) -> list[str]:
    """The test files to run, relative to the root of the repository."""
    changed = list(changed)
    sources = {name for file in changed if (name := _module(file, "src")) is not None}
    reached = _above(sources) | {Path(file).stem for file in changed if file.startswith("tools/")}
    reached |= {name for file in changed if (name := _module(file, "")) is not None}
    words = {word for name in sources for word in _words(name)} - set(_words(COMMON))
    chosen = whole_files(changed)
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        relative = str(file.relative_to(ROOT))
        if relative in changed or words & set(_words(file.stem)) or reached & set(_imports(file)):
            chosen.append(relative)
    return sorted(set(chosen))


def _module(file: str, root: str) -> str | None:
    """The name of the module in a file, if the file is one below this folder."""
    path = Path(file)
    if path.suffix != ".py" or not path.is_relative_to(root):
        return None
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


def _above(modules: set[str]) -> set[str]:
    """These modules, and those that import them in a few steps."""
    graph = grimp.build_graph("fastness")
    found = modules & graph.modules
    for _ in range(IMPORTS_UP):
        found |= {
            name
            for module in found
            for name in graph.find_modules_that_directly_import(module)
            if _package(name) not in HUBS or _package(name) == _package(module)
        }
    return found | modules


def _package(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def _words(name: str) -> Iterator[str]:
    """The words of a module's name, in the singular."""
    for word in re.split(r"[._]", name):
        yield word.removesuffix("s") if len(word) > 3 else word


def _imports(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
