"""The exports of `import fastness`, and which modules it does not load."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fastness
from fastness import testing
from fastness.errors import CLASSES
from tests.support.failures import Failures

INDEX = (Path(__file__).parents[2] / "docs" / "reference" / "python.md").read_text()
# The table of each section names a class and its asyncio form in the first column.
DOCUMENTED = {
    name for row in re.findall(r"^\| \[(.*?) \|", INDEX, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)
}
EXPORTED = sorted(fastness.__all__)


def test_exactly_the_documented_names_are_exported() -> None:
    assert {*fastness.__all__, *(error.__name__ for error in CLASSES.values()), *testing.__all__} == DOCUMENTED
    assert len(EXPORTED) == len(set(EXPORTED))


def test_a_public_name_has_a_docstring() -> None:
    failures = Failures()
    for name in EXPORTED:
        with failures.of(name):
            exported = getattr(fastness, name)
            is_alias = not inspect.isclass(exported) and not inspect.isroutine(exported)  # The page documents it.
            assert is_alias or (exported.__doc__ or "").strip()
    failures.check()


def test_a_public_method_has_a_docstring() -> None:
    failures = Failures()
    for name in [name for name in EXPORTED if inspect.isclass(getattr(fastness, name))]:
        with failures.of(name):
            methods = {key: part for key, part in vars(getattr(fastness, name)).items() if not key.startswith("_")}
            undocumented = [
                key
                for key, part in methods.items()
                if (inspect.isfunction(part) or isinstance(part, property)) and not (part.__doc__ or "").strip()
            ]
            assert undocumented == []
    failures.check()


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


@pytest.mark.parametrize("module", ["psycopg", "pyspark", "pytest", "hypothesis", "fastness.testing"])
def test_importing_fastness_does_not_load_optional_and_slow_modules(module: str) -> None:
    assert run(f"import sys, fastness; print({module!r} in sys.modules)") == "False"


# The modules of each way to open a plane, which the other ways must not load.
CLIENT = ("websockets", "http.client", "fastness.client")
KEY_SPACE = ("rocksdict", "obstore", "fastness.plane", "fastness.runtime", "fastness.layers", "fastness.backends")
SERVER = ("uvicorn", "starlette", "prometheus_client", "fastness.server", "click", "rich", "fastness.cli")


@pytest.mark.parametrize(
    ("code", "not_loaded"),
    [
        ("", (*CLIENT, *KEY_SPACE, *SERVER, "asyncio", "msgspec", "fastness.handles")),
        ("fastness.open('memory:').close()", (*CLIENT, *SERVER, "fastness.handles.plane")),
        ("fastness.connect('http://127.0.0.1:1').close()", (*KEY_SPACE, *SERVER, "fastness.handles.plane")),
        ("fastness.Worker", (*CLIENT, *KEY_SPACE, *SERVER)),
        ("fastness.TaskApp('http://127.0.0.1:1')", (*CLIENT, *KEY_SPACE, *SERVER)),
        ("import fastness.cli.main", (*CLIENT, *KEY_SPACE, "fastness.server", "fastness.handles")),
        (
            "import asyncio; asyncio.run(fastness.connect_async('http://127.0.0.1:1').__aenter__())",
            (*KEY_SPACE, *SERVER, "fastness.handles.sync"),
        ),
    ],
    ids=["import", "open", "connect", "worker", "tasks", "cli", "connect_async"],
)
def test_unneeded_modules_are_not_loaded(code: str, not_loaded: tuple[str, ...]) -> None:
    loaded = run(f"import sys, fastness\n{code}\nprint(*sys.modules)").split()
    assert [name for name in not_loaded if name in loaded] == []


def test_dir_lists_exports_before_they_are_loaded() -> None:
    assert run("import fastness; print(sorted(set(fastness.__all__) - set(dir(fastness))))") == "[]"


def test_an_unknown_name_is_no_attribute() -> None:
    assert not hasattr(fastness, "nothing")
    with pytest.raises(ImportError, match="nothing"):
        from fastness import nothing  # type: ignore[attr-defined]  # noqa: F401


def test_an_exported_name_is_the_object_of_its_module() -> None:
    from fastness.handles.sync.plane import Plane
    from fastness.tiers import Tier

    assert fastness.Tier is Tier
    assert fastness.Plane is Plane


def test_a_star_import_imports_exactly_the_exported_names() -> None:
    assert run("from fastness import *; print(sorted(n for n in dir() if n[0] != '_'))") == str(EXPORTED)


def test_memory_and_directories_open_without_the_postgresql_driver(tmp_path: Path) -> None:
    code = "import sys; sys.modules['psycopg'] = None; import fastness; fastness.open({!r}).close()"
    for url in ("memory:", f"dir:{tmp_path}"):
        run(code.format(url))


def test_postgresql_without_its_driver_names_the_package_to_install() -> None:
    code = """import sys; sys.modules['psycopg'] = None; import fastness
try: fastness.open('postgresql://x@localhost/x')
except fastness.FastnessError as error: print(error.code, error)"""
    assert run(code).startswith("unsupported ")
    assert ".[postgres]" in run(code)
