"""Prometheus metrics of a server. No label names a message, an agent or a key, which keeps the number of series small.

Calls are counted in plain dictionaries on the event loop, a batch at a time, and become samples only when they are
scraped: at 100,000 calls per second, counters with locks would cost more than the calls.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, Final

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector
from starlette.datastructures import Headers
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from fastness.errors import FastnessError, Fenced, NotAllowed, rebuild
from fastness.kv import Result
from fastness.layers.idempotency import KeyedCall
from fastness.lock_rules import DATA_LEVELS
from fastness.server import health, tracing
from fastness.server.authorization import Authenticator
from fastness.server.histograms import DWELL_SECONDS, SECONDS, SIZES, Histogram, Recorder, no_recorder
from fastness.server.logs import correlation_id
from fastness.server.problems import HttpError, problem_response
from fastness.server.queue_metrics import read_lag, read_queues
from fastness.server.refusals import mark_counted
from fastness.server.transport import ServerTransport
from fastness.tiers import Tier
from fastness.wire.frames import Call
from fastness.wire.leases import AcquireLease
from fastness.wire.permissions import METRICS
from fastness.wire.problems import problem_of
from fastness.wire.queues import Deliveries, Outcomes, PackedLease, QueueStats, ReceiveMessages
from fastness.wire.requests import Answer, Request
from fastness.wire.stored_messages import put_at_ms

_log = logging.getLogger("fastness.calls")

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST
_QUEUES_FRESH_SECONDS: Final = 1.0  # Scrapes within this time get the same depths.
_LAG_FRESH_SECONDS: Final = 15.0  # Reading every world costs more, and the lag changes slowly.
_INSPECTED: Final = (FastnessError, Outcomes, type(None))  # Outcomes that are more than "ok" to the metrics.
_STATES: Final = ("ready", "delayed", "leased", "blocked", "dead")
_TOTALS: Final = {
    "fastness_queue_put": ("put_total", "Messages that were enqueued."),
    "fastness_queue_delivered": ("delivered_total", "Deliveries of messages, redeliveries included."),
    "fastness_queue_acked": ("acked_total", "Messages that were acknowledged."),
    "fastness_queue_failed": ("failed_total", "Deliveries that failed."),
    "fastness_queue_dead": ("dead_total", "Messages that became dead letters."),
    "fastness_lease_expired": ("expired_total", "Leases of messages that expired before the messages were settled."),
}


class Metrics(Collector):
    """The metrics of one server."""

    def __init__(
        self,
        *,
        queues_max: int = 100,
        worlds_max: int = 1_000,
        streams: Callable[[], int] = lambda: 0,
        sessions: Callable[[], int] = lambda: 0,
        exchanges: Callable[[], int] = lambda: 0,
        recorder: Recorder = no_recorder,
    ) -> None:
        """`streams` returns the number of open streams, `sessions` that of agents connected to the relay, and
        `exchanges` that of HTTP requests in flight. `recorder` also gets the values of all histograms."""
        self._recorder = recorder
        self.requests: Counter[tuple[str, str]] = Counter()  # By operation and outcome.
        self.seconds: dict[str, Histogram] = {}  # By operation.
        self.rejects: Counter[str] = Counter()  # By reason.
        self.fenced = 0
        self.in_flight = 0
        self.waiting = 0  # Those in flight that wait for messages or locks.
        self.lock_wait = {
            level: self._new_histogram("fastness_lock_wait_seconds", SECONDS, level=level)
            for level in ("lease", *DATA_LEVELS)
        }
        self.group_size = self._new_histogram("fastness_commit_group_size", SIZES)
        self.sync = self._new_histogram("fastness_sync_seconds", SECONDS)
        self.dwell: dict[tuple[str, str], Histogram] = {}  # By universe and queue.
        self.redelivered: Counter[tuple[str, str]] = Counter()
        self._streams = streams
        self._sessions = sessions
        self._exchanges = exchanges
        self._queues_max = queues_max
        self._queues: list[tuple[str, QueueStats]] = []
        self._queues_cut = False
        self._queues_at = float("-inf")
        self._worlds_max = worlds_max
        self._lag, self._worlds_cut = 0, False
        self._lag_at = float("-inf")
        self._reading = asyncio.Lock()
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self.registry)

    def count_reject(self, reason: str) -> None:
        """Count a refused request or connection."""
        mark_counted()
        self.rejects[reason] += 1

    def observe_lock_wait(self, level: str, seconds: float) -> None:
        """Record how long a caller waited for a lease or for locks of a level."""
        self.lock_wait[level].observe(seconds)

    def observe_sync(self, seconds: float) -> None:
        """Record the duration of a sync of the log."""
        self.sync.observe(seconds)

    def count_call(self, request: Request[Any], outcome: Any, seconds: float) -> None:
        """Record a call and its answer or error; None if the call was cancelled."""
        op = _op(request.__class__)
        self.requests[op, _code(outcome)] += 1
        self._seconds_of(op).observe(seconds)
        self._inspect(request, outcome, seconds)

    def count_batch(self, calls: Sequence[Call], outcomes: Sequence[Any], seconds: float) -> None:
        """Record the calls of one batch."""
        self.group_size.observe(len(calls))
        if len(calls) == 1:
            self.count_call(calls[0].request, outcomes[0], seconds)
            return
        # A batch has few types of calls, and for most of them only the count matters.
        pairs = list(zip([call.request for call in calls], outcomes, strict=True))
        for (request, outcome), count in Counter([(one.__class__, other.__class__) for one, other in pairs]).items():
            op = _op(request)
            self._seconds_of(op).observe(seconds, count)
            if not issubclass(outcome, _INSPECTED):
                self.requests[op, "ok"] += count
                continue
            for each, answer in pairs:
                if each.__class__ is request and answer.__class__ is outcome:
                    self.requests[op, _code(answer)] += 1
                    self._inspect(each, answer, seconds)

    async def body(self, transport: ServerTransport) -> bytes:
        """The response body of `/metrics`."""
        await self.refresh(transport)
        return generate_latest(self.registry)

    async def refresh(self, transport: ServerTransport) -> None:
        """Read the depths of queues, at most once per second, and the lag of worlds, less often."""
        async with self._reading:
            try:
                if time.monotonic() - self._queues_at > _QUEUES_FRESH_SECONDS:
                    self._queues_at = time.monotonic()
                    await self._read_queues(transport)
                if time.monotonic() - self._lag_at > _LAG_FRESH_SECONDS:
                    self._lag_at = time.monotonic()
                    self._lag, self._worlds_cut = await read_lag(transport, self._worlds_max)
            except FastnessError as error:
                _log.warning("queue and journal metrics are missing, because the key space cannot be read: %s", error)
            except Exception:  # The other metrics are still reported.
                _log.exception("queue and journal metrics are missing: unexpected error")

    async def _read_queues(self, transport: ServerTransport) -> None:
        """Read the queues. A cancelled read keeps the old values; a failed one reports none."""
        try:
            self._queues, self._queues_cut = await read_queues(transport, self._queues_max)
        except Exception:
            self._queues = []
            raise

    def collect(self) -> Iterator[Metric]:
        requests = CounterMetricFamily("fastness_requests", "Calls, by operation and outcome.", labels=("op", "code"))
        for (op, code), count in sorted(self.requests.items()):
            requests.add_metric((op, code), count)
        yield requests
        seconds = HistogramMetricFamily("fastness_request_seconds", "Duration of calls.", labels=("op",))
        for op, histogram in sorted(self.seconds.items()):
            seconds.add_metric((op,), histogram.buckets(), histogram.sum)
        yield seconds
        lock_wait = HistogramMetricFamily(
            "fastness_lock_wait_seconds", "Time that acquirers waited for leases and ordered locks.", labels=("level",)
        )
        for level, histogram in self.lock_wait.items():
            lock_wait.add_metric((level,), histogram.buckets(), histogram.sum)
        yield lock_wait
        yield _histogram("fastness_sync_seconds", "Duration of syncs of the log.", self.sync)
        yield _histogram("fastness_commit_group_size", "Calls per commit.", self.group_size)
        rejects = CounterMetricFamily(
            "fastness_rejects",
            "Requests and connections that were refused before an operation started.",
            labels=("reason",),
        )
        for reason, count in sorted(self.rejects.items()):
            rejects.add_metric((reason,), count)
        yield rejects
        yield CounterMetricFamily(
            "fastness_fenced", "Writes that were refused because their lease was no longer valid.", value=self.fenced
        )
        yield GaugeMetricFamily("fastness_calls_in_flight", "Calls in flight.", value=self.in_flight)
        yield GaugeMetricFamily(
            "fastness_calls_waiting", "Calls in flight that wait for messages or locks.", value=self.waiting
        )
        yield GaugeMetricFamily("fastness_open_streams", "Open streams.", value=self._streams())
        yield GaugeMetricFamily(
            "fastness_relay_sessions", "Agents that are connected to the relay.", value=self._sessions()
        )
        requests_in_flight = "HTTP requests in flight, without those that wait for messages or locks."
        yield GaugeMetricFamily("fastness_http_requests_in_flight", requests_in_flight, value=self._exchanges())
        yield from self._collect_queues()
        yield from self._collect_deliveries()
        behind = "Journal records that a compaction would move into segments, or has moved and not yet removed."
        yield GaugeMetricFamily("fastness_journal_compaction_lag_records", behind, value=self._lag)
        cut = "1 if there are more worlds than metrics_worlds_max, so that some are not measured."
        yield GaugeMetricFamily("fastness_worlds_cut", cut, value=self._worlds_cut)

    def _collect_deliveries(self) -> Iterator[Metric]:
        labels = ("universe", "queue")
        text = "Time of messages from their enqueue to their first delivery."
        dwell = HistogramMetricFamily("fastness_queue_dwell_seconds", text, labels=labels)
        for at, histogram in sorted(self.dwell.items()):
            dwell.add_metric(at, histogram.buckets(), histogram.sum)
        yield dwell
        text = "Redeliveries of messages."
        redelivered = CounterMetricFamily("fastness_queue_redelivered", text, labels=labels)
        for at, count in sorted(self.redelivered.items()):
            redelivered.add_metric(at, count)
        yield redelivered

    def _collect_queues(self) -> Iterator[Metric]:
        labels = ("universe", "queue")
        depth = GaugeMetricFamily("fastness_queue_messages", "Messages, by state.", labels=(*labels, "state"))
        age = GaugeMetricFamily("fastness_queue_oldest_age_seconds", "Age of the next message.", labels=labels)
        consumers = GaugeMetricFamily("fastness_queue_waiting_consumers", "Consumers that wait.", labels=labels)
        totals = {name: CounterMetricFamily(name, text, labels=labels) for name, (_, text) in _TOTALS.items()}
        for universe, stats in self._queues:
            at = (universe, stats.queue)
            for state in _STATES:
                depth.add_metric((*at, state), getattr(stats, state))
            age.add_metric(at, stats.head_age_seconds)
            consumers.add_metric(at, stats.waiting_consumers)
            for name, (field, _) in _TOTALS.items():
                totals[name].add_metric(at, getattr(stats, field))
        yield from (depth, age, consumers, *totals.values())
        cut = "1 if there are more queues than metrics_queues_max, so that some are not measured."
        yield GaugeMetricFamily("fastness_queues_cut", cut, value=self._queues_cut)

    def _seconds_of(self, op: str) -> Histogram:
        histogram = self.seconds.get(op)
        if histogram is None:
            histogram = self.seconds[op] = self._new_histogram("fastness_request_seconds", SECONDS, op=op)
        return histogram

    def _new_histogram(self, name: str, bounds: Sequence[float], **labels: str) -> Histogram:
        return Histogram(bounds, self._recorder(name, bounds, labels))

    def _inspect(self, request: Request[Any], outcome: Any, seconds: float) -> None:
        if isinstance(outcome, Outcomes):
            self.fenced += sum([each.code is not None and _is_fenced(each.code) for each in outcome.outcomes])
            self.fenced += sum([_is_fenced(each.code) for each in outcome.refused])
        elif isinstance(outcome, Fenced):
            self.fenced += 1
        elif isinstance(outcome, Deliveries) and isinstance(request, ReceiveMessages):
            self._count_deliveries(request, outcome)
            self.fenced += sum([_is_fenced(each.code) for each in outcome.refused])
        if isinstance(request, AcquireLease) and request.wait_seconds:
            self.observe_lock_wait("lease", seconds)

    def _count_deliveries(self, request: ReceiveMessages, answer: Deliveries) -> None:
        at = (request.universe, request.queue)
        if at not in self.dwell and len(self.dwell) >= self._queues_max:
            at = ("", "")  # All queues beyond the limit.
        if at not in self.dwell and answer.count:
            labels = {"universe": at[0], "queue": at[1]}
            self.dwell[at] = self._new_histogram("fastness_queue_dwell_seconds", DWELL_SECONDS, **labels)
        for lease in answer.packed:
            self._count_packed(at, lease)
        for message in answer.messages:
            if message.attempts > 1:
                self.redelivered[at] += 1
                continue
            visibility_seconds = request.visibility_seconds
            visibility_ms = message.visibility_ms if visibility_seconds is None else visibility_seconds * 1_000
            leased_ms = message.expires_ms - visibility_ms
            self.dwell[at].observe(max(leased_ms - message.created_ms, 0.0) / 1_000)

    def _count_packed(self, at: tuple[str, str], lease: PackedLease) -> None:
        put_ms = Counter[int]()  # Messages of one batch were put in the same few milliseconds.
        for position in lease.positions:
            if lease.attempt_at(position) > 1:
                self.redelivered[at] += 1
            else:
                put_ms[put_at_ms(lease.id_at(position))] += 1
        for at_ms, times in put_ms.items():
            self.dwell[at].observe(max(lease.leased_ms - at_ms, 0) / 1_000, times)


class MeasuredTransport:
    """A transport that counts, times and traces its calls."""

    def __init__(self, transport: ServerTransport, metrics: Metrics) -> None:
        self._transport = transport
        self._metrics = metrics
        self.services = transport.services
        self.ingress = transport.ingress
        self.lease_renewer = transport.services.lease_renewer

    async def call(self, request: Request[Answer], call: KeyedCall | None = None) -> Answer:
        answer: Answer = await self._measured(request, self._transport.call, request, call)
        return answer

    async def send(self, request: Request[Answer], chunks: AsyncIterable[bytes]) -> Answer:
        answer: Answer = await self._measured(request, self._transport.send, request, chunks)
        return answer

    async def receive(self, request: Request[Answer]) -> AsyncIterator[bytes]:
        stream: AsyncIterator[bytes] = await self._measured(request, self._transport.receive, request)
        return stream

    async def transact(self, work: Callable[..., Result], /, *args: Any, tier: Tier, **kwargs: Any) -> Result:
        return await self._transport.transact(work, *args, tier=tier, **kwargs)

    async def call_all(self, calls: Sequence[Call], is_wanted: Callable[[], bool] | None = None) -> list[object]:
        """The answers to the first calls, or their errors."""
        metrics, started = self._metrics, time.perf_counter()
        metrics.in_flight += len(calls)
        try:
            if tracing.is_on():
                with tracing.batch_span([call.request for call in calls]):
                    outcomes = await self._transport.call_all(calls, is_wanted)
            else:
                outcomes = await self._transport.call_all(calls, is_wanted)
        except Exception as error:
            outcomes = [_unexpected_error(error, "a batch of calls")] * len(calls)
        finally:
            metrics.in_flight -= len(calls)
        seconds = time.perf_counter() - started
        # Counted after the replies are sent.
        asyncio.get_running_loop().call_soon(metrics.count_batch, calls[: len(outcomes)], outcomes, seconds)
        return outcomes

    async def _measured(self, request: Request[Any], work: Callable[..., Any], *args: Any) -> Any:
        metrics, started = self._metrics, time.perf_counter()
        mark_counted()
        waits = bool(getattr(request, "wait_seconds", 0))
        metrics.in_flight += 1
        metrics.waiting += waits
        outcome: Any = None
        try:
            with ExitStack() as stack:
                if waits:
                    stack.enter_context(health.waiting())
                if tracing.is_on():
                    stack.enter_context(tracing.span(request))
                outcome = await work(*args)
        except FastnessError as error:
            outcome = error
            raise
        except HttpError:  # The HTTP API refuses the body and has the response.
            raise
        except Exception as error:
            outcome = _unexpected_error(error, _op(request.__class__))
            raise outcome from error
        finally:
            metrics.in_flight -= 1
            metrics.waiting -= waits
            metrics.count_call(request, outcome, time.perf_counter() - started)
        return outcome


def metrics_route(metrics: Metrics, transport: ServerTransport, authenticator: Authenticator) -> Route:
    """`/metrics`. With tokens on, it needs one that allows `metrics:read` in every universe."""

    async def answer(request: HttpRequest) -> Response:
        try:
            client = request.client.host if request.client else ""
            authorizer = authenticator.authenticate(Headers(scope=request.scope), client)
            authorizer.authorize_verb(METRICS)
        except NotAllowed as error:
            return problem_response(problem_of(error, correlation_id.get()), {}, request.headers)
        return Response(await metrics.body(transport), media_type=CONTENT_TYPE)

    return Route("/metrics", answer, methods=["GET"])


def _histogram(name: str, text: str, histogram: Histogram) -> Metric:
    return HistogramMetricFamily(name, text, buckets=histogram.buckets(), sum_value=histogram.sum)


def _unexpected_error(error: Exception, operation: str) -> FastnessError:
    """Log the error; return one without details for the caller."""
    _log.error("unexpected error in %s", operation, exc_info=error)
    return FastnessError("Unexpected error in the server; see its log")


def _code(outcome: Any) -> str:
    if isinstance(outcome, FastnessError):
        return outcome.code
    return "cancelled" if outcome is None else "ok"


def _op(request: type[Request[Any]]) -> str:
    return str(request.__struct_config__.tag)


_FENCED: dict[str, bool] = {}


def _is_fenced(code: str) -> bool:
    known = _FENCED.get(code)
    if known is None:
        known = _FENCED[code] = isinstance(rebuild(code, code), Fenced)
    return known
