"""`holdfast demo`: see it work. The story is told by `holdfast.demo`."""

import sys
import webbrowser
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
    if ending.report is not None and not no_open and sys.stdout.isatty() and not wants_json():
        webbrowser.open(Path(ending.report).as_uri())
    click.get_current_context().exit(0 if ending.ok else _NOT_TRUE)


def _say_where(report: str | None, kept: str | None) -> None:
    """What the audience can look at now."""
    if report is not None:
        click.echo(f"The report: {report}")
    if kept is not None:
        click.echo(f"The console: holdfast serve --data dir:{kept}/data --pipeline-reports {kept}/lake/reports")
        click.echo("  then open http://127.0.0.1:9440/console")
    else:
        click.echo("The console: holdfast demo --keep ./demo, then holdfast serve --data dir:./demo/data")
        click.echo("  and open http://127.0.0.1:9440/console")
