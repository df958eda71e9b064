"""What `import holdfast` offers, and what it leaves alone."""

import inspect
import subprocess
import sys

import pytest

import holdfast

PROMISED = [
    "AgentKey",
    "AsyncPlane",
    "AsyncWorker",
    "HoldfastError",
    "Plane",
    "Subspace",
    "Tier",
    "TierPolicy",
    "Transaction",
    "Worker",
    "connect",
    "connect_async",
    "fenced",
    "open",
    "open_async",
]


def test_exactly_the_promised_names_are_exported() -> None:
    assert sorted(holdfast.__all__) == PROMISED


@pytest.mark.parametrize("name", PROMISED)
def test_a_public_name_says_what_it_is(name: str) -> None:
    assert (vars(holdfast)[name].__doc__ or "").strip()


@pytest.mark.parametrize("name", [name for name in PROMISED if inspect.isclass(vars(holdfast)[name])])
def test_a_public_method_says_what_it_gives(name: str) -> None:
    methods = {key: part for key, part in vars(vars(holdfast)[name]).items() if not key.startswith("_")}
    silent = [
        key
        for key, part in methods.items()
        if (inspect.isfunction(part) or isinstance(part, property)) and not (part.__doc__ or "").strip()
    ]
    assert silent == []


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


@pytest.mark.parametrize("module", ["psycopg", "pyspark", "pytest", "hypothesis", "holdfast.testing"])
def test_importing_holdfast_leaves_optional_and_slow_parts_out(module: str) -> None:
    assert run(f"import sys, holdfast; print({module!r} in sys.modules)") == "False"


def test_a_star_import_takes_the_promised_names_and_no_more() -> None:
    assert run("from holdfast import *; print(sorted(n for n in dir() if n[0] != '_'))") == str(PROMISED)


def test_memory_and_a_folder_open_without_the_driver_of_postgresql(tmp_path) -> None:
    code = "import sys; sys.modules['psycopg'] = None; import holdfast; holdfast.open({!r}).close()"
    for url in ("memory:", f"dir:{tmp_path}"):
        run(code.format(url))


def test_postgresql_without_its_driver_says_what_to_install() -> None:
    code = """import sys; sys.modules['psycopg'] = None; import holdfast
try: holdfast.open('postgresql://x@localhost/x')
except holdfast.HoldfastError as error: print(error.code, error)"""
    assert run(code).startswith("unsupported ")
    assert "holdfast[postgres]" in run(code)
