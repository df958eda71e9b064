"""Checks a journal's guarantees: no gap, no entry lost, doubled or changed, and appends in the order of real time.

    append   [value, ...]     -> the height of the first
    journal  [start, limit]   -> [[height, value], ...]

Each value is appended by one call only; None stands for a record that no append wrote. The entries of one append are
stored together or not at all.
"""

from collections.abc import Hashable, Sequence
from typing import Any

from fastness.testing.histories.record import History, Operation, Outcome, Violation, by_key, encode

Records = Sequence[tuple[int, Any]]  # Heights and values, in order.


def check_journal(history: History, key: Hashable, records: Records) -> int:
    """Check the history of the journal `key` against its `records` at the end; returns how many appends it has.

    Raises:
        Violation: a height is missing or was used twice; an acknowledged entry is lost, doubled, changed or at another
            height; an entry was never appended; an append is not in the order of real time, or stored in part; a read
            missed an entry or returned another one than the journal has.
    """
    operations = by_key(history, "append", "journal").get(key, [])
    _check_gapless(f"Journal {key!r}", records, [])
    heights: dict[bytes, int] = {}
    for height, value in records:
        if value is not None and heights.setdefault(encode(value), height) != height:
            message = f"Journal {key!r}: {value!r} is stored at {heights[encode(value)]} and at {height}"
            raise Violation(message, _appends_of(operations, value))
    appends = [each for each in operations if each.kind == "append"]
    stored = {each.invoked: _check_append(key, each, heights) for each in appends}
    if heights:
        raise Violation(f"Journal {key!r}: {len(heights)} entries have no append, from {min(heights.values())} on", [])
    in_order = sorted(
        (each for each in appends if stored[each.invoked] is not None), key=lambda each: stored[each.invoked] or 0
    )
    _check_real_time(key, in_order)
    content = dict(records)
    for read in operations:
        if read.kind == "journal" and read.outcome is Outcome.OK:
            _check_read(key, read, content, [(each, stored[each.invoked]) for each in in_order])
    return len(in_order)


def _check_gapless(name: str, records: Records, operations: list[Operation]) -> None:
    heights = [height for height, _ in records]
    if heights and heights != list(range(heights[0], heights[0] + len(heights))):
        gap = next(height for number, height in enumerate(heights, heights[0]) if height != number)
        raise Violation(f"{name} has a gap or a doubled height before {gap}", operations)


def _check_append(key: Hashable, append: Operation, heights: dict[bytes, int]) -> int | None:
    """Where the append is stored; None if it is not. Removes its entries from `heights`."""
    found = [heights.pop(encode(value), None) for value in append.argument]
    first = found[0]
    if first is None and not any(height is not None for height in found):
        if append.outcome is Outcome.OK:
            raise Violation(f"Journal {key!r}: an acknowledged append is lost", [append])
        return None
    if append.outcome is Outcome.FAILED:
        raise Violation(f"Journal {key!r}: a failed append is stored, at {found}", [append])
    if first is None or found != list(range(first, first + len(found))):
        raise Violation(f"Journal {key!r}: the entries of an append are stored apart, at {found}", [append])
    if append.outcome is Outcome.OK and append.result != first:
        raise Violation(f"Journal {key!r}: an append is stored at {first}, not where its answer says", [append])
    return first


def _check_real_time(key: Hashable, in_order: list[Operation]) -> None:
    """An append that had returned before another one was made is stored before it."""
    latest: Operation | None = None
    for append in in_order:
        if latest is not None and append.returned < latest.invoked:
            raise Violation(f"Journal {key!r}: an append is stored after a later one", [append, latest])
        if latest is None or append.invoked > latest.invoked:
            latest = append


def _check_read(
    key: Hashable, read: Operation, content: dict[int, Any], appends: list[tuple[Operation, int | None]]
) -> None:
    start, limit = read.argument
    _check_gapless(f"A read of journal {key!r}", [(height, value) for height, value in read.result], [read])
    for height, value in read.result:
        if height not in content or encode(content[height]) != encode(value):
            raise Violation(f"A read of journal {key!r} has {value!r} at {height}; the journal has not", [read])
    seen = {height for height, _ in read.result}
    if seen and min(seen) != max(start, min(content)):
        raise Violation(f"A read of journal {key!r} from {start} on begins at {min(seen)}", [read])
    for append, height in appends:
        if height is None or height < start:
            continue
        if append.returned < read.invoked and height not in seen and len(seen) < limit:
            raise Violation(
                f"A read of journal {key!r} has not the entry at {height}, which was stored", [append, read]
            )
        if append.invoked > read.returned and height in seen:
            raise Violation(f"A read of journal {key!r} has the entry at {height} before its append", [read, append])


def _appends_of(operations: list[Operation], value: Any) -> list[Operation]:
    return [
        each for each in operations if each.kind == "append" and encode(value) in [encode(one) for one in each.argument]
    ]
