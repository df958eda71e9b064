"""Tombstones: what `forget` has removed from the lake, so that no later job brings it back.

A tombstone has no name, only a digest: HMAC-SHA-256 of the universe, the target and the name. Without a key, a guessed
name can be confirmed by anyone who reads the lake; with one (`--key-file`), only by those who have the key.

A target is a kind of source, or a column of a table that names a person:

    world, kind, queue, session
    mail.sender, mail.recipient, leases.owner, entity_changes.id, states.key
"""

import hashlib
import hmac
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import pyarrow as pa

from fastness.errors import InvalidArgument, PathUnusable
from fastness.names import folder_at
from fastness.pipeline.lake import Lake
from fastness.pipeline.schemas import TOMBSTONES

SOURCES: Final = ("world", "kind", "queue", "session")
# The field of session log records, by kind of log, that a target is compared with.
LOG_FIELDS: Final = {
    "queue": ("queues", "queue"),
    "mail.sender": ("mail", "sender"),
    "mail.recipient": ("mail", "to"),
    "leases.owner": ("leases", "owner"),
}
MATCHES: Final = ("mail.sender", "mail.recipient", "leases.owner", "entity_changes.id", "states.key")
_ADDRESSES: Final = ("mail.sender", "mail.recipient")  # An agent may be named with its universe: ada@main.
_KEY_ID_DIGITS: Final = 16


class Hidden(msgspec.Struct, frozen=True):
    """The tombstones of a lake, and the key of their digests. It is sent to executors."""

    tombstones: dict[str, int | None] = {}  # The incarnation by digest.
    targets: frozenset[tuple[str, str]] = frozenset()  # The (universe, target) pairs that have any.
    key: bytes = b""

    def hides(self, target: str, universe: str, name: str, incarnation: int | None = None) -> bool:
        """Whether a source or value is forgotten; of a world, only up to the incarnation that was."""
        if (universe, target) not in self.targets:
            return False
        found = digest(self.key, universe, target, name)
        if found not in self.tombstones:
            return False
        last = self.tombstones[found]
        return last is None or incarnation is None or incarnation <= last

    def hides_record(self, universe: str, kind: str, record: str) -> bool:
        """Whether a record of a session log is about a forgotten queue, agent or owner."""
        for target, (log_kind, field) in LOG_FIELDS.items():
            if kind == log_kind and (universe, target) in self.targets:
                name = field_of(record, field)
                if name is not None and self.hides(target, universe, name):
                    return True
        return False

    def visible(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The rows of `activity` that are not forgotten; those of one file have one universe and kind."""
        if not self.targets or not batch.num_rows:
            return batch
        universe, kind = batch.column("universe")[0].as_py(), batch.column("kind")[0].as_py()
        records = batch.column("record").to_pylist()
        return batch.filter(pa.array([not self.hides_record(universe, kind, record) for record in records], pa.bool_()))


def load(lake: Lake, key_file: str | None) -> Hidden:
    """The tombstones of a lake.

    Raises:
        InvalidArgument: they were made with another key.
        PathUnusable: the key cannot be read.
    """
    table = lake.table(TOMBSTONES)
    if not table.exists:
        return Hidden()
    key = read_key(key_file)
    rows = table.rows(["universe", "target", "name_digest", "key_id", "incarnation"]).to_pylist()
    check_key(key, {row["key_id"] for row in rows})
    incarnations: dict[str, int | None] = {}
    for row in rows:  # The latest incarnation that was forgotten.
        known = incarnations.get(row["name_digest"])
        incarnations[row["name_digest"]] = max(filter(None, (known, row["incarnation"])), default=None)
    return Hidden(incarnations, frozenset((row["universe"], row["target"]) for row in rows), key)


def check_key(key: bytes, key_ids: Iterable[str | None]) -> None:
    """Check that digests of these keys can be compared.

    Raises:
        InvalidArgument: they were made with another key.
    """
    if any(each != key_id(key) for each in key_ids):
        raise InvalidArgument(
            "The tombstones of the lake were made with another key, so what was forgotten cannot be recognised; give "
            "the key that they were made with: --key-file FILE"
        )


def digest(key: bytes, universe: str, target: str, name: str) -> str:
    """The digest of a name. The address of an agent is the same with and without its universe."""
    if target in _ADDRESSES:
        name = name.removesuffix(f"@{universe}")
    return hmac.digest(key, "\0".join((universe, target, name)).encode(), hashlib.sha256).hex()


def key_id(key: bytes) -> str | None:
    """A name for a key, which does not reveal it."""
    return hashlib.sha256(b"fastness key id\0" + key).hexdigest()[:_KEY_ID_DIGITS] if key else None


def read_key(path: str | None) -> bytes:
    """The key in a file, without white space around it; empty without a file.

    Raises:
        PathUnusable: the file cannot be read, or is empty.
    """
    if path is None:
        return b""
    try:
        key = Path(folder_at(path)).read_bytes().strip()
    except OSError as error:
        raise PathUnusable(f"The key file {path} cannot be read ({error.strerror}); check the path") from error
    if not key:
        raise PathUnusable(f"The key file {path} is empty; write a random key into it")
    return key


def field_of(record: str | None, field: str) -> str | None:
    """A text field of a JSON object; None if there is none."""
    try:
        found = msgspec.json.decode(record or "")
    except (msgspec.DecodeError, UnicodeError):
        return None
    value = found.get(field) if isinstance(found, dict) else None
    return value if isinstance(value, str) else None


def names_of(target: str, universe: str, name: str) -> tuple[str, ...]:
    """The forms in which rows have a name."""
    if target not in _ADDRESSES:
        return (name,)
    short = name.removesuffix(f"@{universe}")
    return (short, f"{short}@{universe}")


def rows_of(found: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Tombstones as rows of the table."""
    return pa.Table.from_pylist([dict(row) for row in found], TOMBSTONES.schema)
