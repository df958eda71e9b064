"""What `fastness pipeline` tells others while it runs: the record in the lake, metrics, lineage and health."""

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import TYPE_CHECKING

import click

from fastness.errors import FastnessError

if TYPE_CHECKING:
    from fastness.pipeline.config import Config, JobResult
    from fastness.pipeline.jobs import JobOptions
    from fastness.pipeline.observation.observers import Observer

_log = logging.getLogger("fastness.pipeline")

metrics_option = click.option(
    "--metrics",
    metavar="FILE",
    help="Write Prometheus metrics into this file, for node_exporter's textfile collector: NAME.prom.",
)
lineage_option = click.option(
    "--lineage",
    metavar="URL",
    envvar="FASTNESS_LINEAGE",
    help="Send OpenLineage events to http(s)://HOST[:PORT][/PATH], or append them to file:PATH.",
)
health_option = click.option(
    "--health",
    metavar="[HOST:]PORT",
    help="Answer /healthz, /readyz and /metrics at this address, while it runs as a service.",
)


class Observation:
    """The observers of one run, and its health."""

    def __init__(self, config: "Config", *, metrics: str | None = None, lineage: str | None = None) -> None:
        from fastness.pipeline.lake.locations import parse_location
        from fastness.pipeline.observation.health import FollowHealth
        from fastness.pipeline.observation.metrics import MetricsFile
        from fastness.pipeline.observation.runs import RunRecorder

        self.health = FollowHealth()
        self.observers: list[Observer] = []
        self._recorder = RunRecorder(parse_location(config.lake, config.storage)) if config.lake else None
        self._file: MetricsFile | None = None
        if self._recorder is not None:
            self.observers.append(self._recorder)
            if metrics is not None:
                self._file = MetricsFile(metrics, self._recorder)
                self.observers.append(self._file)
        if lineage is not None:
            self.observers.append(_lineage(config, lineage))

    @contextmanager
    def following(self, address: str | None) -> "Iterator[JobOptions]":
        """The options of a job that repeats until SIGTERM, with health checks if there is an address."""
        stop = threading.Event()

        def end(_signal: int, _frame: FrameType | None) -> None:
            stop.set()

        with ExitStack() as resources:
            if address is not None:
                from fastness.pipeline.observation.health import serve_health

                resources.enter_context(serve_health(address, self.health, self._metrics))
            if threading.current_thread() is threading.main_thread():
                resources.callback(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, end))
            yield {"follow": True, "stop": stop, "round_ended": self._round_ended}

    def progress(self, shown: "Sequence[Callable[[str, int, int], None]]") -> "Callable[[str, int, int], None]":
        """A progress callback that is also a sign of life."""

        def report(item: str, done: int, total: int) -> None:
            self.health.beat()
            for each in shown:
                each(item, done, total)

        return report

    def _round_ended(self, outcome: "JobResult | FastnessError") -> None:
        self.health.round_ended(outcome)
        if isinstance(outcome, FastnessError) or self._recorder is None:
            return
        try:
            self._recorder.round_ended(outcome)
            if self._file is not None:
                self._file.write()
        except (FastnessError, OSError) as error:
            _log.warning("The record of the run could not be written: %s", error)

    def _metrics(self) -> bytes:
        from fastness.pipeline.observation import metrics

        return metrics.text(metrics.registry(self._recorder.records.values() if self._recorder is not None else ()))


def _lineage(config: "Config", url: str) -> "Observer":
    from fastness.client import tls
    from fastness.pipeline.observation.lineage import Lineage, parent_from, transport

    send = transport(
        url, token=os.environ.get("FASTNESS_LINEAGE_TOKEN"), tls=tls.context(url, ca=config.ca, cert=None, key=None)
    )
    return Lineage(config, send, parent=parent_from(os.environ))
