"""tools/make_twins.py, which generates the synchronous modules from the asynchronous ones."""

import sys
from pathlib import Path

import pytest

import make_twins

TOOL = Path(__file__).parents[2] / "tools" / "make_twins.py"


def twin(source: str) -> str:
    """The synchronous form of a module with this body, without the headers of both."""
    generated: str = make_twins.twin(f'"""A module."""\n\n{source}\n', "handles", "things.py")
    header = make_twins.HEADER.format(source="handles/things.py")
    assert generated.startswith(header)
    return generated.removeprefix(header).rstrip("\n")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("async def get(): pass", "def get(): pass"),
        ("x = await y", "x = y"),
        ("x = (await a.b(await c)).d", "x = (a.b(c)).d"),
        ("async with a as b, c: pass", "with a as b, c: pass"),
        ("async for x in y: pass", "for x in y: pass"),
        ("z = [x async for x in y]", "z = [x for x in y]"),
        ("    async  def f(): pass".strip(), "def f(): pass"),
    ],
)
def test_async_and_await_are_removed(source: str, expected: str) -> None:
    assert twin(source) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("AsyncPlane", "Plane"),
        ("AsyncIterator", "Iterator"),
        ("__aenter__", "__enter__"),
        ("__aexit__", "__exit__"),
        ("__aiter__", "__iter__"),
        ("__anext__", "__next__"),
        ("StopAsyncIteration", "StopIteration"),
        ("aclosing", "closing"),
        ("asynccontextmanager", "contextmanager"),
    ],
)
def test_asyncio_names_become_synchronous_names(name: str, expected: str) -> None:
    assert twin(f"x = {name}") == f"x = {expected}"


@pytest.mark.parametrize("name", ["Asynchronous", "asynchronous", "awaited", "MyAsyncPlane", "_async", "Async"])
def test_similar_names_are_unchanged(name: str) -> None:
    assert twin(f"x = {name}") == f"x = {name}"


def test_strings_and_comments_are_unchanged() -> None:
    source = 'def f():\n    """Await the AsyncPlane, async."""\n    return "await"  # async AsyncPlane'
    assert twin(source) == source


def test_columns_after_wide_characters_are_correct() -> None:
    assert twin('x = "é🐝", await y, await z') == 'x = "é🐝", y, z'


def test_only_imports_of_generated_modules_change() -> None:
    source = "from fastness.handles.pairs import AsyncPairs\nfrom fastness.wire import AsyncPort"
    assert twin(source) == "from fastness.handles.sync.pairs import Pairs\nfrom fastness.wire import Port"


def test_generated_module_names_its_source() -> None:
    generated = make_twins.twin('"""Long\n\nand wide."""\n\nx = 1\n', "handles", "things.py")
    assert (
        generated
        == '"""Generated from handles/things.py by tools/make_twins.py; change that file instead."""\n\nx = 1\n'
    )


def test_a_stub_imports_what_a_package_exports_lazily() -> None:
    source = """from shop.version import VERSION as VERSION

_MODULE_OF, __getattr__, __dir__ = lazy_exports(__name__, {"prices": "Price price", "carts.cart": "Cart"})
"""
    _, body = make_twins.stub(source, "shop").split("\n\n", 1)
    assert (
        body
        == """from shop.version import VERSION as VERSION
from shop.prices import Price, price
from shop.carts.cart import Cart

_MODULE_OF: dict[str, str]
# fmt: off
__all__ = \\
["Price", "price", "Cart"]
"""
    )


@pytest.fixture
def handles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with one asynchronous handle."""
    monkeypatch.setattr(make_twins, "SOURCE", tmp_path.parent)
    monkeypatch.setattr(make_twins, "NOT_TWINNED", {tmp_path.name: ("__init__", "opening")})
    monkeypatch.setattr(make_twins, "TWINNED", {})
    (tmp_path / "things.py").write_text('"""Things."""\n\n\nasync def get() -> int:\n    return await got()\n')
    (tmp_path / "opening.py").write_text('"""Not twinned."""\n')
    return tmp_path


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["make_twins.py", *arguments])
    return make_twins.main()


def test_check_fails_until_the_modules_are_generated(handles: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, "--check") == 1
    assert not (handles / "sync").exists()
    assert run(monkeypatch) == 0
    assert run(monkeypatch, "--check") == 0
    assert sorted(path.name for path in (handles / "sync").iterdir()) == ["__init__.py", "things.py"]


def test_check_detects_edited_and_obsolete_modules(
    handles: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch)
    (handles / "sync/things.py").write_text("edited\n")
    (handles / "sync/gone.py").write_text("left behind\n")
    capsys.readouterr()
    assert run(monkeypatch, "--check") == 1
    output = capsys.readouterr().out
    assert "things.py is out of date" in output
    assert "gone.py is out of date" in output
    run(monkeypatch)
    assert run(monkeypatch, "--check") == 0
    assert not (handles / "sync/gone.py").exists()
