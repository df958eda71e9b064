"""Filter pushdown: applies a query's filters to the plan, and to each batch that is read.

Filters on these columns are applied exactly, so Spark need not apply them again; all others are left to Spark.
"""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

COLUMNS: Final[dict[str, tuple[str, ...]]] = {
    "journal": ("universe", "world", "height", "kind"),
    "activity": ("universe", "session", "kind", "file", "at", "day"),
    "segments": ("universe", "world", "start", "end"),
    "queues": ("universe", "queue", "state", "created_at"),
    "mail": ("universe", "recipient", "sender", "sent_at"),
    "entities": ("universe", "kind", "id", "updated_at"),
}


class Condition(msgspec.Struct, frozen=True):
    """One comparison of a column with a value."""

    column: str
    operator: str  # =, in, <, <=, >, >=, starts, present
    value: Any = None


class Conditions(msgspec.Struct, frozen=True):
    """A conjunction of comparisons."""

    each: tuple[Condition, ...] = ()

    def allow(self, **known: Any) -> bool:
        """Whether data with these column values may contain wanted rows."""
        return all(_holds(condition, known[condition.column]) for condition in self.each if condition.column in known)

    def bounds(self, column: str) -> tuple[int | None, int | None]:
        """The lowest and the highest integer that a column may have, inclusive; None where unbounded."""
        low: list[int] = []
        high: list[int] = []
        for condition in self.each:
            if condition.column != column:
                continue
            value, operator = condition.value, condition.operator
            if operator == "in":
                low.append(min(value))
                high.append(max(value))
            if operator in ("=", ">", ">="):
                low.append(value + (operator == ">"))
            if operator in ("=", "<", "<="):
                high.append(value - (operator == "<"))
        return max(low, default=None), min(high, default=None)

    def apply(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The rows that satisfy all conditions."""
        for condition in self.each:
            if not batch.num_rows:
                break
            batch = batch.filter(_mask(condition, batch[condition.column]))
        return batch


def split(table: str, filters: Sequence[Any]) -> tuple[Conditions, list[Any]]:
    """The filters that are applied here, and those left to Spark."""
    kept: list[Condition] = []
    left: list[Any] = []
    for each in filters:
        condition = _condition(each)
        if condition is not None and condition.column in COLUMNS[table]:
            kept.append(condition)
        else:
            left.append(each)
    return Conditions(tuple(kept)), left


def _condition(filter: Any) -> Condition | None:
    operator = _OPERATORS.get(type(filter).__name__)
    if operator is None or len(filter.attribute) != 1:
        return None
    value: Any = getattr(filter, "value", None)
    if operator == "in":
        value = tuple(_comparable(each) for each in value if each is not None)
        return Condition(filter.attribute[0], operator, value) if value else None
    if value is None and operator != "present":
        return None
    return Condition(filter.attribute[0], operator, _comparable(value))


def _comparable(value: Any) -> Any:
    """A datetime without a zone is UTC, the session time zone of every job."""
    return value.replace(tzinfo=UTC) if isinstance(value, datetime) and value.tzinfo is None else value


def _holds(condition: Condition, known: Any) -> bool:
    value = condition.value
    match condition.operator:
        case "=":
            return bool(known == value)
        case "in":
            return known in value
        case "starts":
            return str(known).startswith(value)
        case "<":
            return bool(known < value)
        case "<=":
            return bool(known <= value)
        case ">":
            return bool(known > value)
        case ">=":
            return bool(known >= value)
    return True


def _mask(condition: Condition, column: pa.Array) -> pa.Array:
    if pa.types.is_timestamp(column.type):
        column = column.cast(_TIMESTAMP)  # Like Spark: truncating the value to the column's precision would change it.
    match condition.operator:
        case "present":
            return pc.is_valid(column)
        case "in":
            return pc.is_in(column, pa.array(condition.value, column.type))
        case "starts":
            return pc.starts_with(column, condition.value)
    return _COMPARE[condition.operator](column, pa.scalar(condition.value, column.type))


_TIMESTAMP: Final = pa.timestamp("us", tz="UTC")
_OPERATORS: Final[Mapping[str, str]] = {
    "EqualTo": "=",
    "In": "in",
    "LessThan": "<",
    "LessThanOrEqual": "<=",
    "GreaterThan": ">",
    "GreaterThanOrEqual": ">=",
    "StringStartsWith": "starts",
    "IsNotNull": "present",
}
_COMPARE: Final = {
    "=": pc.equal,
    "<": pc.less,
    "<=": pc.less_equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
}
