"""Samples of a server's metrics, kept for a day: what the charts of the console show when they are opened.

    ("nodes", "samples", node)              ->  when the node last stored a sample
    ("nodes", "samples", node, ring, slot)  ->  a sample; slot = its time / the ring's step, modulo the ring's size

A ring overwrites its oldest slot, so it never grows and needs no deletion. A node that starts again continues its ring.
A slot has the last counters of its time, and the largest depths and ages: a chart of a day shows a peak of seconds.
"""

from collections.abc import Sequence
from typing import Any, Final, TypeVar

import msgspec

from fastness.kv import Subspace, Transaction
from fastness.kv.keys import pages
from fastness.layers.worlds import first_elements
from fastness.limits import (
    HISTORY_COARSE_SAMPLES,
    HISTORY_COARSE_SECONDS,
    HISTORY_FINE_SAMPLES,
    HISTORY_FINE_SECONDS,
    HISTORY_FORGOTTEN_SECONDS,
    HISTORY_QUEUES_MAX,
    HISTORY_RECORD_BYTES_MAX,
    HISTORY_UNIVERSES_MAX,
    NODES_MAX,
)

SUBSPACE: Final = Subspace("nodes", "samples")
STEPS: Final = (  # Of each ring: the seconds between two samples, and how many it has.
    (HISTORY_FINE_SECONDS, HISTORY_FINE_SAMPLES),
    (HISTORY_COARSE_SECONDS, HISTORY_COARSE_SAMPLES),
)

GAUGES: Final = frozenset(
    ("ready", "delayed", "leased", "blocked", "dead", "oldest")
)  # Of a queue; others are counters.

_Name = TypeVar("_Name", str, tuple[str, str])
Numbers = dict[str, float]


class StoredSample(msgspec.Struct, frozen=True, array_like=True):
    """The numbers of a server at one time. Fields are only added at the end."""

    at_ms: int
    started_ms: int  # When the server started: its counters began at zero then.
    numbers: dict[str, Any]  # Of the whole server: counters, and histograms as lists of cumulative buckets.
    universes: dict[str, Numbers] = {}
    queues: dict[str, dict[str, Numbers]] = {}  # By universe and queue.


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(StoredSample).decode
_decode_time = msgspec.msgpack.Decoder(int).decode


def store(tx: Transaction, node: str, sample: StoredSample, rings: Sequence[int]) -> None:
    """Store a sample in its slots of these rings, with the largest depths and ages that a slot has."""
    for ring in rings:
        seconds, count = STEPS[ring]
        step = sample.at_ms // (seconds * 1_000)
        key = SUBSPACE.key(node, ring, step % count)
        stored, merged = tx.get(key), sample
        if stored is not None and (earlier := _decode(stored)).at_ms // (seconds * 1_000) == step:
            merged = _with_peaks(sample, earlier)
        tx.put(key, _bounded(merged))
    tx.put(SUBSPACE.key(node), _encode(sample.at_ms))


def read(tx: Transaction, node: str, ring: int, *, since_ms: int, until_ms: int) -> list[StoredSample]:
    """The samples of a ring between two times, both included, in the order of their times."""
    found = []
    for page in pages(tx, *SUBSPACE.range(node, ring)):
        found += [sample for _, value in page if since_ms <= (sample := _decode(value)).at_ms <= until_ms]
    found.sort(key=lambda sample: sample.at_ms)
    return found


def nodes(tx: Transaction, limit: int = NODES_MAX) -> list[str]:
    """The nodes that have rings, those first that have stored a sample last."""
    found = first_elements(tx, SUBSPACE, "", limit)
    return sorted(found, key=lambda node: -_stored_ms(tx, node))


def forget(tx: Transaction, now_ms: int) -> int:
    """Delete the rings of nodes that have stored nothing for two days; how many nodes."""
    count = 0
    for node in nodes(tx):
        if now_ms - _stored_ms(tx, node) > HISTORY_FORGOTTEN_SECONDS * 1_000:
            tx.delete_range(*SUBSPACE.range(node))
            tx.delete(SUBSPACE.key(node))
            count += 1
    return count


def _stored_ms(tx: Transaction, node: str) -> int:
    """When a node last stored a sample; 0 if that is not known."""
    stored = tx.get(SUBSPACE.key(node))
    return 0 if stored is None else _decode_time(stored)


def largest_gauges(numbers: Numbers, others: Numbers) -> Numbers:
    """The numbers, with the larger one of each depth and age."""
    return numbers | {name: value for name, value in others.items() if name in GAUGES and value > numbers.get(name, 0)}


def _with_peaks(sample: StoredSample, earlier: StoredSample) -> StoredSample:
    """A sample with the largest depths and ages of itself and of an earlier one."""

    def peaks(now: dict[str, Numbers], then: dict[str, Numbers]) -> dict[str, Numbers]:
        gone = {name: numbers for name, numbers in then.items() if name not in now}
        if sample.started_ms != earlier.started_ms:  # The counters of an earlier process are not comparable.
            gone = {name: largest_gauges({}, numbers) for name, numbers in gone.items()}
        return gone | {name: largest_gauges(numbers, then.get(name, {})) for name, numbers in now.items()}

    queues = {
        universe: peaks(sample.queues.get(universe, {}), earlier.queues.get(universe, {}))
        for universe in sample.queues | earlier.queues
    }
    return msgspec.structs.replace(sample, universes=peaks(sample.universes, earlier.universes), queues=queues)


def _bounded(sample: StoredSample) -> bytes:
    """A sample as it is stored: the queues and universes with the most messages, as many as fit."""
    universes = _largest(sample.universes, HISTORY_UNIVERSES_MAX)
    queues = {(of, name): numbers for of, each in sample.queues.items() for name, numbers in each.items()}
    most = HISTORY_QUEUES_MAX
    while True:
        kept: dict[str, dict[str, Numbers]] = {}
        for (universe, queue), numbers in _largest(queues, most).items():
            kept.setdefault(universe, {})[queue] = numbers
        encoded = _encode(msgspec.structs.replace(sample, universes=universes, queues=kept))
        if len(encoded) <= HISTORY_RECORD_BYTES_MAX or not (most or universes):
            return encoded
        most //= 2  # Names may have many characters.
        if not most:
            universes = {}


def _largest(numbers: dict[_Name, Numbers], most: int) -> dict[_Name, Numbers]:
    if len(numbers) <= most:
        return dict(numbers)
    found = sorted(numbers.items(), key=lambda each: (-sum(each[1].get(name, 0) for name in GAUGES), each[0]))
    return dict(found[:most])
