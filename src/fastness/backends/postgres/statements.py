"""The SQL statements of a session. Each connection prepares them under these names."""

import struct
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from fastness import limits
from fastness.backends.postgres.failover import IS_DURABLE
from fastness.backends.postgres.notifications import CHANNEL
from fastness.kv import Transaction, fence_floor
from fastness.kv.value_cipher import GENERATION, MARK, ValueCipher

Statement = tuple[bytes, list[bytes]]  # The name of a prepared statement, and its parameters in binary form.

# The position is read after the snapshot is taken or the lock is granted, so it covers every commit that can be seen.
_NOW: Final = "(extract(epoch FROM clock_timestamp()) * 1000)::bigint, pg_current_wal_insert_lsn()"

READING: Final = {
    b"read": "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY",
    b"now": f"SELECT {_NOW}",
    # What every transaction has to know: the generation of the encryption keys, and the fence floor.
    b"keys": f"""SELECT (SELECT value FROM fastness_kv WHERE key = '\\x{GENERATION.hex()}'),
        (SELECT value FROM fastness_kv WHERE key = '\\x{fence_floor.KEY.hex()}')""",
    b"get": "SELECT value FROM fastness_kv WHERE key = $1",
    b"scan": "SELECT key, value FROM fastness_kv WHERE key >= $1 AND key < $2 ORDER BY key LIMIT $3::bigint",
    b"back": "SELECT key, value FROM fastness_kv WHERE key >= $1 AND key < $2 ORDER BY key DESC LIMIT $3::bigint",
    b"size": """SELECT count(*), coalesce(sum(length(key) + length(value)), 0)::bigint
        FROM (SELECT key, value FROM fastness_kv WHERE key >= $1 AND key < $2 ORDER BY key LIMIT $3::bigint) AS page""",
    b"after": "SELECT key FROM fastness_kv WHERE key >= $1 AND key < $2 ORDER BY key OFFSET $3::bigint LIMIT 1",
    b"flushed": IS_DURABLE,
    b"begin": "BEGIN ISOLATION LEVEL READ COMMITTED",
    b"durable": "SET LOCAL synchronous_commit = on",
    b"sync": "SELECT pg_logical_emit_message(true, 'fastness', '')",
    b"commit": "COMMIT",
    b"rollback": "ROLLBACK",
}
WRITING: Final = {
    **READING,
    b"serializable": "BEGIN ISOLATION LEVEL SERIALIZABLE",
    b"try": f"SELECT pg_try_advisory_xact_lock($1::bigint), {_NOW}",
    b"try_shared": f"SELECT pg_try_advisory_xact_lock_shared($1::bigint), {_NOW}",
    b"wait": f"SELECT pg_advisory_xact_lock($1::bigint), {_NOW}",
    b"wait_shared": f"SELECT pg_advisory_xact_lock_shared($1::bigint), {_NOW}",
    b"put": """INSERT INTO fastness_kv SELECT * FROM unnest($1::bytea[], $2::bytea[])
        ON CONFLICT (key) DO UPDATE SET value = excluded.value""",
    b"delete": "DELETE FROM fastness_kv USING unnest($1::bytea[]) AS old(key) WHERE fastness_kv.key = old.key",
    b"clear": """DELETE FROM fastness_kv USING unnest($1::bytea[], $2::bytea[]) AS cleared(first, past)
        WHERE key >= first AND key < past""",
    b"notify": f"SELECT pg_notify('{CHANNEL}', $1::text)",
}
# On a standby the position is that of the last replayed commit, and `position` has what is known about it. Without a
# receiver, it is not known how far the primary is.
_STANDBY: Final = {
    **READING,
    b"now": "SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint, coalesce(pg_last_wal_replay_lsn(), '0/0')",
    b"position": """SELECT pg_is_in_recovery(), pg_last_wal_replay_lsn()::text,
        CASE WHEN pg_last_wal_receive_lsn() = pg_last_wal_replay_lsn() AND EXISTS (SELECT FROM pg_stat_wal_receiver)
            THEN 0 ELSE (extract(epoch FROM clock_timestamp() - pg_last_xact_replay_timestamp()) * 1000)::bigint END,
        (extract(epoch FROM clock_timestamp()) * 1000)::bigint""",
}

_BYTEA: Final = 17  # The type's OID.


def settings() -> bytes:
    """The settings of a connection. A commit waits for its sync only in a transaction that asks for it."""
    return f"""
        SET synchronous_commit = off;
        SET enable_seqscan = off;
        SET enable_bitmapscan = off;
        SET statement_timeout = {round(limits.STATEMENT_SECONDS_MAX * 1_000)};
        SET lock_timeout = {round(limits.LOCK_WAIT_SECONDS_MAX * 1_000)};
        SET idle_in_transaction_session_timeout = {round(limits.IDLE_TRANSACTION_SECONDS_MAX * 1_000)};
        SET client_min_messages = 'warning';
    """.encode()


def prepared(*, reading: bool, standby: bool) -> Mapping[bytes, str]:
    """The statements that a session uses, by name."""
    if standby:
        return _STANDBY
    return READING if reading else WRITING


def get(key: bytes) -> Statement:
    return b"get", [key]


def scan(begin: bytes, end: bytes, limit: int, reverse: bool) -> Statement:
    return b"back" if reverse else b"scan", [begin, end, number(limit)]


def size(begin: bytes, end: bytes, limit: int) -> tuple[Statement, Statement]:
    """The number and bytes of the first `limit` pairs of a range, and the key of the next one."""
    return (b"size", [begin, end, number(limit)]), (b"after", [begin, end, number(limit)])


def writes_of(tx: Transaction, cipher: ValueCipher) -> Iterator[Statement]:
    """The statements that write the changes of a transaction, with sealed values."""
    if tx.cleared:
        yield b"clear", [array(begin for begin, _ in tx.cleared), array(end for _, end in tx.cleared)]
    deleted = [key for key, value in tx.writes.items() if value is None]
    if deleted:
        yield b"delete", [array(deleted)]
    puts = {key: value for key, value in tx.writes.items() if value is not None}
    if cipher.is_on or any(value.startswith(MARK) for value in puts.values()):
        puts = {key: cipher.seal(key, value) for key, value in puts.items()}
    if puts:
        yield b"put", [array(puts), array(puts.values())]


def number(value: int) -> bytes:
    """A bigint in PostgreSQL's binary format."""
    return struct.pack("!q", value)


def array(items: Iterable[bytes]) -> bytes:
    """A bytea[] in PostgreSQL's binary format."""
    parts = [struct.pack("!i", len(item)) + item for item in items]
    if not parts:
        return struct.pack("!iii", 0, 0, _BYTEA)
    return struct.pack("!iiiii", 1, 0, _BYTEA, len(parts), 1) + b"".join(parts)
