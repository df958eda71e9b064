"""Enforces the quotas of universes, and counts what they hold.

Counting exactly would make one key hot for every put of a universe. So what a universe holds is *measured* now and
then, and what is accepted since is *counted up* in memory:

    used = measured + what was added since the measurement began

What is acked or deleted is only seen by the next measurement. So the count may be too high and is never too low. Where
one process has the key space, a universe is never over its quota. Where several servers share it, it is over by at most
what the others accept in `QUOTA_MEASURE_SECONDS`. Another server knows a new quota after as long. Until its first
measurement has ended, it accepts at most the quota by itself, and counts it.

    put ──► used + new <= limit ──yes──► counted, then committed
                 │no
                 ├── one process: measured in the same transaction, and compared again
                 └── several: refused; a measurement starts at once, so that a repeated call meets it

A transaction adds before it is committed. A measurement that does not see it yet keeps what was added since the oldest
running transaction began: every transaction has a ticket, and additions are kept by ticket.
"""

import threading
from collections import Counter, OrderedDict
from collections.abc import Mapping
from time import monotonic, thread_time
from typing import Any, Final

import msgspec

from fastness.clock import Clock, SystemClock
from fastness.errors import QuotaExceeded
from fastness.kv import Database, Transaction
from fastness.layers import quotas as records
from fastness.layers import usage
from fastness.limits import (
    QUOTA_ADDITIONS_MAX,
    QUOTA_BYTES_MEASURE_SECONDS,
    QUOTA_CALLER_SECONDS,
    QUOTA_FIRST_MEASURE_PAIRS,
    QUOTA_MEASURE_FREE_SECONDS,
    QUOTA_MEASURE_SECONDS,
    QUOTA_MEASURE_SHARE,
    QUOTA_MEASURED_LATELY_MAX,
    QUOTA_REFUSED_MEASURE_SECONDS,
    QUOTA_RETRY_SECONDS,
)
from fastness.runtime.background import BackgroundRunner, Job, Steps
from fastness.tiers import Tier
from fastness.wire.permissions import universes_of
from fastness.wire.quotas import GetQuota, GetUsage, Quota, SetQuota, Usage
from fastness.wire.requests import Request

MESSAGES: Final = "messages"
BYTES: Final = "bytes"
CONNECTIONS: Final = "connections"
RATE: Final = "rate"
_UNIVERSE_MARK: Final = usage.prefix_of("")[:-2]  # What the keys of all universes start with.


class UsageCount:
    """A measured number, and what was added since. Used with the lock of `Quotas`."""

    __slots__ = (
        "_added",
        "_added_total",
        "_lasting",
        "_measured",
        "_seen",
        "ends_at",
        "measured_ms",
        "took_seconds",
        "was_refused",
    )

    def __init__(self) -> None:
        self._measured: int | None = None
        self._seen = 0  # The last measurement saw all transactions with lower tickets.
        self._added: dict[int, int] = {}  # By the newest ticket at the time.
        self._added_total = 0
        # Of callers' transactions: how much counts until each second. At most 61 of them are not over.
        self._lasting: dict[int, int] = {}
        self.was_refused = False  # Since the last measurement: another one may show that there is room.
        self.measured_ms = 0  # 0: never.
        self.ends_at = 0.0  # Monotonic: when the last measurement ended.
        self.took_seconds = 0.0

    @property
    def used(self) -> int | None:
        """None if it was never measured."""
        return None if self._measured is None else self.least

    @property
    def least(self) -> int:
        """`used`; until the first measurement, what was added so far."""
        found = (self._measured or 0) + self._added_total
        if self._lasting:
            now = monotonic()
            found += sum(count for until, count in self._lasting.copy().items() if until > now)
        return found

    def add(self, count: int, ticket: int, oldest: int) -> None:
        """Count something that a transaction adds. `oldest` is the ticket of the oldest one that runs."""
        added = self._added
        added[ticket] = added.get(ticket, 0) + count
        self._added_total += count
        if len(added) > QUOTA_ADDITIONS_MAX:
            # Those that have ended stay countable as one: no measurement from now on needs them apart.
            ended = sum(added.pop(each) for each in [each for each in added if each < oldest])
            added[oldest - 1] = ended

    def add_lasting(self, count: int) -> None:
        """Count something that a caller's own transaction adds, which may be committed late."""
        now = monotonic()
        until = int(now + QUOTA_CALLER_SECONDS) + 1
        if until not in self._lasting:
            self._lasting = {each: added for each, added in self._lasting.items() if each > now}
            self._lasting[until] = 0
        self._lasting[until] += count

    def set_measured(self, measured: int, oldest: int, now_ms: int, took_seconds: float) -> None:
        """A measurement has ended that saw all transactions with tickets below `oldest`."""
        if oldest < self._seen:
            return  # One that began later has ended before, and what this one needs is not kept any more.
        self._measured, self._seen, self.was_refused = measured, oldest, False
        self._added = {ticket: count for ticket, count in self._added.items() if ticket >= oldest}
        self._added_total = sum(self._added.values())
        self.measured_ms = now_ms
        self.ends_at = monotonic()
        self.took_seconds = took_seconds

    def is_due(self, every_seconds: float = 0.0) -> bool:
        """Whether it is time to measure again."""
        pause = self.took_seconds * QUOTA_MEASURE_SHARE if self.took_seconds > QUOTA_MEASURE_FREE_SECONDS else 0.0
        return self._measured is None or monotonic() - self.ends_at >= max(every_seconds, pause)


class UniverseRate:
    """How many calls name a universe, and how many may. The burst is one second's worth."""

    __slots__ = ("_counted", "_counts", "_left", "_limit", "_second")

    def __init__(self, limit: float | None) -> None:
        self._counts = [0, 0]  # Calls of the last whole second, and of the current one.
        self._second = 0
        self.set_limit(limit)

    def set_limit(self, limit: float | None) -> None:
        self._limit = limit
        self._left = max(limit or 1.0, 1.0)
        self._counted = monotonic()

    def take(self) -> float:
        """Count a call: 0 if the rate allows it, otherwise the seconds until it will."""
        now = monotonic()
        if self._limit is not None:
            self._left = min(max(self._limit, 1.0), self._left + (now - self._counted) * self._limit)
            self._counted = now
            if self._left < 1:
                return (1 - self._left) / self._limit
            self._left -= 1
        self._move_to(int(now))
        self._counts[1] += 1
        return 0.0

    def per_second(self) -> float:
        """The calls of the last whole second."""
        self._move_to(int(monotonic()))
        return float(self._counts[0])

    def _move_to(self, second: int) -> None:
        if second != self._second:
            self._counts = [self._counts[1] if second == self._second + 1 else 0, 0]
            self._second = second


class UniverseUsage:
    """What one universe holds and does."""

    __slots__ = ("bytes", "messages", "prefix", "quota", "rate", "refusals", "universe")

    def __init__(self, universe: str, quota: Quota) -> None:
        self.universe = universe
        self.quota = quota
        self.prefix = usage.prefix_of(universe)
        self.messages = UsageCount()
        self.bytes = UsageCount()
        self.rate = UniverseRate(quota.rate_per_second)
        self.refusals: Counter[str] = Counter()  # By kind.

    def set_quota(self, quota: Quota) -> None:
        if quota.rate_per_second != self.quota.rate_per_second:
            self.rate.set_limit(quota.rate_per_second)
        if quota.bytes is not None and self.quota.bytes is None:
            self.bytes = UsageCount()  # Without a limit, nothing was added to the earlier one.
        self.quota = quota


class Quotas:
    """The quotas of a plane. `database.usage` is None while no universe has one, so nothing is asked or counted."""

    def __init__(
        self, database: Database, background: BackgroundRunner, *, clock: Clock | None = None, shared: bool = False
    ) -> None:
        self._database = database
        self._clock = clock or SystemClock()
        self._has_clock = clock is not None  # A test moves it, and measures by itself.
        self._shared = shared
        # Where a measurement only computes, waiting for a processor says nothing about what it costs.
        self._timer = monotonic if shared else thread_time
        self._lock = threading.Lock()
        self._loading = threading.Lock()
        self._universes: dict[str, UniverseUsage] = {}
        self._by_prefix: dict[bytes, UniverseUsage] = {}  # Those with a quota of bytes.
        self._version = b""
        self._ticket = 0
        self._running: dict[int, None] = {}  # Tickets in their order.
        self._background = background
        self._job = Job("the measurement of quotas", self._run, thread="quotas")
        self._connections: Counter[str] = Counter()  # By universe, with or without a quota.
        self._measured_lately: OrderedDict[str, UniverseUsage] = OrderedDict()  # Universes without quotas.

    # Quotas.

    def start(self) -> None:
        """Load the quotas. Where several processes share the key space, look for changes from now on."""
        self.load()
        if self._shared:
            self._start_job()

    def load(self) -> None:
        """Load the quotas if one has changed."""
        with self._loading:
            version = self._database.read(records.version, tier=Tier.IMPORTANT)
            if version == self._version:
                return
            version, found = self._database.read(_versioned_quotas, tier=Tier.IMPORTANT)
            with self._lock:
                known = self._universes
                universes: dict[str, UniverseUsage] = {}
                for universe, quota in found.items():
                    universes[universe] = known.get(universe) or UniverseUsage(universe, quota)
                    universes[universe].set_quota(quota)
                self._universes = universes
                self._by_prefix = {each.prefix: each for each in universes.values() if each.quota.bytes is not None}
                self._database.usage = self if universes else None
                self._version = version
            if not universes:
                return
            if not self._shared:
                # A transaction that runs now has counted nothing. After this one, all that run count.
                self._database.transact(_nothing, tier=Tier.IMPORTANT)
            for each in universes.values():
                if each.messages.used is None:
                    self._measure_messages(each)
                if each.quota.bytes is not None and each.bytes.used is None:
                    self._measure_bytes(each, pairs_max=QUOTA_FIRST_MEASURE_PAIRS)
            self._start_job()

    def quota_of(self, universe: str) -> Quota:
        """The quota of a universe, as this process knows it."""
        found = self._universes.get(universe)
        return Quota() if found is None else found.quota

    def all(self) -> list[UniverseUsage]:
        """The universes that have quotas, in the order of their names."""
        return [each for _, each in sorted(self._universes.items())]

    def usage(self, universe: str) -> Usage:
        """What a universe holds and does. It is measured first, unless that was done a short time ago."""
        self.load()
        found = self._universes.get(universe) or self._without_quota(universe)
        if found.messages.is_due():
            self._measure_messages(found)
        if found.bytes.is_due():
            self._measure_bytes(found)
        with self._lock:
            return Usage(
                quota=found.quota,
                messages=found.messages.used or 0,
                bytes=found.bytes.used,
                connections=self._connections[universe],
                calls_per_second=found.rate.per_second(),
                measured_ms=found.messages.measured_ms,
                bytes_measured_ms=found.bytes.measured_ms,
            )

    def _without_quota(self, universe: str) -> UniverseUsage:
        """The last measurements of a universe without a quota: reading all of it for every request is too much."""
        with self._lock:
            known = self._measured_lately.pop(universe, None) or UniverseUsage(universe, Quota())
            self._measured_lately[universe] = known
            if len(self._measured_lately) > QUOTA_MEASURED_LATELY_MAX:
                self._measured_lately.popitem(last=False)
            return known

    # Transactions: see `UsageCounter` in `kv.contract`, and `TransactionQuotas`.

    def begin(self) -> int:
        with self._lock:
            self._ticket += 1
            self._running[self._ticket] = None
            return self._ticket

    def end(self, ticket: int) -> None:
        with self._lock:
            self._running.pop(ticket, None)

    def of_caller(self) -> "_CallerQuotas":
        return _CallerQuotas(self)

    def admit_messages(
        self, tx: Transaction, universe: str, count: int, *, unsaved: int = 0, lasting: bool = False
    ) -> None:
        found = self._universes.get(universe)
        if found is None or not count:
            return
        limit = found.quota.messages
        if self._admit(found.messages, count, limit, lasting=lasting) or limit is None:
            return
        if not tx.writer and found.messages.is_due():
            # No other transaction runs, and this one sees what it has written: nothing that was added is missing.
            began_at = self._timer()
            measured = usage.count_messages(tx, universe) + unsaved
            with self._lock:
                found.messages.set_measured(measured, self._ticket + 1, self._clock.now_ms(), self._timer() - began_at)
            if self._admit(found.messages, count, limit, lasting=lasting):
                return
        self._measure_soon(found.messages)
        raise self._refusal(found, MESSAGES, limit, found.messages.least, count)

    def admit_bytes(self, universe: str, size: int, *, lasting: bool = False) -> None:
        found = self._universes.get(universe)
        if found is None or found.quota.bytes is None or found.bytes.used is None:
            return
        if not self._admit(found.bytes, size, found.quota.bytes, lasting=lasting):
            raise self._bytes_refusal(found, size)

    def check_size(self, universe: str, size: int) -> None:
        found = self._universes.get(universe)
        if found is None or (limit := found.quota.bytes) is None or (used := found.bytes.used) is None:
            return
        if used + size > limit:
            raise self._bytes_refusal(found, size)

    def check_request(self, request: Request[Any]) -> None:
        if not self._by_prefix:
            return
        for universe in set(universes_of(request)):
            if (found := self._universes.get(universe)) is not None and found.quota.bytes is not None:
                self.check_size(universe, len(msgspec.msgpack.encode(request)))

    def check_written(self, tx: Transaction, request: Request[Any]) -> None:
        if not self._by_prefix:
            return
        for universe in set(universes_of(request)):
            found = self._universes.get(universe)
            if found is None or (limit := found.quota.bytes) is None or (used := found.bytes.used) is None:
                continue
            # The size of all writes is known. Only if it is too much, those of the universe are added up.
            if used + tx.unmerged_bytes() > limit and used + (size := tx.unmerged_bytes(found.prefix)) > limit:
                raise self._bytes_refusal(found, size)

    def add_writes(self, writes: Mapping[bytes, bytes | None], *, lasting: bool = False) -> None:
        if not self._by_prefix:
            return
        sizes: Counter[bytes] = Counter()
        start = len(_UNIVERSE_MARK) + 1
        for key, value in writes.items():
            if value is not None and key.startswith(_UNIVERSE_MARK):
                sizes[key[: key.index(b"\x00", start) + 1]] += len(key) + len(value)
        with self._lock:
            for prefix, size in sizes.items():
                found = self._by_prefix.get(prefix)
                if found is not None:
                    self._add(found.bytes, size, lasting=lasting)

    def _admit(self, count: UsageCount, size: int, limit: int | None, *, lasting: bool) -> bool:
        """Whether it is within the limit, and was counted.

        Until the first measurement, servers that share the key space compare with what they have accepted themselves:
        a universe that is far from its quota must not be refused meanwhile. One process measures in the transaction.
        """
        with self._lock:
            used = count.least if self._shared else count.used
            if limit is not None and (used is None or used + size > limit):
                return False
            self._add(count, size, lasting=lasting)
            return True

    def _add(self, count: UsageCount, size: int, *, lasting: bool) -> None:
        if lasting:
            count.add_lasting(size)
        else:
            count.add(size, self._ticket, next(iter(self._running), self._ticket + 1))

    def _measure_soon(self, count: UsageCount) -> None:
        count.was_refused = True
        self._job.wake()

    def _bytes_refusal(self, found: UniverseUsage, size: int) -> QuotaExceeded:
        self._measure_soon(found.bytes)
        return self._refusal(found, BYTES, found.quota.bytes or 0, found.bytes.used or 0, size)

    def _refusal(self, found: UniverseUsage, kind: str, limit: int, used: int, wanted: int) -> QuotaExceeded:
        found.refusals[kind] += 1
        universe, more = found.universe, max(used + wanted, 2 * limit)
        if kind == MESSAGES:
            hint = f"consume or purge some, or raise it with: fastness quota set {universe} --messages {more}"
        elif kind == BYTES:
            hint = f"consume or delete some data, or raise it with: fastness quota set {universe} --bytes {more}"
        else:
            hint = f"close some, or raise it with: fastness quota set {universe} --connections {more}"
        error = QuotaExceeded(
            f"Universe {universe} has {used} {kind} of {limit}, its quota, and {wanted} more would be over it; {hint}",
            universe=universe,
            kind=kind,
            limit=limit,
            used=used,
        )
        error.retry_after_seconds = QUOTA_RETRY_SECONDS
        return error

    # Calls and connections of a server.

    def check_rate(self, request: Request[Any]) -> None:
        """Count a call to this server.

        Raises:
            QuotaExceeded: a universe that it names has used up its rate.
        """
        if not self._universes or isinstance(request, SetQuota | GetQuota | GetUsage):
            return  # A rate that is used up can still be seen and raised.
        for universe in set(universes_of(request)):
            found = self._universes.get(universe)
            if found is None:
                continue
            seconds = found.rate.take()
            if seconds:
                limit = found.quota.rate_per_second or 0
                found.refusals[RATE] += 1
                error = QuotaExceeded(
                    f"Universe {universe} is limited to {limit:g} calls per second; wait for {seconds:.3f} s",
                    universe=universe,
                    kind=RATE,
                    limit=limit,
                    used=limit,
                )
                error.retry_after_seconds = seconds
                raise error

    def connect(self, universe: str, *, replaces: bool = False) -> None:
        """Count a connection of a universe to this server, until `disconnect`. With `replaces`, it ends another one.

        Raises:
            QuotaExceeded: the universe has as many as its quota allows.
        """
        with self._lock:
            found, count = self._universes.get(universe), self._connections[universe]
            limit = None if found is None else found.quota.connections
            if found is not None and limit is not None and count - replaces >= limit:
                raise self._refusal(found, CONNECTIONS, limit, count, 1)
            self._connections[universe] += 1

    def disconnect(self, universe: str) -> None:
        """A connection that `connect` counted has ended."""
        with self._lock:
            self._connections[universe] -= 1
            if not self._connections[universe]:
                del self._connections[universe]

    def connections(self, universe: str) -> int:
        """How many connections of a universe this server has."""
        return self._connections[universe]

    # Measurements.

    def measure(self) -> None:
        """Measure what is due, as the job does."""
        for each in list(self._universes.values()):
            if each.messages.is_due(_pause(each.messages, QUOTA_MEASURE_SECONDS)):
                self._measure_messages(each)
            if each.bytes.is_due(_pause(each.bytes, QUOTA_BYTES_MEASURE_SECONDS)):
                self._measure_bytes(each)

    def _measure_messages(self, found: UniverseUsage) -> None:
        oldest, began_at = self._oldest(), self._timer()
        measured = self._database.read(usage.count_messages, found.universe, tier=Tier.IMPORTANT)
        with self._lock:
            found.messages.set_measured(measured, oldest, self._clock.now_ms(), self._timer() - began_at)

    def _measure_bytes(self, found: UniverseUsage, *, pairs_max: int | None = None) -> None:
        """Measure the bytes. With `pairs_max`, only if the universe has no more pairs than that."""
        oldest, began_at = self._oldest(), self._timer()
        begin, end = usage.range_of(found.universe)
        size = self._database.size_of(begin, end, pairs_max=pairs_max)
        if size is None:
            return
        size += self._database.read(usage.count_body_bytes, found.universe, tier=Tier.IMPORTANT)
        with self._lock:
            found.bytes.set_measured(size, oldest, self._clock.now_ms(), self._timer() - began_at)

    def _oldest(self) -> int:
        """The ticket of the oldest transaction that runs, or of the next one."""
        with self._lock:
            return next(iter(self._running), self._ticket + 1)

    def _start_job(self) -> None:
        if not self._has_clock:
            self._background.add(self._job)

    def _run(self) -> Steps:
        """Measure. After an error, the last known quotas and counts stay in force."""
        while True:
            if self._shared:
                self.load()
            self.measure()
            any_refused = any(each.messages.was_refused or each.bytes.was_refused for each in self._universes.values())
            yield QUOTA_REFUSED_MEASURE_SECONDS if any_refused else QUOTA_MEASURE_SECONDS


class _CallerQuotas:
    """The quotas for a transaction that its caller commits, some time after it has ended here."""

    __slots__ = ("_quotas",)

    def __init__(self, quotas: Quotas) -> None:
        self._quotas = quotas

    def admit_messages(self, tx: Transaction, universe: str, count: int, *, unsaved: int = 0) -> None:
        self._quotas.admit_messages(tx, universe, count, unsaved=unsaved, lasting=True)

    def admit_bytes(self, universe: str, size: int) -> None:
        self._quotas.admit_bytes(universe, size, lasting=True)

    def check_size(self, universe: str, size: int) -> None:
        self._quotas.check_size(universe, size)

    def check_request(self, request: Request[Any]) -> None:
        self._quotas.check_request(request)

    def check_written(self, tx: Transaction, request: Request[Any]) -> None:
        self._quotas.check_written(tx, request)

    def add_writes(self, writes: Mapping[bytes, bytes | None]) -> None:
        self._quotas.add_writes(writes, lasting=True)


def _versioned_quotas(tx: Transaction) -> tuple[bytes, dict[str, Quota]]:
    return records.version(tx), records.all_quotas(tx)


def _pause(count: UsageCount, seconds: float) -> float:
    return QUOTA_REFUSED_MEASURE_SECONDS if count.was_refused else seconds


def _nothing(tx: Transaction) -> None:
    """Do nothing, once the transactions before this one have ended."""
    del tx
