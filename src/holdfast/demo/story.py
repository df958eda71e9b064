"""The night, from an empty folder to the morning's report; at its end nothing of it is left but what was asked for."""

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

import holdfast
from holdfast.demo.chapters import history, mail, memories, opening, outage, poison, tickets, tiers
from holdfast.demo.context import DemoContext
from holdfast.demo.output import Claim, Output
from holdfast.demo.processes import INTERRUPTIONS, PATIENCE_SECONDS, Processes
from holdfast.errors import PathUnusable

_CHAPTERS: Final[tuple[Callable[[DemoContext], Any], ...]] = (
    opening.tell,
    mail.tell,
    tickets.tell,
    poison.tell,
    tiers.tell,
    memories.tell,
    outage.tell,
)


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """How the story ended."""

    ok: bool
    seconds: float
    claims: list[Claim]
    report: str | None  # A file that stays.
    kept: str | None  # The folder with data, lake and logs, if it was to be kept.


def tell(out: IO[str], *, quiet: bool, with_spark: bool, keep: Path | None, report: Path) -> Ending:
    """Tell the story on `out`, and clean up behind it. The report goes to the file `report`, or stays in `keep`.

    Raises:
        Unsupported: Spark is wanted, and is not installed.
        PathUnusable: the folder to keep is not empty.
        KeyboardInterrupt: somebody stopped it; nothing is left of it either.
    """
    if with_spark:
        history.check()
        if keep is None and not os.access(report.parent, os.W_OK):
            raise PathUnusable(f"No report can be written to {report.parent}; go to another folder, or give --keep")
    stage = Output(out, quiet=quiet)
    with _signals(), _silence(), _folder(keep) as folder:
        stage.title(
            "A night with Holdfast",
            "A fleet of agents answers support tickets. Some of its processes will be killed with kill -9, and so will "
            "the server. Every line with a mark is a claim, and was checked before it was printed.",
        )
        written = _night(stage, folder, with_spark=with_spark)
        if written is not None and written.exists():
            written = written if keep is not None else _copied(written, report)
        else:
            written = None
        stage.table()
        stage.end()
    return Ending(
        ok=not stage.failed,
        seconds=round(stage.seconds, 1),
        claims=stage.claims,
        report=None if written is None else str(written),
        kept=None if keep is None else str(folder),
    )


def _night(stage: Output, folder: Path, *, with_spark: bool) -> Path | None:
    """Tell the chapters; where the report is. One that fails is a claim that does not hold, and ends the story."""
    report = None
    with Processes(folder) as cast:
        try:
            server = cast.serve()
            with holdfast.connect(server.url, patience_seconds=PATIENCE_SECONDS) as plane:
                night = DemoContext(stage, cast, server, plane)
                for chapter in _CHAPTERS:
                    chapter(night)
                if with_spark:
                    report = history.tell(night)
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            stage.claim("the chapter comes to its end", False, checked="no error on the way", figure=said)
    return report


@contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    """Where everything of the story is: a folder that goes with it, or the one to keep."""
    if keep is None:
        folder = Path(tempfile.mkdtemp(prefix="holdfast-demo-"))
        try:
            yield folder
        finally:
            shutil.rmtree(folder)
        return
    try:
        keep.mkdir(parents=True, exist_ok=True)
        is_empty = not any(keep.iterdir())
    except OSError as error:
        raise PathUnusable(f"{keep} cannot be used ({error.strerror}); name another folder for --keep") from error
    if not is_empty:
        raise PathUnusable(f"{keep} is not empty; name a new folder for --keep")
    yield keep.resolve()


@contextmanager
def _signals() -> Iterator[None]:
    """Whoever wants the story to end gets a KeyboardInterrupt, once: what follows is cleaned up in peace."""

    def interrupt(number: int, frame: Any) -> None:
        del number, frame
        for each in INTERRUPTIONS:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {each: signal.signal(each, interrupt) for each in INTERRUPTIONS}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


@contextmanager
def _silence() -> Iterator[None]:
    """Nobody logs into the story: clients of a server that is killed have much to say, and so has a Spark that ends."""
    nowhere = logging.NullHandler()
    logging.getLogger().addHandler(nowhere)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(nowhere)


def _copied(report: Path, target: Path) -> Path:
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    shutil.copyfile(report, draft)
    os.replace(draft, target)
    return target.resolve()
