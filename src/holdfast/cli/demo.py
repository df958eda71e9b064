"""`holdfast demo`: see it work. The story is told by `holdfast.demo`."""

import os
import sys
import webbrowser
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import click
import msgspec

from holdfast.cli import printing
from holdfast.cli.commands import Verb, wants_json

_REPORT: Final = "holdfast-demo-report.html"
_NOT_TRUE: Final = 1  # A claim that does not hold is a fault of Holdfast.


@click.command(
    cls=Verb,
    examples=["holdfast demo", "holdfast demo --without-spark", "holdfast demo --keep ./demo"],
)
@click.option("--without-spark", is_flag=True, help="Leave the pipeline and its report out.")
@click.option("--no-open", is_flag=True, help="Do not open the report in a browser.")
@click.option(
    "--keep", metavar="FOLDER", type=click.Path(path_type=Path), help="Keep data, lake and logs in a new folder."
)
def demo(*, without_spark: bool, no_open: bool, keep: Path | None) -> None:
    """A night of a fleet of agents, with real processes and real kills, each claim of it checked.

    It starts a server of its own on a free port, in a folder of its own, and leaves nothing behind but the report,
    holdfast-demo-report.html. Exit code 0 says that every claim holds.
    """
    from holdfast.demo import story  # Loaded here: no other command needs it.

    ending = story.tell(
        sys.stdout, quiet=wants_json(), with_spark=not without_spark, keep=keep, report=Path.cwd() / _REPORT
    )
    if wants_json():
        printing.record(msgspec.to_builtins(ending))
    else:
        _say_where(ending.report, ending.kept)
        if ending.report is not None and not no_open and sys.stdout.isatty() and has_browser(os.environ):
            webbrowser.open(Path(ending.report).as_uri())
    click.get_current_context().exit(0 if ending.ok else _NOT_TRUE)


def has_browser(environment: Mapping[str, str], platform: str = sys.platform) -> bool:
    """Whether a page can be shown in a window; a browser in the terminal would paint over the story."""
    return platform == "darwin" or any(environment.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"))


def _say_where(report: str | None, kept: str | None) -> None:
    """What the audience can look at now."""
    if report is not None:
        click.echo(f"The report is in {report}")
    folder = kept or "./demo"
    click.echo("\nTo look around in the console, run" + ("" if kept else " the demo once more, and keep its data:"))
    if not kept:
        click.echo(f"    holdfast demo --keep {folder}")
    click.echo(f"    holdfast serve --data dir:{folder}/data --pipeline-reports {folder}/lake/reports")
    click.echo("and open http://127.0.0.1:9440/console")
