"""Bulk loads into queues, mailboxes and inboxes: every row once, whatever is run again. No Spark in it.

A load has a name, and a row has a key. In the commit that writes a row, a state document is written that says so:

    loads/<load>/<hash of the key>

A row whose document is there was written before, and is passed over. So a load that failed half-way is run again as
it is, by as many tasks as like, and ends with every row written once. `loads/<load>` says how its last run went.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Final

import msgspec
import orjson

from holdfast.client.transport import RemoteTransport
from holdfast.errors import Busy, CasMismatch, InvalidArgument
from holdfast.limits import (
    CONFLICT_RETRIES_MAX,
    INBOX_INLINE_BYTES_MAX,
    LOAD_BATCH_BYTES,
    LOAD_BATCH_ROWS,
    LOAD_LOOKS,
    PAYLOAD_INLINE_BYTES_MAX,
)
from holdfast.names import UNIVERSE, checked_name
from holdfast.pipeline.config import Config
from holdfast.plane import Options, open_plane
from holdfast.tiers import Tier
from holdfast.wire import Transport
from holdfast.wire.atomic import CommitAtomic, Step
from holdfast.wire.blobs import PutBlob
from holdfast.wire.canonical import canonical
from holdfast.wire.inboxes import DomainEvent
from holdfast.wire.mail import NewMail, SendMail
from holdfast.wire.queues import NewMessage, PutMessages
from holdfast.wire.states import GetState, UpdateState
from holdfast.wire.worlds import PutItem

Row = Mapping[str, Any]

# The columns of each target: those that a row must have, and those that it may have.
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
        ),
    ),
    "mail": (("recipient", "sender", "body"), ("universe", "content_type", "correlation_id")),
    "inboxes": (("world", "schema", "payload"), ("universe",)),
}


class Load(msgspec.Struct, frozen=True):
    """What is loaded where. `key` is the column that tells rows apart."""

    name: str
    target: str
    key: str = "key"
    queue: str | None = None  # For rows that name none.
    universe: str = UNIVERSE  # For rows that name none.


class Loaded(msgspec.Struct, frozen=True):
    """How many rows were written, and how many had been before."""

    written: int = 0
    known: int = 0


def check_columns(load: Load, columns: Iterable[str]) -> None:
    """Raise unless rows with these columns can be loaded.

    Raises:
        InvalidArgument: a column is missing, or says nothing that a target understands.
        InvalidName: the load's name is none.
    """
    checked_name("load", load.name)
    if load.target not in COLUMNS:
        raise InvalidArgument(f"{load.target!r} takes no rows; load into {', '.join(COLUMNS)}")
    needed, known = COLUMNS[load.target]
    have = set(columns)
    missing = [name for name in (*needed, load.key) if name not in have]
    if load.target == "queues" and load.queue is None and "queue" not in have:
        missing.append("queue")
    if missing:
        raise InvalidArgument(
            f"Rows for {load.target} lack {', '.join(missing)}; the key is the column that the option `key` names"
        )
    unknown = sorted(have - {*needed, *known, load.key})
    if unknown:
        raise InvalidArgument(f"Rows for {load.target} have no use for {', '.join(unknown)}; drop these columns")


def run(transport: Transport, load: Load, rows: Iterable[Row]) -> Loaded:
    """Write the rows that were not written before.

    Raises:
        InvalidArgument: a row has no key, or a value that its target does not take.
        MailboxFull: a mailbox is full. What was written stays written; run the load again when there is room.
    """
    written = known = 0
    for batch in _batches(load, rows):
        fresh = _commit(transport, load, batch)
        written += fresh
        known += len(batch) - fresh
    return Loaded(written, known)


def summarise(transport: Transport, load: Load, loaded: Iterable[Loaded]) -> None:
    """Write down how a run went that is over."""
    all = list(loaded)
    counts = {"written": sum(each.written for each in all), "known": sum(each.known for each in all)}
    transport.call(UpdateState(summary_key(load), canonical(counts), universe=load.universe))


def summary_key(load: Load) -> str:
    """Where it is written down how the last run of a load went."""
    return f"loads/{load.name}"


@contextmanager
def opened(config: Config) -> Iterator[Transport]:
    """The plane, open to be written to."""
    if config.data.startswith(("http://", "https://")):
        patience = config.patience_seconds
        transport: Transport = RemoteTransport(
            config.data, token=config.token, tls=config.tls(), patience_seconds=patience
        )
    else:
        transport = open_plane(config.data, Options(objects=config.objects, activity=config.activity))
    try:
        yield transport
    finally:
        transport.close()


def _batches(load: Load, rows: Iterable[Row]) -> Iterator[dict[tuple[str, str], Row]]:
    """Rows by their ledger's universe and key, as many together as one commit takes. The first of a key counts."""
    batch: dict[tuple[str, str], Row] = {}
    size = 0
    for row in rows:
        batch.setdefault(_place(load, row), row)
        size += len(_bytes(row.get("payload", row.get("body")))[0])
        if len(batch) >= LOAD_BATCH_ROWS or size >= LOAD_BATCH_BYTES:
            yield batch
            batch, size = {}, 0
    if batch:
        yield batch


def _commit(transport: Transport, load: Load, batch: dict[tuple[str, str], Row]) -> int:
    """Write a batch in one commit; how many of its rows are new."""
    left = batch
    for _ in range(CONFLICT_RETRIES_MAX):
        if not left:
            return 0
        done: list[Step] = [UpdateState(key, _WRITTEN, if_absent=True, universe=universe) for universe, key in left]
        steps = _joined(_STEPS[load.target](transport, load, *place, row) for place, row in left.items())
        try:
            transport.call(CommitAtomic(done + steps, tier=Tier.CRITICAL))
        except CasMismatch:
            # Some were written before; which ones is found out only now, because most loads run once.
            left = _unknown(transport, left)
        else:
            return len(left)
    raise Busy(f"Others load {load.name} so fast that this cannot keep up; run it again when they are done")


def _unknown(transport: Transport, batch: dict[tuple[str, str], Row]) -> dict[tuple[str, str], Row]:
    """The rows that were not written before. Calls of several threads share the way to a server, and its answers."""
    with ThreadPoolExecutor(LOAD_LOOKS) as pool:
        found = pool.map(lambda place: transport.call(GetState(place[1], place[0])).state, batch)
        return {place: batch[place] for place, state in zip(batch, found, strict=True) if state is None}


def _joined(steps: Iterable[Step]) -> list[Step]:
    """The same steps, with those that put into one queue, or send from one mailbox, as one."""
    found: dict[tuple[str, ...], Step] = {}
    for n, step in enumerate(steps):
        if isinstance(step, PutMessages):
            place: tuple[str, ...] = ("queue", step.queue, step.universe)
        elif isinstance(step, SendMail):
            place = ("mail", step.sender, step.universe)
        else:
            place = (str(n),)
        before = found.get(place)
        if isinstance(before, PutMessages) and isinstance(step, PutMessages):
            before.messages.extend(step.messages)
        elif isinstance(before, SendMail) and isinstance(step, SendMail):
            before.mails.extend(step.mails)
        else:
            found[place] = step
    return list(found.values())


def _place(load: Load, row: Row) -> tuple[str, str]:
    key = row.get(load.key)
    if key is None:
        raise InvalidArgument(f"A row has no {load.key}, which tells it from others; give every row a key")
    name = key if isinstance(key, bytes) else str(key).encode()
    universe = checked_name("universe", row.get("universe") or load.universe)
    return universe, f"loads/{load.name}/{hashlib.sha256(name).hexdigest()[:40]}"


def _message(transport: Transport, load: Load, universe: str, key: str, row: Row) -> Step:
    del key
    payload, kind = _bytes(row["payload"])
    options = {name: row[name] for name in _OPTIONS if row.get(name) is not None}
    options |= {name: _seconds(name, options[name]) for name in _SECONDS if name in options}
    options.setdefault("content_type", kind)
    queue = row.get("queue") or load.queue
    if len(payload) > PAYLOAD_INLINE_BYTES_MAX:
        hash = transport.call(PutBlob(payload, universe)).hash
        message = NewMessage(blob=hash, blob_size=len(payload), **options)
    else:
        message = NewMessage(payload=payload, **options)
    if not isinstance(queue, str):
        raise InvalidArgument("A row names no queue; fill the column, or name one with the option `queue`")
    return PutMessages(queue, [message], universe)


def _mail(transport: Transport, load: Load, universe: str, key: str, row: Row) -> Step:
    del transport, load
    body, kind = _bytes(row["body"])
    id = key.rpartition("/")[2]  # So that it is the same mail for whoever reads it, too.
    mail = NewMail(row["recipient"], body, id, row.get("content_type") or kind, row.get("correlation_id"))
    return SendMail(row["sender"], [mail], universe)


def _item(transport: Transport, load: Load, universe: str, key: str, row: Row) -> Step:
    del load
    payload, _ = _bytes(row["payload"])
    name = key.rpartition("/")[2].encode()
    if len(payload) > INBOX_INLINE_BYTES_MAX:
        hash = transport.call(PutBlob(payload, universe)).hash
        return PutItem(row["world"], DomainEvent(schema=row["schema"], payload_blob=hash, key=name), universe)
    return PutItem(row["world"], DomainEvent(schema=row["schema"], payload=payload, key=name), universe)


def _seconds(name: str, value: Any) -> float:
    try:
        return float(value)  # Spark makes decimals of 1.5.
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"A row has {value!r} as its {name}; give a number of seconds") from error


def _bytes(value: Any) -> tuple[bytes, str]:
    """A value as bytes, and what kind of bytes: bytes as they are, text as the JSON that it is, the rest as JSON."""
    if isinstance(value, bytes | bytearray):
        return bytes(value), "application/octet-stream"
    if isinstance(value, str):
        return value.encode(), "application/json"
    try:
        return orjson.dumps(value), "application/json"
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"A payload of {type(value).__name__} has no JSON form ({error}); encode it") from error


_OPTIONS: Final = tuple(name for name in COLUMNS["queues"][1] if name not in ("queue", "universe"))
_SECONDS: Final = ("delay_seconds", "ttl_seconds", "visibility_seconds")
_WRITTEN: Final = canonical(True)
_STEPS: Final[dict[str, Callable[[Transport, Load, str, str, Row], Step]]] = {
    "queues": _message,
    "mail": _mail,
    "inboxes": _item,
}
