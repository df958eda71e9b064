"""Redaction: fields of records that are replaced before they are written to the lake.

    [[redact]]
    table = "journal"        journal, entity_changes, activity, queued_messages, stored_mail or states
    source = "chat-*"        worlds, kinds of entities or session logs, queues, recipients, keys; without it, all
    path = "$.user.email"    also $.items[*].name and the JSON pointer /user/email
    method = "hmac"          or "marker", the default

A marker says only that there was a value. An HMAC is the same for equal values, so that rows can be counted and joined,
and reveals nothing without the key. The column `hash` stays that of the original record: an audit compares it with the
plane's. The column `redacted` names the rows that do not have the content of that hash.
"""

import fnmatch
import hashlib
import hmac
import re
import tomllib
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import cbor2
import msgspec
import pyarrow as pa

from fastness.errors import InvalidArgument, PathUnusable
from fastness.layers.journal_records import Kind
from fastness.names import folder_at
from fastness.pipeline import tombstones
from fastness.pipeline.codec import payload_of
from fastness.pipeline.config import Config
from fastness.pipeline.lake import Lake, Move, retries
from fastness.pipeline.schemas import PLANES

MARKER: Final = "[redacted]"
_WATERMARK: Final = "redaction"
_STEP: Final = re.compile(r"\.(\w[\w-]*)|\[(\d+|\*)\]|\[\"([^\"]+)\"\]")
_HMAC_DIGITS: Final = 32
_KINDS: Final = {kind.name.lower(): int(kind) for kind in Kind}
_Step: TypeAlias = str | int | None  # A field, an index; None: all elements.


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A field to replace."""

    table: Literal["journal", "entity_changes", "activity", "queued_messages", "stored_mail", "states"]
    path: str
    source: str = "*"
    method: Literal["marker", "hmac"] = "marker"

    @property
    def steps(self) -> tuple[_Step, ...]:
        """The path, as fields and indices.

        Raises:
            InvalidArgument: it is not a path.
        """
        if self.path.startswith("/"):
            names = (name.replace("~1", "/").replace("~0", "~") for name in self.path[1:].split("/"))
            return tuple(int(name) if name.isdecimal() else name for name in names)
        found, end = list[_Step](), 1
        while self.path.startswith("$") and (step := _STEP.match(self.path, end)):
            name, index, quoted = step.groups()
            found.append(name or quoted or (None if index == "*" else int(index)))
            end = step.end()
        if not found or end < len(self.path):
            raise InvalidArgument(f"The path {self.path!r} is invalid; use $.name, $.list[*].name or a JSON pointer")
        return tuple(found)


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    redact: list[Rule] = []


class Redaction(msgspec.Struct, frozen=True):
    """The rules of a run, and the key of HMACs. It is sent to executors."""

    rules: list[Rule] = []
    key: bytes = b""

    def journal(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Rows of `journal`, as they are stored."""
        redacted = [False] * batch.num_rows
        columns = {name: batch.column(name) for name in batch.schema.names}
        if any(rule.table == "journal" for rule in self.rules):
            payloads, raws = columns["payload"].to_pylist(), columns["raw"].to_pylist()
            kinds = columns["kind"].to_pylist()
            for n, world in enumerate(columns["world"].to_pylist()):
                if paths := self._paths("journal", world):
                    value = cbor2.loads(raws[n])[1]
                    value, redacted[n] = self._replace(value, paths)
                    if redacted[n]:
                        payloads[n] = payload_of(value)
                        raws[n] = cbor2.dumps([_KINDS[kinds[n]], value], canonical=True)
            columns |= {"payload": pa.array(payloads, pa.string()), "raw": pa.array(raws, pa.binary())}
        return pa.RecordBatch.from_pydict(columns | {"redacted": pa.array(redacted, pa.bool_())})

    def activity(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Rows of `activity`, as they are stored."""
        redacted = [False] * batch.num_rows
        columns = {name: batch.column(name) for name in batch.schema.names}
        if any(rule.table == "activity" for rule in self.rules):
            records = columns["record"].to_pylist()
            for n, kind in enumerate(columns["kind"].to_pylist()):
                if paths := self._paths("activity", kind):
                    value, redacted[n] = self._replace(msgspec.json.decode(records[n]), paths)
                    records[n] = msgspec.json.encode(value).decode() if redacted[n] else records[n]
            columns["record"] = pa.array(records, pa.string())
        return pa.RecordBatch.from_pydict(columns | {"redacted": pa.array(redacted, pa.bool_())})

    def change(self, row: dict[str, Any]) -> dict[str, Any]:
        """A row of `entity_changes`, as it is stored."""
        paths = self._paths("entity_changes", row["kind"])
        if not paths or row["fields"] is None:
            return {**row, "redacted": False}
        value, is_redacted = self._replace(msgspec.json.decode(row["fields"]), paths)
        fields = msgspec.json.encode(value).decode() if is_redacted else row["fields"]
        return {**row, "fields": fields, "redacted": is_redacted}

    def content(self, table: str, text: str | None, *sources: str) -> str | None:
        """The content of a message, a mail or a state document, as it is stored, by the rules of any of the sources.

        Content that has rules and is not JSON is replaced as a whole, because its fields are not known.
        """
        paths = self._paths(table, *sources)
        if not paths or text is None:
            return text
        try:
            value, is_redacted = self._replace(msgspec.json.decode(text), paths)
        except (msgspec.DecodeError, RecursionError):
            return MARKER
        return msgspec.json.encode(value).decode() if is_redacted else text

    def covers_world(self, world: str) -> bool:
        """Whether records of a world are redacted."""
        return bool(self._paths("journal", world))

    def _paths(self, table: str, *sources: str) -> list[tuple[tuple[_Step, ...], str]]:
        return [
            (rule.steps, rule.method)
            for rule in self.rules
            if rule.table == table and any(fnmatch.fnmatchcase(source, rule.source) for source in sources)
        ]

    def _replace(self, value: Any, paths: list[tuple[tuple[_Step, ...], str]]) -> tuple[Any, bool]:
        is_changed = False
        for steps, method in paths:
            value, changed = self._replace_at(value, steps, method)
            is_changed |= changed
        return value, is_changed

    def _replace_at(self, value: Any, steps: tuple[_Step, ...], method: str) -> tuple[Any, bool]:
        """The value with the field replaced, and whether it has one."""
        if not steps:
            return (None, False) if value is None else (self._replacement(value, method), True)
        step, rest = steps[0], steps[1:]
        if isinstance(value, dict):
            keys = list(value) if step is None else [key for key in value if key == step or str(key) == str(step)]
            parts = {key: self._replace_at(value[key], rest, method) for key in keys}
            return {**value, **{key: part for key, (part, _) in parts.items()}}, any(each for _, each in parts.values())
        if isinstance(value, (list, tuple)) and (step is None or (isinstance(step, int) and step < len(value))):
            changed = [
                self._replace_at(each, rest, method) if step in (None, n) else (each, False)
                for n, each in enumerate(value)
            ]
            return [each for each, _ in changed], any(each for _, each in changed)
        return value, False

    def _replacement(self, value: Any, method: str) -> str:
        if method == "marker":
            return MARKER
        content = payload_of(value)
        data = repr(value) if content is None else content
        return "hmac:" + hmac.digest(self.key, data.encode(), hashlib.sha256).hex()[:_HMAC_DIGITS]


def load(config: Config) -> Redaction:
    """The rules of a configuration.

    Raises:
        InvalidArgument: a rule is invalid, or HMACs have no key.
        PathUnusable: a file cannot be read.
    """
    if config.redact_file is None:
        return Redaction()
    try:
        found = tomllib.loads(Path(folder_at(config.redact_file)).read_text())
        rules = msgspec.convert(found, _File).redact
    except OSError as error:
        raise PathUnusable(
            f"The rules {config.redact_file} cannot be read ({error.strerror}); check --redact"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.ValidationError) as error:
        raise InvalidArgument(f"The rules in {config.redact_file} are invalid ({error}); correct them") from error
    key = tombstones.read_key(config.key_file)
    for rule in rules:
        _ = rule.steps
        if rule.method == "hmac" and not key:
            raise InvalidArgument(f"The rule for {rule.path} replaces values by HMACs; give their key: --key-file FILE")
    return Redaction(rules, key)


def claim(lake: Lake, config: Config) -> None:
    """Check that a lake with redacted rows gets no other ones by mistake, and record that this run has rules.

    Raises:
        InvalidArgument: earlier runs had rules, and this one has none.
    """
    is_redacted = lake.table(PLANES).watermark(_WATERMARK) > 0
    if is_redacted and config.redact_file is None:
        raise InvalidArgument(
            "Earlier runs have redacted what they wrote to this lake; give the rules with --redact FILE. To stop "
            "redacting, give a file without rules"
        )
    if config.redact_file is not None and not is_redacted:
        retries.retry_until_committed("the redaction of the lake", lambda: _record(lake))


def _record(lake: Lake) -> None:
    table = lake.table(PLANES)
    if not table.watermark(_WATERMARK):
        table.append([], {_WATERMARK: Move(0, 1)})
