"""The input and result of folding a world's journal."""

from typing import Any

import msgspec


class Entry(msgspec.Struct, frozen=True):
    """A journal record as a reducer sees it; `kind` is entry, ingress, snapshot, baseline or manifest."""

    height: int
    kind: str
    value: Any


class Restored(msgspec.Struct, frozen=True):
    """A world's state with every record below `height` applied."""

    state: Any
    height: int


class Verdict(msgspec.Struct, frozen=True):
    """Whether snapshots and restore agree with a full replay; if not, the first height at which they do not."""

    agrees: bool
    snapshots_checked: int
    differs_at: int | None
