"""`fastness demo`: runs the demonstration in `fastness.demo`."""

import os
import sys
import webbrowser
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import click
import msgspec

from fastness.cli import printing
from fastness.cli.commands import LeafCommand, wants_json

_REPORT: Final = "fastness-demo-report.html"
_CLAIM_FAILED: Final = 1


@click.command(
    cls=LeafCommand,
    examples=["fastness demo", "fastness demo --without-spark", "fastness demo --keep ./demo"],
)
@click.option("--without-spark", is_flag=True, help="Skip the Spark pipeline and its report.")
@click.option("--no-open", is_flag=True, help="Do not open the report in a browser.")
@click.option(
    "--keep", metavar="FOLDER", type=click.Path(path_type=Path), help="Keep the data, lake and logs in this new folder."
)
def demo(*, without_spark: bool, no_open: bool, keep: Path | None) -> None:
    """Some of the processes are killed, and every claim that the demo prints is checked.

    It starts its own server on a free port with a temporary data directory, and leaves only the report,
    fastness-demo-report.html. Exit code 0 means that every claim holds.
    """
    from fastness.demo import story  # Imported here: no other command needs it.

    result = story.run(
        sys.stdout, quiet=wants_json(), with_spark=not without_spark, keep=keep, report=Path.cwd() / _REPORT
    )
    if wants_json():
        printing.record(msgspec.to_builtins(result))
    else:
        _print_next_steps(result.report, result.kept)
        if result.report is not None and not no_open and sys.stdout.isatty() and has_browser(os.environ):
            webbrowser.open(Path(result.report).as_uri())
    click.get_current_context().exit(0 if result.ok else _CLAIM_FAILED)


def has_browser(environment: Mapping[str, str], platform: str = sys.platform) -> bool:
    """Whether a graphical browser is available. A browser in the terminal would overwrite the demo's output."""
    return platform == "darwin" or any(environment.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"))


def _print_next_steps(report: str | None, kept: str | None) -> None:
    """Print where the report is, and how to open the console on the demo's data."""
    if report is not None:
        click.echo(f"Report: {report}")
    folder = kept or "./demo"
    click.echo("\nTo explore the data in the console, run" + ("" if kept else " the demo again and keep its data:"))
    if not kept:
        click.echo(f"    fastness demo --keep {folder}")
    click.echo(f"    fastness serve --data dir:{folder}/data --pipeline-reports {folder}/lake/reports")
    click.echo("and open http://127.0.0.1:9440/console")
