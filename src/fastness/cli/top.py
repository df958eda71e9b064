"""`fastness top`: a live view of a plane: rates, depths, the oldest messages, waits, and nodes.

thread:  sample ──► sample ──► …      one every second; an error is shown, and the next sample is tried
screen:  the difference of the last two samples; a keypress changes the order or ends it
"""

import os
import select
import sys
import termios
import threading
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Final, TypeVar

import click
import msgspec

from fastness.cli import connect, printing
from fastness.cli.commands import LeafCommand, wants_json
from fastness.cli.quotas import usage_lines
from fastness.errors import DirectoryInUse, FastnessError, NotAllowed, NotFound, RetryAdvice
from fastness.handles.sync.plane import Plane
from fastness.limits import (
    TOP_KEY_SECONDS,
    TOP_PAGE,
    TOP_REFRESH_SECONDS,
    TOP_REFRESH_SECONDS_MAX,
    TOP_REFRESH_SECONDS_MIN,
    TOP_ROWS_MAX,
    TOP_WAITS_MAX,
)
from fastness.wire.leases import Waits
from fastness.wire.nodes import Nodes
from fastness.wire.queues import QueueStats
from fastness.wire.quotas import Usage

if TYPE_CHECKING:
    from rich.console import RenderableType

Answer = TypeVar("Answer")

_COLUMNS: Final = ("queue", "ready", "leased", "delayed", "blocked", "dead", "oldest", "put/s", "ack/s", "consumers")
_KEYS: Final = {"n": "name", "r": "ready", "o": "oldest", "p": "put/s", "a": "ack/s", "d": "dead"}


class Sample(msgspec.Struct, frozen=True):
    """What a plane answered at one moment. A part is None where the token does not allow it."""

    at: float  # Monotonic seconds.
    queues: list[QueueStats] | None
    has_more: bool  # There are more queues than were read.
    waits: Waits | None
    nodes: Nodes | None
    usage: Usage | None  # None also if the universe has no quota.


class QueueRow(msgspec.Struct, frozen=True):
    """One queue: its depths, and its rates between two samples."""

    queue: str
    ready: int
    leased: int
    delayed: int
    blocked: int
    dead: int
    oldest_seconds: float
    put_per_second: float
    acked_per_second: float
    delivered_per_second: float
    waiting_consumers: int
    paused: bool


class Overview(msgspec.Struct, frozen=True):
    """The difference of two samples."""

    universe: str
    queues: list[QueueRow]
    has_more: bool
    lease_waiters: int
    lock_waiters: int
    longest_wait_seconds: float
    nodes: Nodes | None
    usage: Usage | None
    not_allowed: list[str]  # Parts that the token does not allow.


@click.command(
    cls=LeafCommand,
    examples=["fastness top", "fastness top --interval 5", "fastness top --once --json"],
)
@click.option(
    "--interval",
    type=click.FloatRange(TOP_REFRESH_SECONDS_MIN, TOP_REFRESH_SECONDS_MAX),
    default=TOP_REFRESH_SECONDS,
    show_default=True,
    help="Seconds between two samples.",
)
@click.option("--once", is_flag=True, help="Print one view and exit: the rates between two samples.")
@click.option(
    "--sort",
    type=click.Choice(list(_KEYS.values())),
    default="ready",
    show_default=True,
    help="The order of the queues.",
)
def top(interval: float, once: bool, sort: str) -> None:
    """Press q to quit, and n, r, o, p, a or d to order by name, ready, oldest, put/s, ack/s or dead.

    If the server stops, the last values stay on the screen until it answers again. A data directory is opened for each
    sample, so that other programs can use it in between.

    Without a terminal, or with --json, one view is printed as with --once.
    """
    target = connect.current_target()
    is_live = not once and not wants_json()
    if is_live and not (sys.stdin.isatty() and sys.stdout.isatty()):
        click.echo("This is not a terminal: one view is printed. Say so with --once.", err=True)
        is_live = False
    with Sampler(target) as sampler:
        first = sampler.sample()  # An error of the first sample is one of the command: a wrong URL, or a token.
        if is_live:
            _show_live(sampler, first, interval, sort)
            return
        time.sleep(interval)
        view = overview(target.universe, first, sampler.sample(), sort)
    if wants_json():
        printing.record(msgspec.to_builtins(view))
        return
    from rich.console import Console

    Console(width=None if sys.stdout.isatty() else 120).print(render(view, sort))


class Sampler:
    """Takes samples. A data directory is opened for each, everything else once."""

    def __init__(self, target: connect.Target) -> None:
        self._target = target
        self._stack = ExitStack()
        self._plane: Plane | None = None

    def __enter__(self) -> "Sampler":
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def sample(self) -> Sample:
        """What the plane answers now.

        Raises:
            FastnessError: it does not answer.
        """
        if self._target.is_exclusive:
            with connect.open_plane(self._target) as plane:
                return _sample(plane)
        if self._plane is None:
            self._plane = self._stack.enter_context(connect.open_plane(self._target))
        return _sample(self._plane)


def _sample(plane: Plane) -> Sample:
    queues = _if_allowed(lambda: list(_queues(plane)))
    usage = _if_allowed(lambda: None if plane.quotas.get().is_empty else plane.quotas.usage())
    return Sample(
        time.monotonic(),
        None if queues is None else queues[:TOP_ROWS_MAX],
        queues is not None and len(queues) > TOP_ROWS_MAX,
        _if_allowed(lambda: plane.waits(limit=TOP_WAITS_MAX)),
        _if_allowed(plane.nodes),
        usage,
    )


def _queues(plane: Plane) -> Iterator[QueueStats]:
    """The first queues by name: one more than is shown, if there are more."""
    after: str | None = ""
    count = 0
    while after is not None and count <= TOP_ROWS_MAX:
        page = plane.survey_queues(after=after, limit=TOP_PAGE)
        yield from page.queues
        count += len(page.queues)
        after = page.next


def _if_allowed(call: Callable[[], Answer]) -> Answer | None:
    try:
        return call()
    except NotAllowed:
        return None


def overview(universe: str, before: Sample, now: Sample, sort: str) -> Overview:
    """What changed between two samples, with the queues in an order of `_KEYS`."""
    seconds = max(now.at - before.at, 0.001)
    earlier = {each.queue: each for each in before.queues or []}
    rows = [_row(each, earlier.get(each.queue, each), seconds) for each in now.queues or []]
    rows.sort(key=lambda row: row.queue)
    if sort != "name":
        rows.sort(key=_ORDER[sort], reverse=True)
    waiting = [place for place in (now.waits.locks if now.waits else []) if place.waiting_seconds is not None]
    lines = now.waits.lines if now.waits else []
    parts = {"queues": now.queues, "waits": now.waits, "nodes": now.nodes}
    return Overview(
        universe=universe,
        queues=rows,
        has_more=now.has_more,
        lease_waiters=sum(line.waiting for line in lines),
        lock_waiters=len(waiting),
        longest_wait_seconds=max(
            [*(line.waited_seconds for line in lines), *(place.waiting_seconds or 0.0 for place in waiting)],
            default=0.0,
        ),
        nodes=now.nodes,
        usage=now.usage,
        not_allowed=[name for name, part in parts.items() if part is None],
    )


_ORDER: Final[dict[str, Callable[[QueueRow], float]]] = {
    "ready": lambda row: row.ready,
    "oldest": lambda row: row.oldest_seconds,
    "put/s": lambda row: row.put_per_second,
    "ack/s": lambda row: row.acked_per_second,
    "dead": lambda row: row.dead,
}


def _row(now: QueueStats, before: QueueStats, seconds: float) -> QueueRow:
    def rate(total: int, earlier: int) -> float:
        return max(total - earlier, 0) / seconds  # A server that restarted without its data counts from zero.

    return QueueRow(
        queue=now.queue,
        ready=now.ready,
        leased=now.leased,
        delayed=now.delayed,
        blocked=now.blocked,
        dead=now.dead,
        oldest_seconds=now.head_age_seconds,
        put_per_second=rate(now.put_total, before.put_total),
        acked_per_second=rate(now.acked_total, before.acked_total),
        delivered_per_second=rate(now.delivered_total, before.delivered_total),
        waiting_consumers=now.waiting_consumers,
        paused=now.paused,
    )


class _Sampling(threading.Thread):
    """Samples until it is stopped. An error does not end it: the server may come back."""

    def __init__(self, sampler: Sampler, first: Sample, interval: float) -> None:
        super().__init__(name="fastness-top", daemon=True)
        self._sampler = sampler
        self._interval = interval
        self._stopping = threading.Event()
        self.before = self.now = first
        self.error: FastnessError | None = None
        self.fatal: FastnessError | None = None  # Trying again cannot help.

    def run(self) -> None:
        while not self._stopping.wait(self._interval):
            try:
                sample = self._sampler.sample()
            except FastnessError as error:
                self.error = error
                if error.retry is RetryAdvice.NEVER and not isinstance(error, NotFound | DirectoryInUse):
                    self.fatal = error
                    return
                continue
            self.before, self.now, self.error = self.now, sample, None

    def stop(self) -> None:
        self._stopping.set()


def _show_live(sampler: Sampler, first: Sample, interval: float, sort: str) -> None:
    from rich.console import Console
    from rich.live import Live

    universe = connect.current_target().universe
    sampling = _Sampling(sampler, first, interval)
    sampling.start()
    try:
        with _keypresses() as next_key, Live(console=Console(), screen=True, auto_refresh=False) as live:
            while sampling.fatal is None:
                view = overview(universe, sampling.before, sampling.now, sort)
                live.update(render(view, sort, error=sampling.error, height=live.console.height), refresh=True)
                key = next_key()
                if key in ("q", "\x03", "\x04"):
                    return
                sort = _KEYS.get(key, sort)
    except KeyboardInterrupt:
        return
    finally:
        sampling.stop()
    raise sampling.fatal


@contextmanager
def _keypresses() -> Iterator[Callable[[], str]]:
    """A function that returns the key that is pressed next, or nothing after a moment."""
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)

    def next_key() -> str:
        readable, _, _ = select.select([descriptor], [], [], TOP_KEY_SECONDS)
        if not readable:
            return ""
        return os.read(descriptor, 1).decode(errors="replace") or "q"  # At its end, the terminal is gone.

    tty.setcbreak(descriptor)
    try:
        yield next_key
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def render(
    view: Overview, sort: str, *, error: FastnessError | None = None, height: int | None = None
) -> "RenderableType":
    """The view as tables."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    parts: list[RenderableType] = [Text(printing.escape_control(_title(view)), style="bold")]
    if error is not None:
        parts.append(
            Text(printing.escape_control(f"No answer, trying again: {error}"), style="bold red", overflow="ellipsis")
        )
    if view.usage is not None:
        lines = usage_lines(view.universe, view.usage, time.time() * 1_000)[1:5]
        parts.append(Text("   ".join(" ".join(line.split()) for line in lines), overflow="ellipsis", no_wrap=True))
    parts.append(Text(_waits_text(view)))
    if view.nodes is not None:
        parts.append(_nodes_table(view.nodes))
    table = Table(expand=True, box=None, header_style="bold", pad_edge=False)
    for name in _COLUMNS:
        table.add_column(
            f"{name} ▾" if name == sort or (name == "queue" and sort == "name") else name,
            justify="left" if name == "queue" else "right",
            no_wrap=True,
            overflow="ellipsis",
            ratio=1 if name == "queue" else None,
        )
    rows = len(view.queues)
    used = 5 + len(parts) + (len(view.nodes.nodes) if view.nodes is not None else 0)
    shown = rows if height is None else max(min(rows, height - used), 1)
    for row in view.queues[:shown]:
        table.add_row(*_cells(row), style="dim" if row.paused else "")
    parts.append(table)
    if not view.queues:
        parts.append(Text("No queues. Put a message with: fastness queue put jobs hello"))
    elif shown < rows or view.has_more:
        parts.append(Text(f"{shown} of {rows}{' and more' if view.has_more else ''} queues are shown.", style="dim"))
    for name in view.not_allowed:
        parts.append(Text(f"The token does not allow to see the {name}.", style="dim"))
    if height is not None:
        parts.append(Text("q quit   order by: n name  r ready  o oldest  p put/s  a ack/s  d dead", style="dim"))
    return Group(*parts)


def _title(view: Overview) -> str:
    rows = view.queues
    return (
        f"{view.universe}: ready {sum(row.ready for row in rows):,}  leased {sum(row.leased for row in rows):,}  "
        f"dead {sum(row.dead for row in rows):,}  put {_rate(sum(row.put_per_second for row in rows))}/s  "
        f"ack {_rate(sum(row.acked_per_second for row in rows))}/s  "
        f"oldest {_age(max((row.oldest_seconds for row in rows), default=0.0))}"
    )


def _waits_text(view: Overview) -> str:
    waiters = view.lease_waiters + view.lock_waiters
    text = f"waits: {view.lease_waiters:,} for leases, {view.lock_waiters:,} for locks"
    return f"{text}, the longest {_age(view.longest_wait_seconds)}" if waiters else text


def _nodes_table(nodes: Nodes) -> "RenderableType":
    from rich.table import Table

    table = Table(expand=True, box=None, header_style="bold", pad_edge=False)
    for name in ("node", "state", "calls/s", "connections", "consumers", "processor"):
        table.add_column(name, justify="left" if name in ("node", "state") else "right", no_wrap=True)
    for node in nodes.nodes:
        state = "gone" if not node.alive else "maintenance" if node.maintenance else "alive"
        load = node.load
        table.add_row(
            printing.escape_control(node.address or f"{node.host} ({node.pid})"),
            state,
            _rate(load.calls_per_second),
            f"{load.connections:,}",
            f"{load.waiting_consumers:,}",
            f"{load.processor_share:.0%}",
            style="" if node.alive else "red",
        )
    return table


def _cells(row: QueueRow) -> list[str]:
    return [
        printing.escape_control(f"{row.queue} (paused)" if row.paused else row.queue),
        *(f"{count:,}" for count in (row.ready, row.leased, row.delayed, row.blocked, row.dead)),
        _age(row.oldest_seconds),
        _rate(row.put_per_second),
        _rate(row.acked_per_second),
        f"{row.waiting_consumers:,}",
    ]


def _rate(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 10 or not rate else f"{rate:.1f}"


def _age(seconds: float) -> str:
    """4 s, 2 m, 3 h, 5 d; - for nothing."""
    if not seconds:
        return "-"
    for unit, length in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds >= length:
            return f"{seconds / length:,.0f} {unit}"
    return f"{seconds:,.0f} s" if seconds >= 1 else "<1 s"
