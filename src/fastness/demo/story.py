"""Runs the demo from an empty folder to the report, and removes everything that is not to be kept."""

import logging
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final

import msgspec

import fastness
from fastness.demo.chapters import dead_letters, mail, outage, pipeline, server, tickets, tiers, worlds
from fastness.demo.context import DemoContext
from fastness.demo.output import Claim, Output
from fastness.demo.processes import INTERRUPTIONS, PATIENCE_SECONDS, Processes
from fastness.errors import PathUnusable

_CHAPTERS: Final[tuple[Callable[[DemoContext], Any], ...]] = (
    server.run,
    mail.run,
    tickets.run,
    dead_letters.run,
    tiers.run,
    worlds.run,
    outage.run,
)


class DemoResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a run."""

    ok: bool
    seconds: float
    claims: list[Claim]
    report: str | None  # The path of the report.
    kept: str | None  # The folder with data, lake and logs, if it is kept.


def run(out: IO[str], *, quiet: bool, with_spark: bool, keep: Path | None, report: Path) -> DemoResult:
    """Run the demo, print to `out`, and clean up. The report is copied to the file `report`, or stays in `keep`.

    Raises:
        Unsupported: Spark is requested but not installed.
        PathUnusable: the folder to keep is not empty.
        KeyboardInterrupt: the demo was interrupted; everything is removed.
    """
    if with_spark:
        pipeline.check()
        if keep is None and not os.access(report.parent, os.W_OK):
            raise PathUnusable(f"Cannot write the report to {report.parent}; change to another folder, or give --keep")
    output = Output(out, quiet=quiet)
    with _interruptible(), _without_logs(), _folder(keep) as folder:
        output.title(
            "Fastness demo",
            "A fleet of agents answers support tickets. Some agent processes are killed with kill -9, and so is the "
            "server. Every line with a mark is a claim that was checked before it was printed.",
        )
        written = _run_chapters(output, folder, with_spark=with_spark)
        if written is not None and written.exists():
            written = written if keep is not None else _copy_report(written, report)
        else:
            written = None
        output.table()
        output.end()
    return DemoResult(
        ok=not output.failed,
        seconds=round(output.seconds, 1),
        claims=output.claims,
        report=None if written is None else str(written),
        kept=None if keep is None else str(folder),
    )


def _run_chapters(output: Output, folder: Path, *, with_spark: bool) -> Path | None:
    """Run the chapters. Returns the path of the report. A chapter that raises is a failed claim and ends the run."""
    report = None
    with Processes(folder) as processes:
        try:
            running = processes.serve()
            with fastness.connect(running.url, patience_seconds=PATIENCE_SECONDS) as plane:
                context = DemoContext(output, processes, running, plane)
                for chapter in _CHAPTERS:
                    chapter(context)
                if with_spark:
                    report = pipeline.run(context)
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
            output.claim("the chapter runs without an error", False, checked="no exception", figure=message)
    return report


@contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    """The folder of the run: a temporary one, or the one to keep."""
    if keep is None:
        folder = Path(tempfile.mkdtemp(prefix="fastness-demo-"))
        try:
            yield folder
        finally:
            shutil.rmtree(folder)
        return
    try:
        keep.mkdir(parents=True, exist_ok=True)
        is_empty = not any(keep.iterdir())
    except OSError as error:
        raise PathUnusable(f"Cannot use {keep} ({error.strerror}); choose another folder for --keep") from error
    if not is_empty:
        raise PathUnusable(f"{keep} is not empty; choose a new folder for --keep")
    yield keep.resolve()


@contextmanager
def _interruptible() -> Iterator[None]:
    """Turn the first interruption into KeyboardInterrupt, and ignore later ones during the cleanup."""

    def interrupt(number: int, frame: Any) -> None:
        del number, frame
        for each in INTERRUPTIONS:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    previous = {each: signal.signal(each, interrupt) for each in INTERRUPTIONS}
    try:
        yield
    finally:
        for each, handler in previous.items():
            signal.signal(each, handler)


@contextmanager
def _without_logs() -> Iterator[None]:
    """Suppress log output: clients of a killed server, and a stopping Spark, log many warnings."""
    handler = logging.NullHandler()
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)


def _copy_report(report: Path, target: Path) -> Path:
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    shutil.copyfile(report, temporary)
    os.replace(temporary, target)
    return target.resolve()
