"""Durability tiers: what an acknowledgement guarantees.

| tier        | acknowledged when                     | survives      |
|-------------|---------------------------------------|---------------|
| CRITICAL    | synced to disk                        | power loss    |
| IMPORTANT   | in the log, synced within 5 seconds   | process crash |
| BEST_EFFORT | accepted in memory                    | neither       |

Transactions support the first two. BEST_EFFORT records go to session logs, never through a transaction.
"""

import tomllib
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from enum import StrEnum
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any, Final, Self

from fastness.errors import InvalidArgument
from fastness.limits import TIER_CACHE_ENTRIES
from fastness.names import checked_name


class Tier(StrEnum):
    """The durability a caller requests. Every acknowledgement carries the tier that was applied."""

    CRITICAL = "critical"
    IMPORTANT = "important"
    BEST_EFFORT = "best_effort"


_STRENGTH: Final = {Tier.BEST_EFFORT: 0, Tier.IMPORTANT: 1, Tier.CRITICAL: 2}
_FIELDS: Final = {
    "task.id": Tier.CRITICAL,
    "task.status": Tier.CRITICAL,
    "decision.id": Tier.CRITICAL,
    "edge.type": Tier.CRITICAL,
    "task.priority": Tier.IMPORTANT,
    "edge.weight": Tier.IMPORTANT,
}
_PATTERNS: Final = {
    "metrics": Tier.BEST_EFFORT,
    "ml_*": Tier.BEST_EFFORT,
    "debug_*": Tier.BEST_EFFORT,
    "observability": Tier.BEST_EFFORT,
}


_TABLES: Final = ("fields", "patterns", "records")  # Of a TOML document.


def strongest(tiers: Iterable[Tier]) -> Tier:
    """The strongest of the tiers."""
    return max(tiers, key=_STRENGTH.__getitem__)


class TierPolicy:
    """The tier of each field of each kind of entity.

    An exact `kind.field` takes precedence, then the first pattern that matches the kind or the field, in the given
    order. A field without a match is IMPORTANT. The arguments take precedence over the defaults.

    Raises:
        InvalidArgument, InvalidName: a pattern or kind of `records` cannot be one.
    """

    def __init__(
        self,
        fields: Mapping[str, Tier] | None = None,
        patterns: Mapping[str, Tier] | None = None,
        records: Mapping[str, str] | None = None,
    ) -> None:
        """`records` gives the kind of records that are locked by their id alone: `{"task_*": "task"}`."""
        self._fields = _FIELDS | {name.lower(): tier for name, tier in (fields or {}).items()}
        given = {pattern.lower(): tier for pattern, tier in (patterns or {}).items()}
        self._patterns = given | {name: tier for name, tier in _PATTERNS.items() if name not in given}
        self._records = _checked_records(records or {})
        self.classify = lru_cache(maxsize=TIER_CACHE_ENTRIES)(self._classify)

    def _classify(self, kind: str, field: str) -> Tier:
        exact = self._fields.get(f"{kind}.{field}".lower())
        if exact is not None:
            return exact
        names = (kind.lower(), field.lower())
        for pattern, tier in self._patterns.items():
            if any(fnmatchcase(name, pattern) for name in names):
                return tier
        return Tier.IMPORTANT

    def record_name(self, id: str) -> str | None:
        """The name of a record's lock, `kind/id`, by the first pattern of `records` that matches; None if none does."""
        for pattern, kind in self._records.items():
            if fnmatchcase(id, pattern):
                return f"{kind}/{id}"
        return None

    @property
    def patterns(self) -> dict[str, Tier]:
        """The patterns in the order in which they are tried."""
        return dict(self._patterns)

    def named(self, kind: str) -> list[str]:
        """The fields of a kind that have an exact entry, not a pattern."""
        prefix = f"{kind}.".lower()
        return [name.removeprefix(prefix) for name in self._fields if name.startswith(prefix)]

    @classmethod
    def from_toml(cls, text: str) -> Self:
        """The policy of a TOML document.

        [fields]
        "order.total" = "critical"

        [patterns]
        "trace_*" = "best_effort"

        [records]
        "task_*" = "task"

        Raises:
            InvalidArgument: it is not TOML, or has entries other than tiers of fields and patterns, and kinds of
                records.
        """
        try:
            document = tomllib.loads(text)
        except (tomllib.TOMLDecodeError, RecursionError) as error:
            raise InvalidArgument(f"The tier policy is not TOML ({error}); correct it") from None
        for table in document:
            if table not in _TABLES:
                near = get_close_matches(table, _TABLES, n=1, cutoff=0.3) or ["fields, patterns or records"]
                raise InvalidArgument(f"A tier policy has no table [{table}]; did you mean {near[0]}?")
        fields, patterns = (_tiers_of(document.get(table, {}), table) for table in ("fields", "patterns"))
        return cls(fields, patterns, _table(document.get("records", {}), "records"))


def _checked_records(records: Mapping[str, str]) -> dict[str, str]:
    for pattern, kind in records.items():
        if not pattern or "/" in pattern:
            raise InvalidArgument(f'{pattern!r} is not a pattern of record ids; write one like "task_*"')
        checked_name("entity kind", kind)
    return dict(records)


def _table(table: object, name: str) -> dict[str, Any]:
    if not isinstance(table, dict):
        raise InvalidArgument(f"{name} is not a table; write [{name}] and one line for each entry")
    return table


def _tiers_of(table: object, name: str) -> dict[str, Tier]:
    tiers: dict[str, Tier] = {}
    for key, value in _table(table, name).items():
        if not isinstance(value, str) or value.lower() not in list(Tier):
            raise InvalidArgument(
                f'{name} has the tier {value!r} for {key}; use "critical", "important", "best_effort"'
            )
        if name == "fields" and key.count(".") < 1:
            raise InvalidArgument(f'{key!r} is not a field; write "kind.field", or use a pattern')
        tiers[key] = Tier(value.lower())
    return tiers
