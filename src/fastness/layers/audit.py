"""The audit log: one record of each action that changes how a plane works or deletes data.

    (u, universe, "audit", "log", at_ms, id)  ->  the entry of an action in a universe
    ("audit", at_ms, id)                      ->  the entry of an action on the plane itself
    (u, universe, "audit", "log"), ("audit",) ->  how many entries the log has

    begin ──► started ── the action's outcome ──► ok, or the code of its error
                 └────── the server ended before the outcome was stored ──► started

The entry is committed before the action. Commits are lost from the end only, so an action that survives a power failure
has its entry.
"""

from functools import lru_cache
from typing import Final

import msgspec

from fastness.errors import InvalidArgument
from fastness.kv import Subspace, Transaction
from fastness.limits import AUDIT_ENTRIES_MAX, AUDIT_EXPIRY_BATCH, AUDIT_SCANNED_MAX
from fastness.wire.audit import AuditEntry, AuditPage, ReadAudit

PLANE: Final = Subspace("audit")

_POSITION_CHARACTERS_MAX: Final = 48  # Milliseconds, a dash and an id.

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(AuditEntry).decode
_decode_count = msgspec.msgpack.Decoder(int).decode


@lru_cache(maxsize=1_024)
def log_of(universe: str | None) -> Subspace:
    """The log of a universe, or of the plane itself."""
    return PLANE if universe is None else Subspace("u", universe, "audit", "log")


def begin(tx: Transaction, entry: AuditEntry, *, entries_max: int = AUDIT_ENTRIES_MAX) -> AuditEntry:
    """Store an entry with a new id and the current time. A full log loses its oldest entries."""
    log = log_of(entry.universe)
    count = _count(tx, log) + 1
    if count > entries_max:
        count -= _delete_first(tx, log.range(), count - entries_max)
    entry = msgspec.structs.replace(entry, id=tx.new_id().hex, at_ms=tx.now_ms)
    tx.put(log.key(entry.at_ms, entry.id), _encode(entry))
    tx.put(log.prefix, _encode(count))
    return entry


def finish(tx: Transaction, entry: AuditEntry, outcome: str, count: int | None = None) -> None:
    """Store the outcome of an action whose entry is still there."""
    key = log_of(entry.universe).key(entry.at_ms, entry.id)
    if tx.get(key) is not None:
        tx.put(key, _encode(msgspec.structs.replace(entry, outcome=outcome, count=count)))


def page(tx: Transaction, request: ReadAudit) -> AuditPage:
    """At most `limit` entries that match, the newest first.

    Raises:
        InvalidArgument: `after` is not the `next` of a page.
    """
    since_ms, until_ms, limit = request.since_ms, request.until_ms, request.limit
    actor, action = request.actor, request.action
    log = log_of(request.universe)
    first, end = log.range()
    if since_ms is not None:
        first = log.key(since_ms)
    if until_ms is not None:
        end = log.key(until_ms)
    if request.after:
        end = min(end, log.key(*_position(request.after)))
    found: list[AuditEntry] = []
    if first >= end:
        return AuditPage(found, None)
    pairs = tx.scan(first, end, limit=AUDIT_SCANNED_MAX, reverse=True)
    for _, value in pairs:
        entry = _decode(value)
        if _matches(entry, actor, action):
            found.append(entry)
            if len(found) == limit:
                return AuditPage(found, _position_of(entry))
    last = _decode(pairs[-1][1]) if len(pairs) == AUDIT_SCANNED_MAX else None
    return AuditPage(found, None if last is None else _position_of(last))


def expire(tx: Transaction, universe: str | None, keep_ms: int) -> int:
    """Delete a batch of the entries that are older than `keep_ms`; how many."""
    log = log_of(universe)
    before_ms = tx.now_ms - keep_ms
    if before_ms <= 0:
        return 0
    deleted = _delete_first(tx, (log.range()[0], log.key(before_ms)), AUDIT_EXPIRY_BATCH)
    if deleted:
        tx.put(log.prefix, _encode(max(_count(tx, log) - deleted, 0)))
    return deleted


def _count(tx: Transaction, log: Subspace) -> int:
    stored = tx.get(log.prefix)
    return 0 if stored is None else _decode_count(stored)


def _delete_first(tx: Transaction, bounds: tuple[bytes, bytes], limit: int) -> int:
    pairs = tx.scan(*bounds, limit=min(limit, AUDIT_EXPIRY_BATCH))
    for key, _ in pairs:
        tx.delete(key)
    return len(pairs)


def _matches(entry: AuditEntry, actor: str, action: str) -> bool:
    if actor and actor not in (entry.actor, entry.token_id):
        return False
    return not action or (entry.action.startswith(action[:-1]) if action.endswith("*") else entry.action == action)


def _position_of(entry: AuditEntry) -> str:
    return f"{entry.at_ms}-{entry.id}"


def _position(after: str) -> tuple[int, str]:
    at_ms, dash, id = after.partition("-")
    if not dash or not at_ms.isdecimal() or len(after) > _POSITION_CHARACTERS_MAX:
        raise InvalidArgument(f"after is {after[:80]!r}, which no page returned; give the `next` of a page")
    return int(at_ms), id
