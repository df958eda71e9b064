"""The history of the console's charts: samples that a server stores whether or not a page is open.

every 10 s ──► a sample of the metrics ──► the rings of an hour and of a day (`layers/samples.py`)
GET /console/history ──► at most 720 points of the rings of all nodes, merged where there are more

Calls, errors and histograms are of one server, and those of all servers are added up. Queues are in the key space, so
every server has the same numbers of them, and they are taken once.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from itertools import zip_longest
from typing import Any, Final

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from fastness.errors import FastnessError
from fastness.kv import Database
from fastness.layers import samples as layer
from fastness.layers.samples import STEPS, Numbers, StoredSample, largest_gauges
from fastness.limits import HISTORY_NODES_MAX, HISTORY_POINTS_MAX, HISTORY_QUEUES_MAX, HISTORY_SECONDS
from fastness.names import UNIVERSE, checked_name
from fastness.server.console.samples import Sample, Samples
from fastness.server.context import ServerContext
from fastness.server.http.middleware import authenticate_request
from fastness.server.problems import JSON, HttpError
from fastness.tiers import Tier
from fastness.wire.permissions import METRICS
from fastness.wire.queues import GetQueueStats

_log = logging.getLogger("fastness.history")

_FORGET_SECONDS: Final = 3_600.0  # How often samples of other nodes are looked for that are too old.
_SERVER: Final = (
    *("calls", "errors", "fenced", "rejected"),
    *("sync", "sync_sum", "group", "group_sum", "lock_wait", "lock_wait_sum"),
)

_COUNTERS: Final = frozenset(_SERVER) - {"rejected"} | {"rejects"}  # Of a point.

Now = Callable[[], int]


def _span_seconds(ring: int) -> int:
    seconds, count = STEPS[ring]
    return seconds * count


def _now_ms() -> int:
    return round(time.time() * 1_000)


class History:
    """Stores samples of one server, and reads them."""

    def __init__(
        self, samples: Samples, database: Database, *, seconds: float = HISTORY_SECONDS, now_ms: Now = _now_ms
    ) -> None:
        self.samples = samples
        self.seconds = seconds
        self.node = "local"  # The only process that has the plane open.
        self._database = database
        self._now_ms = now_ms
        self._stored_ms = -1
        self._forgot_at = float("-inf")
        self._task: asyncio.Task[None] | None = None

    def start(self, node: str) -> None:
        """Store samples from now on, as those of `node`."""
        self.node = node
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def store(self) -> None:
        """Store a sample, unless the newest slot of the first ring has one."""
        sample, queues = await self.samples.full()
        at_ms, step_ms = self._now_ms(), STEPS[0][0] * 1_000
        if at_ms // step_ms == self._stored_ms // step_ms:
            return
        rings = [ring for ring in range(len(STEPS)) if ring == 0 or self.seconds > _span_seconds(ring - 1)]
        stored = _stored(at_ms, sample, queues)
        await self._database.transact_async(layer.store, self.node, stored, rings, tier=Tier.IMPORTANT)
        self._stored_ms = at_ms
        if time.monotonic() - self._forgot_at > _FORGET_SECONDS:
            self._forgot_at = time.monotonic()
            await self._database.transact_async(layer.forget, at_ms, tier=Tier.IMPORTANT)

    async def points(
        self, seconds: float, universe: str, queue: str | None, *, own: bool = False
    ) -> tuple[list[Sample], int]:
        """At most 720 samples of the last `seconds`: of the servers and a universe, or of one queue; of how many
        servers they are. With `own`, of this server alone."""
        now_ms = self._now_ms()
        seconds = min(seconds, self.seconds)
        ring = next((ring for ring in range(len(STEPS)) if seconds <= _span_seconds(ring)), len(STEPS) - 1)
        since_ms = now_ms - round(seconds * 1_000)
        return await asyncio.to_thread(self._read, ring, since_ms, now_ms, universe, queue, own=own)

    def _read(
        self, ring: int, since_ms: int, until_ms: int, universe: str, queue: str | None, *, own: bool
    ) -> tuple[list[Sample], int]:
        points: list[Sample] = []
        total, count = NodeTotal(STEPS[ring][0] * 1_000, since_ms), 0
        for node in [self.node] if own else self._nodes():
            found = self._database.read(
                layer.read, node, ring, since_ms=since_ms, until_ms=until_ms, tier=Tier.IMPORTANT
            )
            if found:
                points, count = [_point(sample, universe, queue) for sample in found], count + 1
                total.add(points)
        if count > 1:
            points = total.points()
        together = -(-len(points) // HISTORY_POINTS_MAX)
        return (merged(points, together) if together > 1 else points), count

    def _nodes(self) -> list[str]:
        """The nodes whose rings are merged, this one first."""
        others = [node for node in self._database.read(layer.nodes, tier=Tier.IMPORTANT) if node != self.node]
        return [self.node, *others][:HISTORY_NODES_MAX]

    async def _run(self) -> None:
        step_ms = STEPS[0][0] * 1_000
        while True:
            await asyncio.sleep((step_ms - self._now_ms() % step_ms) / 1_000)
            try:
                await self.store()
            except FastnessError as error:
                _log.warning("a sample for the history was not stored: %s", error)
            except Exception:  # Keep running: the next sample may be stored.
                _log.exception("a sample for the history was not stored")


class HistoryRoute:
    """Serves the history to pages."""

    def __init__(self, context: ServerContext, history: History | None) -> None:
        self._context = context
        self._history = history
        self._lock = asyncio.Lock()  # One read at a time: a day of samples may have megabytes.

    def route(self) -> Route:
        """`/console/history`."""
        return Route("/console/history", self._answer, methods=["GET"])

    async def _answer(self, request: HttpRequest) -> Response:
        authorizer = authenticate_request(self._context, request.headers, request.client.host if request.client else "")
        given = request.query_params
        universe = checked_name("universe", given.get("universe", UNIVERSE))
        queue = given.get("queue")
        if queue is None:
            authorizer.authorize_verb(METRICS)
        else:
            authorizer.authorize(GetQueueStats(checked_name("queue", queue), universe))
        seconds = _seconds(given.get("seconds", "3600"))
        servers = given.get("servers", "all")
        if servers not in ("all", "own"):
            raise HttpError(400, "invalid_query", f"servers is {servers[:80]!r}; give all or own")
        body: dict[str, Any] = {"kept_seconds": 0, "now_ms": _now_ms(), "samples": [], "servers": 0}
        body["queues_max"] = HISTORY_QUEUES_MAX
        if self._history is not None:
            async with self._lock:
                found, count = await self._history.points(seconds, universe, queue, own=servers == "own")
            body |= {"kept_seconds": self._history.seconds, "samples": found, "servers": count}
        return Response(msgspec.json.encode(body), headers={"Cache-Control": "no-store"}, media_type=JSON)


class NodeTotal:
    """Adds up the points of several servers.

    Their counters begin at zero with each start, so what is added up is how much each has grown since its last point.
    """

    def __init__(self, step_ms: int, since_ms: int) -> None:
        self._step_ms = step_ms
        self._since_ms = since_ms
        self._by_step: dict[int, Sample] = {}  # Counters: by how much they have grown.
        self._started_ms = 0

    def add(self, points: list[Sample]) -> None:
        """Add the points of one server, in the order of their times."""
        before: Sample = {"started_ms": -1} if points[0]["started_ms"] >= self._since_ms else points[0]
        for point in points:
            if point["started_ms"] != before["started_ms"]:
                before = {}
            step = self._by_step.setdefault(point["at_ms"] // self._step_ms, {"at_ms": 0, "queues": {}})
            step["at_ms"] = max(step["at_ms"], point["at_ms"])
            for name in _COUNTERS & point.keys():
                step[name] = _add(step.get(name, 0), _growth(point[name], before.get(name, 0)))
            for universe, numbers in point["queues"].items():
                so_far = step["queues"].get(universe, {})
                step["queues"][universe] = {
                    name: max(so_far.get(name, 0), numbers.get(name, 0)) for name in so_far | numbers
                }
            before = point
        self._started_ms = max(self._started_ms, points[-1]["started_ms"])

    def points(self) -> list[Sample]:
        """The points of all servers together, as those of one that was never started again."""
        found: list[Sample] = []
        total: Sample = {}
        for _, step in sorted(self._by_step.items()):
            total = {name: _add(total.get(name, 0), step.get(name, 0)) for name in _COUNTERS & (total | step).keys()}
            found.append({**step, **total, "started_ms": self._started_ms})
        return found


def _growth(after: Any, before: Any) -> Any:
    return _combined(after, before, lambda one, other: max(one - other, 0))


def _add(one: Any, other: Any) -> Any:
    return _combined(one, other, lambda one, other: one + other)


def _combined(one: Any, other: Any, combine: Callable[[float, float], float]) -> Any:
    """Combine two numbers, or all numbers of two lists or dictionaries; a missing one is zero."""
    if isinstance(one, dict) or isinstance(other, dict):
        one, other = one or {}, other or {}
        return {name: combine(one.get(name, 0), other.get(name, 0)) for name in one | other}
    if isinstance(one, list) or isinstance(other, list):
        pairs = zip_longest(one or [], other or [], fillvalue=0)
        return [combine(*pair) for pair in pairs]
    return combine(one, other)


def merged(points: list[Sample], together: int) -> list[Sample]:
    """Points of which `together` in a row become one: the last one, with the largest of each gauge.

    Points before and after a restart stay apart, because their counters cannot be compared.
    """
    groups: list[list[Sample]] = []
    for point in points:
        if groups and len(groups[-1]) < together and groups[-1][-1]["started_ms"] == point["started_ms"]:
            groups[-1].append(point)
        else:
            groups.append([point])
    return [_merged(group) for group in groups]


def _merged(group: list[Sample]) -> Sample:
    queues: dict[str, Numbers] = {}
    for point in group:
        for universe, numbers in point["queues"].items():
            so_far = queues.get(universe, {})
            queues[universe] = so_far | largest_gauges(numbers, so_far)
    return {**group[-1], "queues": queues}


def _point(sample: StoredSample, universe: str, queue: str | None) -> Sample:
    """A stored sample in the form of a live one, with one universe; of a queue, with its numbers alone."""
    times = {"at_ms": sample.at_ms, "started_ms": sample.started_ms}
    if queue is not None:
        numbers = sample.queues.get(universe, {}).get(queue)
        return {**times, "queues": {} if numbers is None else {universe: numbers}}
    own = sample.universes.get(universe)
    server = {name: value for name, value in sample.numbers.items() if name != "rejected"}
    rejects = {"all": sample.numbers.get("rejected", 0)}
    return {**times, **server, "rejects": rejects, "queues": {} if own is None else {universe: own}}


def _stored(at_ms: int, sample: Sample, queues: dict[tuple[str, str], Numbers]) -> StoredSample:
    """A sample as it is stored."""
    numbers: dict[str, Any] = {**sample, "rejected": sum(sample["rejects"].values())}
    by_universe: dict[str, dict[str, Numbers]] = {}
    for (universe, queue), each in queues.items():
        by_universe.setdefault(universe, {})[queue] = _short_all(each)
    return StoredSample(
        at_ms,
        sample["started_ms"],
        {name: _short(numbers[name]) for name in _SERVER if name in numbers},
        {universe: _short_all(each) for universe, each in sample["queues"].items()},
        by_universe,
    )


def _short_all(numbers: Numbers) -> Numbers:
    return {name: _short(value) for name, value in numbers.items() if value}


def _short(value: Any) -> Any:
    """Whole numbers as integers, which take fewer bytes."""
    if isinstance(value, list):
        return [_short(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= HISTORY_SECONDS:
        raise HttpError(400, "invalid_query", f"seconds is {text[:80]!r}; give 1 to {HISTORY_SECONDS}")
    return seconds
