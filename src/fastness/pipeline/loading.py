"""Bulk loads into queues, mailboxes and inboxes: every row exactly once, even if a load is repeated. No Spark here.

A load has a name, and a row has a key. The commit that writes a row also writes a state document:

    loads/<load>/<hash of the key>

A row whose document exists was written before, and is skipped. So a load that failed half-way can simply be repeated,
by any number of tasks, and ends with every row written once. `loads/<load>` has the counts of the last run.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from decimal import Decimal
from typing import Any, Final

import msgspec
import orjson

from fastness.client.transport import RemoteTransport
from fastness.errors import Busy, CasMismatch, InvalidArgument
from fastness.limits import (
    CONFLICT_RETRIES_MAX,
    INBOX_INLINE_BYTES_MAX,
    LOAD_BATCH_BYTES,
    LOAD_BATCH_ROWS,
    LOAD_LOOKUP_THREADS,
    PAYLOAD_INLINE_BYTES_MAX,
)
from fastness.names import UNIVERSE, checked_name
from fastness.pipeline.config import Config
from fastness.plane import Options, open_plane
from fastness.tiers import Tier
from fastness.wire import Transport
from fastness.wire.atomic import CommitAtomic, Step
from fastness.wire.blobs import PutBlob
from fastness.wire.canonical import canonical
from fastness.wire.inboxes import DomainEvent
from fastness.wire.mail import NewMail, SendMail
from fastness.wire.queues import NewMessage, PutMessages
from fastness.wire.states import GetState, UpdateState
from fastness.wire.worlds import PutItem

Row = Mapping[str, Any]

# The columns of each target: required and optional ones.
COLUMNS: Final[dict[str, tuple[tuple[str, ...], tuple[str, ...]]]] = {
    "queues": (
        ("payload",),
        (
            "queue",
            "universe",
            "content_type",
            "attributes",
            "correlation_id",
            "priority",
            "group",
            "delay_seconds",
            "ttl_seconds",
            "max_attempts",
            "visibility_seconds",
            "retry_delay_seconds",
        ),
    ),
    "mail": (("recipient", "sender", "body"), ("universe", "content_type", "correlation_id")),
    "inboxes": (("world", "schema", "payload"), ("universe",)),
}


class Load(msgspec.Struct, frozen=True):
    """The parameters of a load. `key` is the column that identifies a row."""

    name: str
    target: str
    key: str = "key"
    queue: str | None = None  # Default for rows without one.
    universe: str = UNIVERSE  # Default for rows without one.


class LoadResult(msgspec.Struct, frozen=True):
    """The number of rows written, and of rows that were written before."""

    written: int = 0
    known: int = 0


def check_columns(load: Load, columns: Iterable[str]) -> None:
    """Raise unless rows with these columns can be loaded.

    Raises:
        InvalidArgument: a column is missing, or unknown to the target.
        InvalidName: the load's name is invalid.
    """
    checked_name("load", load.name)
    if load.target not in COLUMNS:
        raise InvalidArgument(f"Cannot load into {load.target!r}; the targets are {', '.join(COLUMNS)}")
    needed, known = COLUMNS[load.target]
    have = set(columns)
    missing = [name for name in (*needed, load.key) if name not in have]
    if load.target == "queues" and load.queue is None and "queue" not in have:
        missing.append("queue")
    if missing:
        raise InvalidArgument(
            f"Rows for {load.target} lack the columns {', '.join(missing)}; the option `key` names the key column"
        )
    unknown = sorted(have - {*needed, *known, load.key})
    if unknown:
        raise InvalidArgument(f"Rows for {load.target} have unknown columns {', '.join(unknown)}; drop them")


def run(transport: Transport, load: Load, rows: Iterable[Row]) -> LoadResult:
    """Write the rows that were not written before.

    Raises:
        InvalidArgument: a row has no key, or an invalid value.
        MailboxFull: a mailbox is full. Rows written so far stay; run the load again when there is space.
    """
    written = known = 0
    for batch in _batches(load, rows):
        fresh = _commit(transport, load, batch)
        written += fresh
        known += len(batch) - fresh
    return LoadResult(written, known)


def store_summary(transport: Transport, load: Load, loaded: Iterable[LoadResult]) -> None:
    """Store the counts of a finished run."""
    all = list(loaded)
    counts = {"written": sum(each.written for each in all), "known": sum(each.known for each in all)}
    transport.call(UpdateState(summary_key(load), canonical(counts), universe=load.universe))


def summary_key(load: Load) -> str:
    """The state document with the counts of a load's last run."""
    return f"loads/{load.name}"


@contextmanager
def open_transport(config: Config) -> Iterator[Transport]:
    """A transport to the plane, for writing."""
    if config.data.startswith(("http://", "https://")):
        patience = config.patience_seconds
        transport: Transport = RemoteTransport(
            config.data, token=config.token, tls=config.tls(), patience_seconds=patience
        )
    else:
        transport = open_plane(
            config.data,
            Options(
                objects=config.objects,
                activity=next(iter(config.activity_folders), None),
                encryption=config.encryption(),
            ),
        )
    try:
        yield transport
    finally:
        transport.close()


def _batches(load: Load, rows: Iterable[Row]) -> Iterator[dict[tuple[str, str], Row]]:
    """Rows by universe and document key, in batches for one commit each. The first row of a key counts."""
    batch: dict[tuple[str, str], Row] = {}
    size = 0
    for row in rows:
        batch.setdefault(_ledger_key(load, row), row)
        size += len(_bytes(row.get("payload", row.get("body")))[0])
        if len(batch) >= LOAD_BATCH_ROWS or size >= LOAD_BATCH_BYTES:
            yield batch
            batch, size = {}, 0
    if batch:
        yield batch


def _commit(transport: Transport, load: Load, batch: dict[tuple[str, str], Row]) -> int:
    """Write a batch in one commit; returns how many of its rows are new."""
    left = batch
    for _ in range(CONFLICT_RETRIES_MAX):
        if not left:
            return 0
        done: list[Step] = [UpdateState(key, _WRITTEN, if_absent=True, universe=universe) for universe, key in left]
        steps = _merge_steps(_STEPS[load.target](transport, load, *ledger_key, row) for ledger_key, row in left.items())
        try:
            transport.call(CommitAtomic(done + steps, tier=Tier.CRITICAL))
        except CasMismatch:
            # Some rows were written before. They are looked up only now, because most loads run once.
            left = _unwritten(transport, left)
        else:
            return len(left)
    raise Busy(f"Another run of load {load.name} keeps committing first; run it again when that one is done")


def _unwritten(transport: Transport, batch: dict[tuple[str, str], Row]) -> dict[tuple[str, str], Row]:
    """The rows that were not written before. Threads, because the client batches concurrent calls."""
    with ThreadPoolExecutor(LOAD_LOOKUP_THREADS) as pool:
        found = pool.map(lambda ledger_key: transport.call(GetState(ledger_key[1], ledger_key[0])).state, batch)
        return {ledger_key: batch[ledger_key] for ledger_key, state in zip(batch, found, strict=True) if state is None}


def _merge_steps(steps: Iterable[Step]) -> list[Step]:
    """The same steps, with those of the same queue, or the same sender, merged."""
    found: dict[tuple[str, ...], Step] = {}
    for n, step in enumerate(steps):
        if isinstance(step, PutMessages):
            ledger_key: tuple[str, ...] = ("queue", step.queue, step.universe)
        elif isinstance(step, SendMail):
            ledger_key = ("mail", step.sender, step.universe)
        else:
            ledger_key = (str(n),)
        before = found.get(ledger_key)
        if isinstance(before, PutMessages) and isinstance(step, PutMessages):
            before.messages.extend(step.messages)
        elif isinstance(before, SendMail) and isinstance(step, SendMail):
            before.mails.extend(step.mails)
        else:
            found[ledger_key] = step
    return list(found.values())


def _ledger_key(load: Load, row: Row) -> tuple[str, str]:
    key = row.get(load.key)
    if key is None:
        raise InvalidArgument(f"A row has no {load.key!r}, the column that identifies it; give every row a key")
    name = key if isinstance(key, bytes) else str(key).encode()
    universe = checked_name("universe", row.get("universe") or load.universe)
    return universe, f"loads/{load.name}/{hashlib.sha256(name).hexdigest()[:40]}"


def _message(transport: Transport, load: Load, universe: str, key: str, row: Row) -> Step:
    del key
    payload, kind = _bytes(row["payload"])
    options = {name: parse(name, row[name]) for name, parse in _OPTIONS.items() if row.get(name) is not None}
    options.setdefault("content_type", kind)
    queue = row.get("queue") or load.queue
    if len(payload) > PAYLOAD_INLINE_BYTES_MAX:
        hash = transport.call(PutBlob(payload, universe, pinned=False)).hash
        message = NewMessage(blob=hash, blob_size=len(payload), **options)
    else:
        message = NewMessage(payload=payload, **options)
    if not isinstance(queue, str):
        raise InvalidArgument("A row has no queue; fill the column, or set the option `queue`")
    return PutMessages(queue, [message], universe)


def _mail(transport: Transport, load: Load, universe: str, key: str, row: Row) -> Step:
    del transport, load
    body, kind = _bytes(row["body"])
    id = key.rpartition("/")[2]  # Readers can deduplicate by it, too.
    mail = NewMail(row["recipient"], body, id, row.get("content_type") or kind, row.get("correlation_id"))
    return SendMail(row["sender"], [mail], universe)


def _item(transport: Transport, load: Load, universe: str, key: str, row: Row) -> Step:
    del load
    payload, _ = _bytes(row["payload"])
    name = key.rpartition("/")[2].encode()
    if len(payload) > INBOX_INLINE_BYTES_MAX:
        hash = transport.call(PutBlob(payload, universe, pinned=False)).hash
        return PutItem(row["world"], DomainEvent(schema=row["schema"], payload_blob=hash, key=name), universe)
    return PutItem(row["world"], DomainEvent(schema=row["schema"], payload=payload, key=name), universe)


def _seconds(name: str, value: Any) -> float:
    try:
        return float(value)  # Spark may pass a Decimal.
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"{name} of a row is {value!r}; use a number of seconds") from error


def _integer(name: str, value: Any) -> int:
    """A whole number. Files without types, such as CSV, have it as text; Spark may pass a Decimal."""
    try:
        number = Decimal(str(value))
        if isinstance(value, bool) or number != int(number):
            raise ValueError(value)
    except (ArithmeticError, ValueError) as error:
        raise InvalidArgument(f"{name} of a row is {value!r}; use a whole number") from error
    return int(number)


def _text(name: str, value: Any) -> str:
    if isinstance(value, str) or type(value) is int:
        return str(value)
    raise InvalidArgument(f"{name} of a row is {value!r}; use text")


def _attributes(name: str, value: Any) -> dict[str, str]:
    """A map of text to text, or the same as a JSON object: CSV has no maps."""
    try:
        given = orjson.loads(value) if isinstance(value, str) else value
        return msgspec.convert(given, dict[str, str])
    except (ValueError, msgspec.ValidationError) as error:
        raise InvalidArgument(
            f'{name} of a row is {value!r}; use a map of text to text, or a JSON object such as {{"name": "value"}}'
        ) from error


def _bytes(value: Any) -> tuple[bytes, str]:
    """A value as bytes and their content type: bytes unchanged, text as JSON text, anything else encoded as JSON."""
    if isinstance(value, bytes | bytearray):
        return bytes(value), "application/octet-stream"
    if isinstance(value, str):
        return value.encode(), "application/json"
    try:
        return orjson.dumps(value), "application/json"
    except (TypeError, ValueError) as error:
        raise InvalidArgument(
            f"A payload of type {type(value).__name__} cannot be encoded as JSON ({error}); encode it first"
        ) from error


_OPTIONS: Final[dict[str, Callable[[str, Any], Any]]] = {
    "content_type": _text,
    "attributes": _attributes,
    "correlation_id": _text,
    "priority": _integer,
    "group": _text,
    "delay_seconds": _seconds,
    "ttl_seconds": _seconds,
    "max_attempts": _integer,
    "visibility_seconds": _seconds,
    "retry_delay_seconds": _seconds,
}
_WRITTEN: Final = canonical(True)
_STEPS: Final[dict[str, Callable[[Transport, Load, str, str, Row], Step]]] = {
    "queues": _message,
    "mail": _mail,
    "inboxes": _item,
}
