"""Rows of a collection in the simulator: clients put, compare and swap, and delete them, with faults and expiry."""

from collections.abc import Callable
from typing import Final

from fastness.errors import VersionConflict
from fastness.kv import Transaction
from fastness.layers import collections as layer
from fastness.testing.histories import Violation
from fastness.testing.register_clients import add_register_clients
from fastness.testing.simulation import Simulation
from fastness.wire.collections import DeleteRows, PutRow, Row, RowChange, ScanRows

_COPIES: Final = ("a", "b")  # Each commit writes the same row into both partitions.


def collections(simulation: Simulation) -> Callable[[], None]:
    """Rows are strictly serializable, and the rows of one commit are seen together or not at all."""
    return add_register_clients(simulation, read=_read, write=_write, swap=_swap, steps=20)


def _rows(tx: Transaction, key: str) -> list[Row]:
    """The rows of a key, one in each partition, without those that expire at once."""
    pages = [layer.scan(tx, ScanRows("scenario", copy, (key,), reverse=True, limit=1)) for copy in _COPIES]
    return [row for page in pages for row in page.rows]


def _read(tx: Transaction, key: str) -> str | None:
    found = _rows(tx, key)
    if len({(row.key, row.value, row.version) for row in found}) > 1 or len(found) not in (0, len(_COPIES)):
        raise Violation(f"The rows of one commit differ: {found}", [])
    return found[0].value.decode() if found else None


def _write(tx: Transaction, key: str, value: str) -> None:
    """Replace the row by deleting everything of the key, and add one that expires."""
    changes: list[RowChange] = []
    for copy in _COPIES:
        changes += [DeleteRows(copy, (key,)), PutRow(copy, (key, 1), value.encode())]
        changes.append(PutRow(copy, (f"{key} expires", value), b"", ttl_seconds=0.5))
    layer.commit(tx, "main", "scenario", changes)


def _swap(tx: Transaction, key: str, expected: str | None, value: str) -> bool:
    found = _rows(tx, key)
    if (found[0].value.decode() if found else None) != expected:
        return False
    version = found[0].version if found else 0
    try:
        layer.commit(tx, "main", "scenario", [PutRow(_COPIES[0], (key, 1), b"", if_version=version + 1)])
    except VersionConflict:
        changes = [PutRow(copy, (key, 1), value.encode(), if_version=version) for copy in _COPIES]
        layer.commit(tx, "main", "scenario", changes)
        return True
    raise Violation(f"A row with version {version} was replaced as if it had another", [])
