"""The rate of a queue: how many deliveries its policy allows now, for the consumers of all processes together."""

import math

from fastness.layers.queues.counters import NEVER_MS, QueueCounters, QueueTransaction, decode_counters
from fastness.wire.stored_messages import encode


class RateBudget:
    """The deliveries that a queue's rate allows in one transaction.

    An idle queue accumulates the budget of one second, and at least one message. Where several processes write, the
    budget is in the record that their counters are folded into: deliveries have the queue to themselves.
    """

    __slots__ = ("_counters", "_queue_tx", "_rate")

    def __init__(self, queue_tx: QueueTransaction, rate: float) -> None:
        tx = queue_tx.tx
        stored = tx.get(queue_tx.keys.own_counters) if tx.writer else None
        self._queue_tx = queue_tx
        self._rate = rate
        if not tx.writer:
            self._counters = queue_tx.counters
        elif stored is not None:
            self._counters = decode_counters(stored)
        else:
            self._counters = QueueCounters(history_ms=queue_tx.counters.history_ms)

    def allowed(self, limit: int) -> int:
        """How many messages may be delivered now, at most `limit`."""
        counters, now_ms = self._counters, self._queue_tx.tx.now_ms
        passed_ms = max(now_ms - counters.budget_ms, 0)
        counters.budget = min(counters.budget + passed_ms * self._rate / 1_000, max(self._rate, 1.0))
        counters.budget_ms = now_ms
        return min(limit, int(counters.budget))

    def spend(self, count: int) -> None:
        """Count deliveries. A refilled budget alone is not committed: it follows from the time."""
        self._counters.budget -= count
        if count and self._queue_tx.tx.writer:
            self._queue_tx.tx.put(self._queue_tx.keys.own_counters, encode(self._counters))

    def wait_ms(self) -> int:
        """In how many milliseconds the rate allows a message again; NEVER_MS if it does now."""
        if self._counters.budget >= 1:
            return NEVER_MS
        return math.ceil((1 - self._counters.budget) / self._rate * 1_000)
