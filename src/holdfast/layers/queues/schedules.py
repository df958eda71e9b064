"""Schedules: messages that a queue puts to itself, at the times that a cron expression names.

A schedule has a note of when it strikes next, like everything that is due. Striking puts the message and notes the next
time in one commit, so each time counts once however many processes look. Times that passed while nobody looked count
once together: a queue that was left alone for a night does not wake up to a hundred reports.
"""

from datetime import UTC, datetime
from typing import Any
from zoneinfo import ZoneInfo

import msgspec
from cronsim import CronSim, CronSimError

from holdfast.errors import Busy, InvalidArgument
from holdfast.kv import Transaction
from holdfast.layers.queues.policies import policy_of
from holdfast.layers.queues.puts import SCHEDULE_STRIKES, check, put_one
from holdfast.layers.queues.rooms import QueueKey, Room, room_of
from holdfast.layers.queues.tallies import NEVER_MS, Book
from holdfast.limits import SCHEDULES_MAX
from holdfast.tiers import Tier
from holdfast.wire.queues import NewMessage, Schedule

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Schedule).decode


def set_schedule(
    tx: Transaction, queue: QueueKey, name: str, *, cron: Any, timezone: Any, message: NewMessage
) -> Schedule:
    """Put `message` whenever the clock of `timezone` says what `cron` names; in place of a schedule of the same name.

    Raises:
        InvalidArgument: one of them is not understood, or the time never comes.
        Busy: the queue has as many schedules as it may.
    """
    check(message)
    if not isinstance(cron, str) or not isinstance(timezone, str):
        raise InvalidArgument(f"A cron expression and a time zone are text, not {cron!r} and {timezone!r}")
    room = room_of(queue)
    next_ms = _after(cron, timezone, tx.now_ms)
    if next_ms == NEVER_MS:
        raise InvalidArgument(f"{cron!r} never comes; check its day and month")
    if tx.get(room.schedules.key(name)) is None and len(_all(tx, room)) >= SCHEDULES_MAX:
        raise Busy(f"{queue.name} has {SCHEDULES_MAX} schedules; remove some first")
    book = Book(tx, queue)
    _forget(tx, room, name)
    schedule = Schedule(name, cron, timezone, message, next_ms)
    _note(book, schedule)
    book.save()
    return schedule


def remove_schedule(tx: Transaction, queue: QueueKey, name: str) -> bool:
    """Remove a schedule; whether there was one."""
    return _forget(tx, room_of(queue), name)


def schedules_of(tx: Transaction, queue: QueueKey) -> list[Schedule]:
    """The schedules of a queue, in the order of their names."""
    return _all(tx, room_of(queue))


def strike(book: Book, name: str) -> None:
    """The moment of a schedule has come: put its message, and note when it strikes next."""
    stored = book.tx.get(book.room.schedules.key(name))
    if stored is None:
        return
    schedule = _decode(stored)
    put_one(book, policy_of(book.tx, book.queue), schedule.message, book.new_id(), Tier.CRITICAL)
    next_ms = _after(schedule.cron, schedule.timezone, book.tx.now_ms)
    _note(book, msgspec.structs.replace(schedule, next_ms=next_ms))


def _after(cron: str, timezone: str, now_ms: int) -> int:
    try:
        zone = UTC if timezone == "UTC" else ZoneInfo(timezone)
    except (KeyError, ValueError, OSError):
        raise InvalidArgument(f"{timezone!r} is no time zone; write one like Europe/Berlin") from None
    try:
        moment = next(CronSim(cron, datetime.fromtimestamp(now_ms / 1_000, zone)))
    except (CronSimError, TypeError) as error:
        raise InvalidArgument(
            f"{cron!r} is no cron expression ({error}); write minute, hour, day, month and weekday"
        ) from None
    except StopIteration:
        return NEVER_MS
    return round(moment.timestamp() * 1_000)


def _note(book: Book, schedule: Schedule) -> None:
    tx, room = book.tx, book.room
    tx.put(room.schedules.key(schedule.name), _encode(schedule))
    if schedule.next_ms != NEVER_MS:
        tx.put(room.due_key(schedule.next_ms, SCHEDULE_STRIKES + schedule.name.encode()), SCHEDULE_STRIKES)
        book.tally.note_due(schedule.next_ms)


def _forget(tx: Transaction, room: Room, name: str) -> bool:
    stored = tx.get(room.schedules.key(name))
    if stored is None:
        return False
    schedule = _decode(stored)
    tx.delete(room.schedules.key(name))
    tx.delete(room.due_key(schedule.next_ms, SCHEDULE_STRIKES + name.encode()))
    return True


def _all(tx: Transaction, room: Room) -> list[Schedule]:
    return [_decode(value) for _, value in tx.scan(*room.schedules.range(), limit=SCHEDULES_MAX)]
