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
    assert (getattr(holdfast, name).__doc__ or "").strip()


@pytest.mark.parametrize("name", [name for name in PROMISED if inspect.isclass(getattr(holdfast, name))])
def test_a_public_method_says_what_it_gives(name: str) -> None:
    methods = {key: part for key, part in vars(getattr(holdfast, name)).items() if not key.startswith("_")}
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


# What each way to a plane needs, and what it must not wait for.
CLIENT = ("websockets", "http.client", "holdfast.client")
KEY_SPACE = ("rocksdict", "obstore", "holdfast.plane", "holdfast.runtime", "holdfast.layers", "holdfast.backends")
SERVER = ("uvicorn", "starlette", "prometheus_client", "holdfast.server", "click", "rich", "holdfast.cli")


@pytest.mark.parametrize(
    ("code", "left_out"),
    [
        ("", (*CLIENT, *KEY_SPACE, *SERVER, "asyncio", "msgspec", "holdfast.handles")),
        ("holdfast.open('memory:').close()", (*CLIENT, *SERVER, "holdfast.handles.plane")),
        ("holdfast.connect('http://127.0.0.1:1').close()", (*KEY_SPACE, *SERVER, "holdfast.handles.plane")),
        ("holdfast.Worker", (*CLIENT, *KEY_SPACE, *SERVER)),
        ("import holdfast.cli.main", (*CLIENT, *KEY_SPACE, "holdfast.server", "holdfast.handles")),
        (
            "import asyncio; asyncio.run(holdfast.connect_async('http://127.0.0.1:1').__aenter__())",
            (*KEY_SPACE, *SERVER, "holdfast.handles.sync"),
        ),
    ],
    ids=["import", "open", "connect", "worker", "cli", "connect_async"],
)
def test_nothing_is_loaded_that_is_not_needed(code: str, left_out: tuple[str, ...]) -> None:
    loaded = run(f"import sys, holdfast\n{code}\nprint(*sys.modules)").split()
    assert [name for name in left_out if name in loaded] == []


def test_names_are_listed_before_they_are_loaded() -> None:
    assert run("import holdfast; print(sorted(set(holdfast.__all__) - set(dir(holdfast))))") == "[]"
    assert run("from holdfast import handles; print(sorted(set(handles.__all__) - set(dir(handles))))") == "[]"


def test_what_there_is_not_is_no_attribute() -> None:
    for module in (holdfast, holdfast.handles):
        assert not hasattr(module, "nothing")
    with pytest.raises(ImportError, match="nothing"):
        from holdfast import nothing  # noqa: F401


def test_a_name_is_the_one_of_its_home() -> None:
    from holdfast.handles.sync.plane import Plane
    from holdfast.tiers import Tier

    assert holdfast.Tier is Tier
    assert holdfast.Plane is holdfast.handles.Plane is Plane


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
