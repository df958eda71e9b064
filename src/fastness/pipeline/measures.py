"""Measures the sizes of a plane and a lake at this time. No Spark here."""

import itertools
import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import NamedTuple

import msgspec
import pyarrow as pa

from fastness.layers import mailboxes, queues
from fastness.layers.mailboxes import Address
from fastness.limits import ERROR_CHARACTERS_MEASURED, MAIL_BATCH_MAX, MESSAGES_MEASURED, SUMMARY_LIST_MAX
from fastness.pipeline.lake import Lake
from fastness.pipeline.lifecycles import PresentMessage
from fastness.pipeline.schemas import ROLLUP_STORAGE, TABLES
from fastness.pipeline.views import View


class Size(NamedTuple):
    """The size of one kind of data in one universe."""

    universe: str
    source: str  # plane, or lake
    name: str
    rows: int
    bytes: int | None  # None: unknown without reading all of it.


class PlaneMeasurements(msgspec.Struct, frozen=True):
    """Measurements that only the plane can provide."""

    backlogs: list[tuple[str, str, int, int, int]]  # (universe, queue, messages in it, put and acked in total)
    mailboxes: list[tuple[str, str, int, int | None]]  # (universe, recipient, mails in it, time of the oldest in ms)
    messages: list[PresentMessage]
    sizes: list[Size]
    at_ms: int  # When the measurement began.
    counted: list[str]  # The universes of which `messages` has all messages.


def measure(view: View) -> PlaneMeasurements:
    """Measure every queue, mailbox and world of a plane."""
    measurements = PlaneMeasurements([], [], [], [], time.time_ns() // 1_000_000, [])
    for universe in view.universes():
        measurements.backlogs.extend(_backlogs(view, universe))
        measurements.mailboxes.extend(_mailboxes(view, universe))
        measurements.sizes.extend(_plane_sizes(view, universe))
        found = list(itertools.islice(_present(view, universe), MESSAGES_MEASURED + 1))
        if len(found) <= MESSAGES_MEASURED:
            measurements.counted.append(universe)
        measurements.messages.extend(found[:MESSAGES_MEASURED])
    return measurements


def lake_sizes(lake: Lake, universes: Sequence[str] | None = None) -> list[Size]:
    """The sizes of a lake's tables, from the statistics of their commits."""
    sizes: dict[tuple[str, str], tuple[int, int]] = {}
    for table in TABLES.values():
        for file in lake.table(table).entries():
            if universes is None or file.universe in universes:
                rows, size = sizes.get((file.universe, table.name), (0, 0))
                sizes[file.universe, table.name] = (rows + file.rows, size + file.size)
    return [Size(universe, "lake", name, *found) for (universe, name), found in sizes.items()]


def storage_rows(sizes: Sequence[Size], at: datetime) -> pa.Table:
    """Sizes as rows of `rollup_storage`."""
    rows = [{**size._asdict(), "day": at.date(), "measured_at": at} for size in sizes]
    return pa.Table.from_pylist(rows, ROLLUP_STORAGE.schema)


def _present(view: View, universe: str) -> Iterator[PresentMessage]:
    """Every message; a dead letter is one of its original queue, too."""
    for message in view.messages(universe, with_payloads=False):
        error = None if message.last_error is None else message.last_error[:ERROR_CHARACTERS_MEASURED]
        values = (message.created_ms, message.attempts)
        if message.origin is not None:
            yield PresentMessage(universe, message.origin, message.id, "dead", *values, message.died_ms, error)
        is_letter = message.origin is not None
        yield PresentMessage(universe, message.queue, message.id, message.state, *values, 0, None, is_letter)


def _backlogs(view: View, universe: str) -> Iterator[tuple[str, str, int, int, int]]:
    after = ""
    while page := view.database.read(queues.survey, universe, after=after, limit=SUMMARY_LIST_MAX):
        for stats in page:
            if not view.hidden.hides("queue", universe, stats.queue):
                backlog = stats.ready + stats.delayed + stats.leased + stats.blocked
                yield universe, stats.queue, backlog, stats.put_total, stats.acked_total
        after = page[-1].queue


def _mailboxes(view: View, universe: str) -> Iterator[tuple[str, str, int, int | None]]:
    after = ""
    while page := view.database.read(mailboxes.mailboxes, universe, after=after, limit=MAIL_BATCH_MAX):
        for agent, found in page:
            if not view.hidden.hides("mail.recipient", universe, agent):
                yield universe, str(Address(universe, agent)), found.pending, found.oldest_ms
        after = page[-1][0]


def _plane_sizes(view: View, universe: str) -> Iterator[Size]:
    worlds = records = segments = cold = blobs = stored = 0
    for world in view.worlds(universe):
        worlds += 1
        records += world.head
        segments += len(world.segments)
        cold += sum(segment.size for segment in world.segments)
    for blob in view.blobs(universe):
        blobs += 1
        stored += blob.size
    yield Size(universe, "plane", "worlds", worlds, None)
    yield Size(universe, "plane", "records", records, None)
    yield Size(universe, "plane", "segments", segments, cold)
    yield Size(universe, "plane", "blobs", blobs, stored)
