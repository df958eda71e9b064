"""Logs of a server: one line an event, as JSON for programs or as text for people.

    {"at":"2026-11-15T06:00:00.000Z","level":"warning","logger":"holdfast.tokens","message":"refused: …","token":"…"}
    2026-11-15T06:00:00.000Z warning holdfast.tokens refused: … token=…

A correlation id that a door has set goes along with every line that its request causes. That of an HTTP request is
what its header says, or a made-up one. A stream has one too; a call on it is `<stream>/<number>`, and calls that are
committed together are `<stream>/<first>-<last>`.

Secrets do not go along: whatever looks like a token's, or follows the word Bearer, is cut out of the line, wherever in
it it is.
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

from holdfast.limits import CORRELATION_ID_CHARACTERS_MAX

correlation_id: ContextVar[str | None] = ContextVar("holdfast_correlation_id", default=None)

_SECRETS: Final = re.compile(r"(hft_[0-9a-f]{1,32}_|[Bb]earer\s+(?!hft_))[^\s\"',]+|(://[^/\s:@]+:)[^@\s/]+(?=@)")
_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}
_QUIET: Final = ("uvicorn", "websockets", "asyncio", "botocore", "urllib3")  # These speak up when something is wrong.


@contextmanager
def correlated(id: str | None) -> Iterator[None]:
    """Whatever is logged inside is part of this."""
    token = correlation_id.set(id)
    try:
        yield
    finally:
        correlation_id.reset(token)


def correlation_id_of(asked: Mapping[str, str]) -> str:
    """What the caller calls this request, if that can travel in a header; a fresh id otherwise."""
    given = asked.get("x-correlation-id", "")
    if 0 < len(given) <= CORRELATION_ID_CHARACTERS_MAX and given.isascii() and given.isprintable():
        return given
    return uuid.uuid4().hex


def configure(format: str = "text", level: str = "info", stream: TextIO | None = None) -> None:
    """Write every log line to `stream` (standard error) from now on, and to nowhere else."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines() if format == "json" else TextLines())
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())
    for name in _QUIET:
        # At DEBUG they would log the frames, and so everybody's messages.
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))


def without_secrets(text: str) -> str:
    """The text with whatever looks like a secret cut out."""
    return _SECRETS.sub(lambda found: f"{found[1] or found[2]}…", text)


class Lines(logging.Formatter):
    """What both forms of lines have in common."""

    def parts(self, record: logging.LogRecord) -> dict[str, Any]:
        """What a line says, in order."""
        said: dict[str, Any] = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")[:-6] + "Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": without_secrets(record.getMessage()),
        }
        if (id := correlation_id.get()) is not None:
            said["correlation_id"] = without_secrets(id)
        for name, value in vars(record).items():
            if name not in _STANDARD:
                said[name] = without_secrets(str(value)) if not isinstance(value, int | float | None) else value
        if record.exc_info:
            said["error"] = without_secrets(self.formatException(record.exc_info))
        return said


class JsonLines(Lines):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        return msgspec.json.encode(self.parts(record)).decode()


class TextLines(Lines):
    """Time, level, logger and message, then what else is known. What comes from outside cannot begin a line."""

    def format(self, record: logging.LogRecord) -> str:
        parts = self.parts(record)
        error = parts.pop("error", None)
        head = " ".join(str(parts.pop(name)) for name in ("at", "level", "logger", "message"))
        line = " ".join([head, *(f"{name}={value}" for name, value in parts.items())])
        line = line.replace("\r", "\\r").replace("\n", "\\n")
        return line if error is None else f"{line}\n{error}"


class Sparing(logging.Filter):
    """Lets a bounded number of lines through each second, and says with the next one how many it kept back."""

    def __init__(self, per_second: int) -> None:
        super().__init__()
        self._per_second = per_second
        self._second = 0
        self._passed = 0
        self._kept_back = 0

    def filter(self, record: logging.LogRecord) -> bool:
        second = int(monotonic())
        if second != self._second:
            self._second, self._passed = second, 0
        if self._passed >= self._per_second:
            self._kept_back += 1
            return False
        self._passed += 1
        if self._kept_back:
            record.kept_back, self._kept_back = self._kept_back, 0
        return True
