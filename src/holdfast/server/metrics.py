"""Metrics, as Prometheus wants them. No label names a message, an agent or a key: a label is a thing there are few of.

Calls are counted in plain dictionaries on the event loop, a group of calls at a time, and only turned into samples when
somebody asks: at a hundred thousand calls a second, a counter with a lock for each would cost more than the calls.
"""

import asyncio
import logging
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any, Final

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector
from starlette.datastructures import Headers
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from holdfast.errors import Fenced, HoldfastError, NotAllowed
from holdfast.errors.codes import rebuild
from holdfast.kv import Result, Subspace
from holdfast.kv.keys import unpack
from holdfast.plane.groups import call_group
from holdfast.server import health, tracing
from holdfast.server.doors import Guards
from holdfast.server.http.refusals import Refusal, problem_response
from holdfast.server.logs import correlation_id
from holdfast.tiers import Tier
from holdfast.wire.frames import Call
from holdfast.wire.leases import AcquireLease
from holdfast.wire.pairs import ScanPairs
from holdfast.wire.problems import problem_of
from holdfast.wire.queues import GetQueueStats, ListQueues, Outcomes, QueueStats
from holdfast.wire.requests import Answer, Request
from holdfast.wire.tokens import METRICS

_log = logging.getLogger("holdfast.calls")

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST
_SECONDS: Final = (
    0.0001,
    0.00025,
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    10.0,
    30.0,
)
_SIZES: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1_024, 4_096)
_QUEUES_FRESH_SECONDS: Final = 1.0  # Whoever asks more often gets the same depths again.
_PAGE: Final = 100
_STATES: Final = ("ready", "delayed", "leased", "blocked", "dead")
_TOTALS: Final = {
    "holdfast_queue_put": ("put_total", "Messages that were put."),
    "holdfast_queue_delivered": ("delivered_total", "Deliveries, repeated ones too."),
    "holdfast_queue_acked": ("acked_total", "Messages that were acknowledged."),
    "holdfast_queue_failed": ("failed_total", "Deliveries that failed."),
    "holdfast_queue_dead": ("dead_total", "Messages that went to the dead letters."),
    "holdfast_lease_expired": ("expired_total", "Leases of messages that ended before they were settled."),
}


class Histogram:
    """Counts by size. One thread at a time."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def buckets(self) -> list[tuple[str, float]]:
        """Running totals by upper bound, as Prometheus wants them."""
        total, rows = 0, []
        for bound, count in zip((*map(float, self.bounds), float("inf")), self.counts, strict=True):
            total += count
            rows.append(("+Inf" if bound == float("inf") else str(bound), float(total)))
        return rows


class Metrics(Collector):
    """What a server counts. Make one for a server, and give it to everything that has something to tell."""

    def __init__(
        self,
        *,
        queues_max: int = 100,
        streams: Callable[[], int] = lambda: 0,
        exchanges: Callable[[], int] = lambda: 0,
    ) -> None:
        """`streams` tells how many are open, `exchanges` how many HTTP requests are being answered."""
        self.requests: Counter[tuple[str, str]] = Counter()  # By operation and outcome.
        self.seconds: dict[str, Histogram] = {}  # By operation.
        self.rejects: Counter[str] = Counter()  # By reason.
        self.fenced = 0
        self.in_flight = 0
        self.waiting = 0  # Of those in flight: waiting for something to come.
        self.lock_wait = Histogram(_SECONDS)
        self.group_size = Histogram(_SIZES)
        self.sync = Histogram(_SECONDS)
        self._streams = streams
        self._exchanges = exchanges
        self._queues_max = queues_max
        self._queues: list[tuple[str, QueueStats]] = []
        self._queues_cut = False
        self._queues_at = float("-inf")
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
        op = _op(request)
        self.requests[op, _code(outcome)] += 1
        self._seconds_of(op).observe(seconds)
        self._note(request, outcome, seconds)

    def answered_together(self, calls: Sequence[Call], outcomes: Sequence[Any], seconds: float) -> None:
        """Calls that were committed together have their answers."""
        ops: Counter[str] = Counter()
        for call, outcome in zip(calls, outcomes, strict=True):
            op = _op(call.request)
            ops[op] += 1
            self.requests[op, _code(outcome)] += 1
            self._note(call.request, outcome, seconds)
        for op, count in ops.items():
            self._seconds_of(op).observe(seconds, count)
        self.group_size.observe(len(calls))

    async def body(self, port: Any) -> bytes:
        """What `/metrics` answers; looks at the queues of `port` at most once a second."""
        async with self._reading:
            if time.monotonic() - self._queues_at > _QUEUES_FRESH_SECONDS:
                try:
                    self._queues, self._queues_cut = await read_queues(port, self._queues_max)
                except HoldfastError as error:
                    _log.warning("the metrics have no queues, because they cannot be read: %s", error)
                    self._queues = []
                self._queues_at = time.monotonic()
        return generate_latest(self.registry)

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
        requests_in_flight = "HTTP requests that are being answered, without those that only wait."
        yield GaugeMetricFamily("holdfast_http_requests_in_flight", requests_in_flight, value=self._exchanges())
        yield from self._collect_queues()

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
            histogram = self.seconds[op] = Histogram(_SECONDS)
        return histogram

    def _note(self, request: Request[Any], outcome: Any, seconds: float) -> None:
        if isinstance(outcome, Outcomes):
            self.fenced += sum(each.code is not None and _is_fenced(each.code) for each in outcome.outcomes)
        elif isinstance(outcome, Fenced):
            self.fenced += 1
        if isinstance(request, AcquireLease) and request.wait_seconds:
            self.lock_wait.observe(seconds)


class MeasuredPort:
    """A port of an event loop that counts, times and traces what goes through. What it does not name is the port's."""

    def __init__(self, port: Any, metrics: Metrics) -> None:
        self._port = port
        self._metrics = metrics

    def __getattr__(self, name: str) -> Any:
        return getattr(self._port, name)

    async def call(self, request: Request[Answer], once: Any = None) -> Answer:
        answer: Answer = await self._measured(request, self._port.call, request, once)
        return answer

    async def send(self, request: Request[Answer], chunks: AsyncIterable[bytes]) -> Answer:
        answer: Answer = await self._measured(request, self._port.send, request, chunks)
        return answer

    async def receive(self, request: Request[Answer]) -> AsyncIterator[bytes]:
        stream: AsyncIterator[bytes] = await self._measured(request, self._port.receive, request)
        return stream

    async def transact(self, work: Callable[..., Result], /, *args: Any, tier: Tier, **kwargs: Any) -> Result:
        result: Result = await self._port.transact(work, *args, tier=tier, **kwargs)
        return result

    async def call_group(self, calls: Sequence[Call], wanted: Callable[[], bool] = lambda: True) -> list[Any]:
        """The answers to the first of the calls, or their errors, as `plane.groups.call_group` has it."""
        metrics, started = self._metrics, time.perf_counter()
        metrics.in_flight += len(calls)
        try:
            with tracing.group_span([call.request for call in calls]) if tracing.is_on() else nullcontext():
                outcomes = await call_group(self._port, calls, wanted)
        except Exception as error:
            outcomes = [_unexpected(error, "a group of calls")] * len(calls)
        finally:
            metrics.in_flight -= len(calls)
        metrics.answered_together(calls[: len(outcomes)], outcomes, time.perf_counter() - started)
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
            outcome = _unexpected(error, _op(request))
            raise outcome from error
        finally:
            metrics.in_flight -= 1
            metrics.waiting -= waits
            metrics.answered(request, outcome, time.perf_counter() - started)
        return outcome


def metrics_route(metrics: Metrics, port: Any, guards: Guards) -> Route:
    """`/metrics`. Where tokens are asked for, one that allows `metrics:read` in every universe."""

    async def answer(request: HttpRequest) -> Response:
        try:
            guard = guards.admit(Headers(scope=request.scope), request.client.host if request.client else "")
            permit = getattr(guard, "permit", None)
            if permit is not None:
                permit(METRICS)
        except NotAllowed as error:
            return problem_response(problem_of(error, correlation_id.get()), {}, request.headers)
        return Response(await metrics.body(port), media_type=CONTENT_TYPE)

    return Route("/metrics", answer, methods=["GET"])


async def read_queues(port: Any, most: int) -> tuple[list[tuple[str, QueueStats]], bool]:
    """The counts of at most `most` queues, in order, and whether there are more."""
    found: list[tuple[str, QueueStats]] = []
    async for universe, queue in _queues(port):
        if len(found) >= most:
            return found, True
        found.append((universe, await port.call(GetQueueStats(queue, universe, tier=Tier.IMPORTANT))))
        await asyncio.sleep(0)  # A scrape holds up nobody's calls.
    return found, False


async def _queues(port: Any) -> AsyncIterator[tuple[str, str]]:
    async for universe in _universes(port):
        after = ""
        while names := (await port.call(ListQueues(after, _PAGE, universe, tier=Tier.IMPORTANT))).names:
            after = names[-1]
            for name in names:
                yield universe, name


async def _universes(port: Any) -> AsyncIterator[str]:
    """Every universe: the second element of all keys that begin with "u"; one look jumps over all keys of one."""
    rooms = Subspace("u")
    begin, end = rooms.range()
    while pairs := (await port.call(ScanPairs(begin, end, 1, tier=Tier.IMPORTANT))).pairs:
        name, ending, _ = pairs[0][0][len(rooms.prefix) :].partition(b"\x00")  # Names have no zero byte.
        (universe,) = unpack(name + ending)
        yield universe
        begin = rooms.key(universe) + b"\xff"


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


def _op(request: Request[Any]) -> str:
    return str(type(request).__struct_config__.tag)


_FENCED: dict[str, bool] = {}


def _is_fenced(code: str) -> bool:
    known = _FENCED.get(code)
    if known is None:
        known = _FENCED[code] = isinstance(rebuild(code, code), Fenced)
    return known
