"""Metrics, as Prometheus wants them. No label names a message, an agent or a key: a label is a thing there are few of.

Calls are counted in plain dictionaries on the event loop, a group of calls at a time, and only turned into samples when
somebody asks: at a hundred thousand calls a second, a counter with a lock for each would cost more than the calls.
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

from holdfast.errors import Fenced, HoldfastError, NotAllowed, rebuild
from holdfast.kv import Result
from holdfast.plane.batching import call_batch
from holdfast.server import health, tracing
from holdfast.server.authorization import Guards
from holdfast.server.histograms import DWELL_SECONDS, SECONDS, SIZES, Histogram
from holdfast.server.http.problems import Refusal, problem_response
from holdfast.server.logs import correlation_id
from holdfast.server.queue_metrics import read_lag, read_queues
from holdfast.tiers import Tier
from holdfast.wire.frames import Call
from holdfast.wire.leases import AcquireLease
from holdfast.wire.problems import problem_of
from holdfast.wire.queues import Deliveries, Outcomes, QueueStats, ReceiveMessages
from holdfast.wire.requests import Answer, Request
from holdfast.wire.tokens import METRICS

_log = logging.getLogger("holdfast.calls")

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST
_QUEUES_FRESH_SECONDS: Final = 1.0  # Whoever asks more often gets the same depths again.
_LAG_FRESH_SECONDS: Final = 15.0  # A look at every world costs more, and what it finds moves slowly.
_TELLING: Final = (HoldfastError, Outcomes, type(None))  # What calls of a group answer beside that all went well.
_STATES: Final = ("ready", "delayed", "leased", "blocked", "dead")
_TOTALS: Final = {
    "holdfast_queue_put": ("put_total", "Messages that were put."),
    "holdfast_queue_delivered": ("delivered_total", "Deliveries, repeated ones too."),
    "holdfast_queue_acked": ("acked_total", "Messages that were acknowledged."),
    "holdfast_queue_failed": ("failed_total", "Deliveries that failed."),
    "holdfast_queue_dead": ("dead_total", "Messages that went to the dead letters."),
    "holdfast_lease_expired": ("expired_total", "Leases of messages that ended before they were settled."),
}


class Metrics(Collector):
    """What a server counts. Make one for a server, and give it to everything that has something to tell."""

    def __init__(
        self,
        *,
        queues_max: int = 100,
        worlds_max: int = 1_000,
        streams: Callable[[], int] = lambda: 0,
        sessions: Callable[[], int] = lambda: 0,
        exchanges: Callable[[], int] = lambda: 0,
    ) -> None:
        """`streams` tells how many are open, `sessions` how many agents are connected to the relay, and `exchanges` how
        many HTTP requests are being answered."""
        self.requests: Counter[tuple[str, str]] = Counter()  # By operation and outcome.
        self.seconds: dict[str, Histogram] = {}  # By operation.
        self.rejects: Counter[str] = Counter()  # By reason.
        self.fenced = 0
        self.in_flight = 0
        self.waiting = 0  # Of those in flight: waiting for something to come.
        self.lock_wait = Histogram(SECONDS)
        self.group_size = Histogram(SIZES)
        self.sync = Histogram(SECONDS)
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

    def rejected(self, reason: str) -> None:
        """Somebody was refused at a door."""
        self.rejects[reason] += 1

    def synced(self, seconds: float) -> None:
        """The log was synced."""
        self.sync.observe(seconds)

    def answered(self, request: Request[Any], outcome: Any, seconds: float) -> None:
        """A call has its answer, or its error; None if its caller has gone before."""
        op = _op(request.__class__)
        self.requests[op, _code(outcome)] += 1
        self._seconds_of(op).observe(seconds)
        self._note(request, outcome, seconds)

    def answered_together(self, calls: Sequence[Call], outcomes: Sequence[Any], seconds: float) -> None:
        """Calls that were committed together have their answers."""
        self.group_size.observe(len(calls))
        if len(calls) == 1:
            self.answered(calls[0].request, outcomes[0], seconds)
            return
        # Most calls of a group are of few kinds, and of most kinds there is nothing to tell but how many there were.
        both = list(zip([call.request for call in calls], outcomes, strict=True))
        for (request, outcome), count in Counter([(one.__class__, other.__class__) for one, other in both]).items():
            op = _op(request)
            self._seconds_of(op).observe(seconds, count)
            if not issubclass(outcome, _TELLING):
                self.requests[op, "ok"] += count
                continue
            for asked, answer in both:
                if asked.__class__ is request and answer.__class__ is outcome:
                    self.requests[op, _code(answer)] += 1
                    self._note(asked, answer, seconds)

    async def body(self, transport: Any) -> bytes:
        """What `/metrics` answers."""
        await self.refresh(transport)
        return generate_latest(self.registry)

    async def refresh(self, transport: Any) -> None:
        """Look at the queues of `transport`, once a second at most, and at its worlds, more rarely."""
        async with self._reading:
            try:
                if time.monotonic() - self._queues_at > _QUEUES_FRESH_SECONDS:
                    self._queues_at = time.monotonic()
                    await self._look_at_queues(transport)
                if time.monotonic() - self._lag_at > _LAG_FRESH_SECONDS:
                    self._lag_at = time.monotonic()
                    self._lag, self._worlds_cut = await read_lag(transport, self._worlds_max)
            except HoldfastError as error:
                _log.warning("the metrics lack what is in the key space, because it cannot be read: %s", error)
            except Exception:  # What else there is to tell is told.
                _log.exception("the metrics lack what is in the key space, because it cannot be read")

    async def _look_at_queues(self, transport: Any) -> None:
        """Whoever goes away meanwhile leaves what was known before; numbers that cannot be read are not told."""
        try:
            self._queues, self._queues_cut = await read_queues(transport, self._queues_max)
        except Exception:
            self._queues = []
            raise

    def collect(self) -> Iterator[Metric]:
        requests = CounterMetricFamily("holdfast_requests", "Calls, by operation and outcome.", labels=("op", "code"))
        for (op, code), count in sorted(self.requests.items()):
            requests.add_metric((op, code), count)
        yield requests
        seconds = HistogramMetricFamily("holdfast_request_seconds", "How long calls took.", labels=("op",))
        for op, histogram in sorted(self.seconds.items()):
            seconds.add_metric((op,), histogram.buckets(), histogram.sum)
        yield seconds
        yield _histogram("holdfast_lock_wait_seconds", "How long leases were waited for.", self.lock_wait)
        yield _histogram("holdfast_sync_seconds", "How long syncs of the log took.", self.sync)
        yield _histogram("holdfast_commit_group_size", "Calls that were committed together.", self.group_size)
        rejects = CounterMetricFamily("holdfast_rejects", "Who was refused at a door, by reason.", labels=("reason",))
        for reason, count in sorted(self.rejects.items()):
            rejects.add_metric((reason,), count)
        yield rejects
        yield CounterMetricFamily("holdfast_fenced", "Writes that a lease did not entitle to.", value=self.fenced)
        yield GaugeMetricFamily("holdfast_calls_in_flight", "Calls under way.", value=self.in_flight)
        yield GaugeMetricFamily("holdfast_calls_waiting", "Of them: waiting for something to come.", value=self.waiting)
        yield GaugeMetricFamily("holdfast_open_streams", "Streams that are open.", value=self._streams())
        yield GaugeMetricFamily("holdfast_relay_sessions", "Agents that are connected.", value=self._sessions())
        requests_in_flight = "HTTP requests that are being answered, without those that only wait."
        yield GaugeMetricFamily("holdfast_http_requests_in_flight", requests_in_flight, value=self._exchanges())
        yield from self._collect_queues()
        yield from self._collect_deliveries()
        behind = "Records of journals that a compaction would move into segments, or has and not yet removed."
        yield GaugeMetricFamily("holdfast_journal_compaction_lag_records", behind, value=self._lag)
        cut = "1 if there are more worlds than metrics_worlds_max, and some are not told of."
        yield GaugeMetricFamily("holdfast_worlds_cut", cut, value=self._worlds_cut)

    def _collect_deliveries(self) -> Iterator[Metric]:
        labels = ("universe", "queue")
        text = "How long messages were there, from the put to their first delivery."
        dwell = HistogramMetricFamily("holdfast_queue_dwell_seconds", text, labels=labels)
        for at, histogram in sorted(self.dwell.items()):
            dwell.add_metric(at, histogram.buckets(), histogram.sum)
        yield dwell
        text = "Deliveries of messages that had been delivered before."
        redelivered = CounterMetricFamily("holdfast_queue_redelivered", text, labels=labels)
        for at, count in sorted(self.redelivered.items()):
            redelivered.add_metric(at, count)
        yield redelivered

    def _collect_queues(self) -> Iterator[Metric]:
        labels = ("universe", "queue")
        depth = GaugeMetricFamily("holdfast_queue_messages", "Messages, by state.", labels=(*labels, "state"))
        age = GaugeMetricFamily("holdfast_queue_oldest_age_seconds", "Age of the next message.", labels=labels)
        consumers = GaugeMetricFamily("holdfast_queue_waiting_consumers", "Consumers that wait here.", labels=labels)
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
        cut = "1 if there are more queues than metrics_queues_max, and some are not told of."
        yield GaugeMetricFamily("holdfast_queues_cut", cut, value=self._queues_cut)

    def _seconds_of(self, op: str) -> Histogram:
        histogram = self.seconds.get(op)
        if histogram is None:
            histogram = self.seconds[op] = Histogram(SECONDS)
        return histogram

    def _note(self, request: Request[Any], outcome: Any, seconds: float) -> None:
        if isinstance(outcome, Outcomes):
            self.fenced += sum(each.code is not None and _is_fenced(each.code) for each in outcome.outcomes)
        elif isinstance(outcome, Fenced):
            self.fenced += 1
        elif isinstance(outcome, Deliveries) and isinstance(request, ReceiveMessages):
            self._note_deliveries(request, outcome)
        if isinstance(request, AcquireLease) and request.wait_seconds:
            self.lock_wait.observe(seconds)

    def _note_deliveries(self, request: ReceiveMessages, answer: Deliveries) -> None:
        at = (request.universe.lower(), request.queue.lower())
        if at not in self.dwell and len(self.dwell) >= self._queues_max:
            at = ("", "")  # All the queues that there is no room for.
        for message in answer.messages:
            if at not in self.dwell:
                self.dwell[at] = Histogram(DWELL_SECONDS)
            if message.attempts > 1:
                self.redelivered[at] += 1
                continue
            given = request.visibility_seconds
            leased_ms = message.expires_ms - (message.visibility_ms if given is None else given * 1_000)
            self.dwell[at].observe(max(leased_ms - message.created_ms, 0.0) / 1_000)


class MeasuredTransport:
    """A port of an event loop that counts, times and traces what goes through. What it does not name is the port's."""

    def __init__(self, transport: Any, metrics: Metrics) -> None:
        self._transport = transport
        self._metrics = metrics

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    async def call(self, request: Request[Answer], once: Any = None) -> Answer:
        answer: Answer = await self._measured(request, self._transport.call, request, once)
        return answer

    async def send(self, request: Request[Answer], chunks: AsyncIterable[bytes]) -> Answer:
        answer: Answer = await self._measured(request, self._transport.send, request, chunks)
        return answer

    async def receive(self, request: Request[Answer]) -> AsyncIterator[bytes]:
        stream: AsyncIterator[bytes] = await self._measured(request, self._transport.receive, request)
        return stream

    async def transact(self, work: Callable[..., Result], /, *args: Any, tier: Tier, **kwargs: Any) -> Result:
        result: Result = await self._transport.transact(work, *args, tier=tier, **kwargs)
        return result

    async def call_batch(self, calls: Sequence[Call], wanted: Callable[[], bool] = lambda: True) -> list[Any]:
        """The answers to the first of the calls, or their errors, as `plane.groups.call_batch` has it."""
        metrics, started = self._metrics, time.perf_counter()
        metrics.in_flight += len(calls)
        try:
            if tracing.is_on():
                with tracing.group_span([call.request for call in calls]):
                    outcomes = await call_batch(self._transport, calls, wanted)
            else:
                outcomes = await call_batch(self._transport, calls, wanted)
        except Exception as error:
            outcomes = [_unexpected(error, "a group of calls")] * len(calls)
        finally:
            metrics.in_flight -= len(calls)
        seconds = time.perf_counter() - started
        # Whoever waits for an answer does not wait for this.
        asyncio.get_running_loop().call_soon(metrics.answered_together, calls[: len(outcomes)], outcomes, seconds)
        return outcomes

    async def _measured(self, request: Request[Any], work: Callable[..., Any], *args: Any) -> Any:
        metrics, started = self._metrics, time.perf_counter()
        waits = bool(getattr(request, "wait_seconds", 0))
        metrics.in_flight += 1
        metrics.waiting += waits
        outcome: Any = None
        try:
            with ExitStack() as around:
                if waits:
                    around.enter_context(health.waiting())
                if tracing.is_on():
                    around.enter_context(tracing.span(request))
                outcome = await work(*args)
        except HoldfastError as error:
            outcome = error
            raise
        except Refusal:  # The door itself gave up on a body; it knows what to say.
            raise
        except Exception as error:
            outcome = _unexpected(error, _op(request.__class__))
            raise outcome from error
        finally:
            metrics.in_flight -= 1
            metrics.waiting -= waits
            metrics.answered(request, outcome, time.perf_counter() - started)
        return outcome


def metrics_route(metrics: Metrics, transport: Any, guards: Guards) -> Route:
    """`/metrics`. Where tokens are asked for, one that allows `metrics:read` in every universe."""

    async def answer(request: HttpRequest) -> Response:
        try:
            guard = guards.admit(Headers(scope=request.scope), request.client.host if request.client else "")
            permit = getattr(guard, "permit", None)
            if permit is not None:
                permit(METRICS)
        except NotAllowed as error:
            return problem_response(problem_of(error, correlation_id.get()), {}, request.headers)
        return Response(await metrics.body(transport), media_type=CONTENT_TYPE)

    return Route("/metrics", answer, methods=["GET"])


def _histogram(name: str, text: str, histogram: Histogram) -> Metric:
    return HistogramMetricFamily(name, text, buckets=histogram.buckets(), sum_value=histogram.sum)


def _unexpected(error: Exception, what: str) -> HoldfastError:
    """What a caller hears of a fault of ours: nothing about it. The log has the rest."""
    _log.error("%s failed in a way that nobody expected", what, exc_info=error)
    return HoldfastError("The server failed; its log says how")


def _code(outcome: Any) -> str:
    if isinstance(outcome, HoldfastError):
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
