"""Logs of a server: one line per event, as JSON for programs or as text for people.

    {"at":"2026-11-15T06:00:00.000Z","level":"warning","logger":"fastness.tokens","message":"refused: …","token":"…"}
    2026-11-15T06:00:00.000Z warning fastness.tokens refused: … token=…

Every line that a request causes carries its correlation id: that of an HTTP request is its X-Correlation-Id header, or
a generated one. A stream has one too; a call on it is `<stream>/<number>`, and a batch of calls is
`<stream>/<first>-<last>`.

Secrets are redacted anywhere in a line: text that has the form of a token, or that follows the word Bearer.
"""

import logging
import re
import sys
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from time import monotonic
from typing import Any, Final, TextIO

import msgspec

from fastness.limits import CORRELATION_ID_CHARACTERS_MAX

correlation_id: ContextVar[str | None] = ContextVar("fastness_correlation_id", default=None)

_SECRETS: Final = re.compile(r"(fnt_[0-9a-f]{1,32}_|[Bb]earer\s+(?!fnt_))[^\s\"',]+|(://[^/\s:@]+:)[^@\s/]+(?=@)")
_NEEDS_QUOTES: Final = re.compile(r'[\s"\\=]')
_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}
# Logged at WARNING and above only.
_QUIET: Final = ("uvicorn", "websockets", "asyncio", "botocore", "urllib3", "mcp", "sse_starlette")


@contextmanager
def correlation_scope(id: str | None) -> Iterator[None]:
    """Give log lines inside the `with` block this correlation id."""
    token = correlation_id.set(id)
    try:
        yield
    finally:
        correlation_id.reset(token)


def correlation_id_of(headers: Mapping[str, str]) -> str:
    """The caller's X-Correlation-Id if it is valid; a new id otherwise."""
    given = headers.get("x-correlation-id", "")
    if 0 < len(given) <= CORRELATION_ID_CHARACTERS_MAX and given.isascii() and given.isprintable():
        return given
    return uuid.uuid4().hex


def configure(format: str = "text", level: str = "info", stream: TextIO | None = None) -> None:
    """Write all log lines to `stream` (default: standard error), and to no other handler."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if format == "json" else TextFormatter())
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())
    for name in _QUIET:
        # At DEBUG they log frames, and with them the payloads of messages.
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))


def redact_secrets(text: str) -> str:
    """The text with secrets replaced by an ellipsis."""
    return _SECRETS.sub(lambda match: f"{match[1] or match[2]}…", text)


class LineFormatter(logging.Formatter):
    """Base of both formats."""

    def fields(self, record: logging.LogRecord) -> dict[str, Any]:
        """The fields of a line, in order."""
        fields: dict[str, Any] = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")[:-6] + "Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": redact_secrets(record.getMessage()),
        }
        if (id := correlation_id.get()) is not None:
            fields["correlation_id"] = redact_secrets(id)
        for name, value in vars(record).items():
            if name not in _STANDARD:
                fields[name] = redact_secrets(str(value)) if not isinstance(value, int | float | None) else value
        if record.exc_info:
            fields["error"] = redact_secrets(self.formatException(record.exc_info))
        return fields


class JsonFormatter(LineFormatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        return msgspec.json.encode(self.fields(record)).decode()


class TextFormatter(LineFormatter):
    """Time, level, logger and message, then the other fields.

    No value can imitate another line or field: unprintable characters are escaped, values with a space, a quote, a
    backslash or an equals sign are JSON strings, and the lines of a traceback are indented.
    """

    def format(self, record: logging.LogRecord) -> str:
        fields = self.fields(record)
        error = fields.pop("error", None)
        head = " ".join(_escape(str(fields.pop(name))) for name in ("at", "level", "logger", "message"))
        line = " ".join([head, *(f"{name}={_quote(str(value))}" for name, value in fields.items())])
        if error is not None:
            line += "".join(f"\n  {_escape(each)}" for each in error.splitlines())
        return line


def _escape(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def _quote(value: str) -> str:
    if value and value.isprintable() and not _NEEDS_QUOTES.search(value):
        return value
    return _escape(msgspec.json.encode(value).decode())


class RateLimitFilter(logging.Filter):
    """Passes a bounded number of lines per second; the next line carries the count of suppressed ones."""

    def __init__(self, per_second: int) -> None:
        super().__init__()
        self._per_second = per_second
        self._second = 0
        self._passed = 0
        self._suppressed = 0

    def filter(self, record: logging.LogRecord) -> bool:
        second = int(monotonic())
        if second != self._second:
            self._second, self._passed = second, 0
        if self._passed >= self._per_second:
            self._suppressed += 1
            return False
        self._passed += 1
        if self._suppressed:
            record.kept_back, self._suppressed = self._suppressed, 0
        return True
