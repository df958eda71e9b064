"""The input and result of folding a world's journal."""

from typing import Any

import msgspec


class Entry(msgspec.Struct, frozen=True):
    """A journal record as a reducer sees it; `kind` is entry, ingress, snapshot, baseline or manifest."""

    height: int
    kind: str
    value: Any


class Restored(msgspec.Struct, frozen=True):
    """A world's state with every record below `height` applied.

    It was computed from the snapshot at `baseline_height`, by folding the `folded` records from there on.
    """

    state: Any
    height: int
    folded: int = 0
    baseline_height: int = 0


class Verdict(msgspec.Struct, frozen=True):
    """Whether snapshots and restore agree with a full replay; if not, the first height at which they do not."""

    agrees: bool
    snapshots_checked: int
    differs_at: int | None
