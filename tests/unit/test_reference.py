"""docs/reference/ is up to date with the code, and complete."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import click
import msgspec
import pytest

from holdfast import errors, limits
from holdfast.cli.main import root
from holdfast.server.http.routes import ENDPOINTS
from holdfast.server.settings import Settings

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "tools" / "make_reference.py"
PAGES = ("commands", "endpoints", "settings", "errors", "limits")
REFERENCE_TOOL = runpy.run_path(str(TOOL))


def page(name: str) -> str:
    return (ROOT / "docs" / "reference" / f"{name}.md").read_text()


def test_reference_is_up_to_date() -> None:
    check = subprocess.run([sys.executable, str(TOOL), "--check"], capture_output=True, text=True, check=False)
    assert check.returncode == 0, check.stdout


@pytest.mark.parametrize("name", PAGES)
def test_check_detects_an_outdated_page(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    main = REFERENCE_TOOL["main"]
    monkeypatch.setitem(main.__globals__, "PAGES", tmp_path)
    monkeypatch.setattr(sys, "argv", [str(TOOL)])
    main()
    monkeypatch.setattr(sys, "argv", [str(TOOL), "--check"])
    main()
    (tmp_path / f"{name}.md").write_text("something else")
    with pytest.raises(SystemExit, match="1"):
        main()


def test_every_command_is_documented() -> None:
    text, missing = page("commands"), []

    def walk(command: click.Command, ctx: click.Context) -> None:
        if not command.hidden and f"# {ctx.command_path}\n" not in f"# holdfast\n{text}":
            missing.append(ctx.command_path)
        if isinstance(command, click.Group):
            for name in command.list_commands(ctx):
                subcommand = command.get_command(ctx, name)
                assert subcommand is not None
                walk(subcommand, click.Context(subcommand, info_name=name, parent=ctx))

    walk(root, click.Context(root, info_name="holdfast"))
    assert missing == []


def test_every_endpoint_setting_error_and_limit_is_documented() -> None:
    for endpoint in ENDPOINTS:
        assert f"`{endpoint.method} {endpoint.path.replace(':path', '')}`" in page("endpoints")
    for field in msgspec.structs.fields(Settings):
        assert f"| `{field.name}` `HOLDFAST_{field.name.upper()}`" in page("settings")
    for name in errors.__all__:
        if name != "RetryAdvice":
            assert f"| `{getattr(errors, name).code}` | {name} |" in page("errors")
    for name, value in vars(limits).items():
        if name.isupper():
            assert f"| `{name}` | {value:,} |" in page("limits")


def test_links_within_the_endpoints_page_have_targets() -> None:
    text = page("endpoints")
    headings = {heading.lower() for heading in re.findall(r"^#+ (\w+)$", text, re.MULTILINE)}
    assert set(re.findall(r"\]\(#(\w+)\)", text)) <= headings


def test_every_setting_has_a_description() -> None:
    undocumented = [line for line in page("settings").splitlines() if line.startswith("| `") and line.endswith("|  |")]
    assert undocumented == []
