"""docs/reference/ is up to date with the code, and complete."""

import inspect
import re
import sys
from pathlib import Path
from types import ModuleType

import click
import msgspec
import pytest

import fastness
import make_reference
from fastness import errors, limits, testing
from fastness.cli.main import root
from fastness.server.http.routes import ENDPOINTS
from fastness.server.settings import Settings

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "tools" / "make_reference.py"
PAGES = ("commands", "endpoints", "settings", "errors", "limits", "python", "python/queues")


def page(name: str) -> str:
    return (ROOT / "docs" / "reference" / f"{name}.md").read_text()


@pytest.mark.rotating
def test_check_detects_outdated_and_removed_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(make_reference, "PAGES", tmp_path)
    monkeypatch.setattr(sys, "argv", [str(TOOL)])
    make_reference.main()
    monkeypatch.setattr(sys, "argv", [str(TOOL), "--check"])
    make_reference.main()
    for name in PAGES:
        (tmp_path / f"{name}.md").write_text("something else")
    (tmp_path / "removed.md").write_text("of a section that is gone")
    with pytest.raises(SystemExit, match="1"):
        make_reference.main()
    named = capsys.readouterr().out.partition("(")[2].partition(")")[0].split(", ")
    assert sorted(named) == sorted((*PAGES, "removed"))


def test_every_command_is_documented() -> None:
    text, missing = page("commands"), []

    def walk(command: click.Command, ctx: click.Context) -> None:
        if not command.hidden and f"# {ctx.command_path}\n" not in f"# fastness\n{text}":
            missing.append(ctx.command_path)
        if isinstance(command, click.Group):
            for name in command.list_commands(ctx):
                subcommand = command.get_command(ctx, name)
                assert subcommand is not None
                walk(subcommand, click.Context(subcommand, info_name=name, parent=ctx))

    walk(root, click.Context(root, info_name="fastness"))
    assert missing == []


def test_every_endpoint_setting_error_and_limit_is_documented() -> None:
    for endpoint in ENDPOINTS:
        assert f"`{endpoint.method} {endpoint.path.replace(':path', '')}`" in page("endpoints")
    for field in msgspec.structs.fields(Settings):
        assert f"| `{field.name}` `FASTNESS_{field.name.upper()}`" in page("settings")
    for code, error in errors.CLASSES.items():
        assert f"| [`{code}`](#{code}) | {error.__name__} |" in page("errors")
    for name, value in vars(limits).items():
        if name.isupper():
            assert f"| `{name}` | {value:,} |" in page("limits")


def test_links_within_the_endpoints_page_have_targets() -> None:
    text = page("endpoints")
    headings = {re.sub(r"\W", "", heading.lower()) for heading in re.findall(r"^#+ ([\w.]+)$", text, re.MULTILINE)}
    assert set(re.findall(r"\]\(#([^)]+)\)", text)) <= headings


def test_every_setting_has_a_description() -> None:
    undocumented = [line for line in page("settings").splitlines() if line.startswith("| `") and line.endswith("|  |")]
    assert undocumented == []


@pytest.mark.parametrize(
    ("module", "names"),
    [
        (fastness, fastness.__all__),
        (errors, ["RetryAdvice", *(error.__name__ for error in errors.CLASSES.values())]),
        (testing, testing.__all__),
    ],
    ids=["fastness", "errors", "testing"],
)
def test_every_exported_name_has_a_signature_and_a_sentence(module: ModuleType, names: list[str]) -> None:
    """Also every method: with its types, and with the name of each argument that it describes."""
    pages = {path.stem: path.read_text() for path in (ROOT / "docs" / "reference" / "python").glob("*.md")}
    sections = {
        heading.rpartition(".")[2] if heading.startswith("fastness.") else heading: text
        for page in pages.values()
        for heading, text in re.findall(r"^##+ `([\w.]+)`\n(.*?)(?=^##+ |\Z)", page, re.MULTILINE | re.DOTALL)
    }
    for name in names:
        exported = getattr(module, name)
        if name.startswith("Async") and hasattr(module, name.removeprefix("Async")):
            continue  # Documented with the blocking form.
        text = sections[name]
        if not inspect.isclass(exported) and not inspect.isroutine(exported):
            assert len(text.split()) >= 1, name  # The alias of a type.
            continue
        assert re.search(rf"fastness\.(?:\w+\.)?{name}\b", text), name
        assert (inspect.getdoc(exported) or "").split()[0] in text, name
        for key, member in vars(exported).items() if inspect.isclass(exported) else ():
            if inspect.isfunction(member) and not key.startswith("_"):
                about = sections[f"{name}.{key}"]
                for parameter in inspect.signature(member).parameters.values():
                    typed = re.search(rf"\b{parameter.name}(?:: \S|[,)])", about)
                    assert parameter.name == "self" or typed, (name, key, parameter.name)
                raised = re.findall(
                    r"^ +(\w+(?:, \w+)*): ", (member.__doc__ or "").partition("Raises:")[2], re.MULTILINE
                )
                assert all(f"`{each}`" in about for names in raised for each in names.split(", ")), (name, key)


def test_a_class_has_its_asyncio_form_beside_it_and_says_where_it_works() -> None:
    queues = (ROOT / "docs" / "reference" / "python" / "queues.md").read_text()
    assert "| [`put`](#queueput) | `await put` | embedded, remote | " in queues
    assert "| [`subscribe`](#queuesubscribe) | `async for … in subscribe` | embedded, remote | " in queues
    plane = (ROOT / "docs" / "reference" / "python" / "opening.md").read_text()
    assert "| [`transact`](#planetransact) | `await transact` | embedded only | " in plane
    assert "| [`queue`](#planequeue) | `queue` | embedded, remote | " in plane
