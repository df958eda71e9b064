"""What is stored about a task besides its job: how far it is, what it asks, and what was answered.

    collection "mcp-tasks"    partition <task id>
        ("progress",)        ->  Progress, written by the worker
        ("question", key)    ->  Question, written by the worker, once
        ("answer", key)      ->  Answer, written by the MCP server; the first one stays
        ("cancelled",)       ->  b"", written by the MCP server for a run: it is asked to end

    task id    <queue>.<message id>, or run:<run id>

Each row has one writer, so no row has to be read before it is written. Rows expire, and nothing else removes them.
"""

import re
import time
from collections.abc import Iterable
from functools import partial
from typing import Any, Final, Literal, NamedTuple

import msgspec

from fastness import PutRow, Row
from fastness.errors import InvalidArgument
from fastness.limits import (
    MCP_QUESTION_CHARACTERS_MAX,
    MCP_QUESTIONS_MAX,
    MCP_SCHEMA_BYTES_MAX,
    MCP_STATUS_CHARACTERS_MAX,
    MCP_TASK_ROWS_SECONDS,
)
from fastness.plane_access import decoded

COLLECTION: Final = "mcp-tasks"
PROGRESS: Final = ("progress",)
CANCELLED: Final = ("cancelled",)
SIGNAL: Final = "input:"  # The answer of a run's question is the signal of this and the key.
ROWS_MAX: Final = 2 * MCP_QUESTIONS_MAX + 2
_KEY: Final = re.compile(r"[A-Za-z0-9._-]{1,64}\Z")
_PRIMITIVES: Final = ("string", "number", "integer", "boolean")


class Progress(msgspec.Struct, frozen=True, omit_defaults=True):
    """How far a task is."""

    progress: float
    total: float | None = None
    message: str | None = None
    at_ms: int = 0


class Question(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a task asks the person behind the client: a form with the properties of the schema."""

    message: str
    schema: dict[str, Any]
    at_ms: int = 0


class Answer(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a person answered: `accept` with the content of the form, `decline`, or `cancel`."""

    action: Literal["accept", "decline", "cancel"]
    content: dict[str, Any] = {}
    at_ms: int = 0

    @property
    def is_accepted(self) -> bool:
        """Whether the form was filled in; then `content` has its values."""
        return self.action == "accept"


_decode_progress: Final = partial(decoded, "The progress of a task", msgspec.json.Decoder(Progress).decode)
_decode_question: Final = partial(decoded, "A question of a task", msgspec.json.Decoder(Question).decode)
_decode_answer: Final = partial(decoded, "An answer to a task", msgspec.json.Decoder(Answer).decode)


class TaskRows(NamedTuple):
    """The rows of a task."""

    progress: Progress | None
    questions: dict[str, Question]
    answers: dict[str, Answer]
    is_cancelled: bool

    @property
    def open_questions(self) -> dict[str, Question]:
        """Those without an answer."""
        return {key: question for key, question in self.questions.items() if key not in self.answers}


def read_rows(rows: Iterable[Row]) -> TaskRows:
    """The rows of a partition."""
    progress: Progress | None = None
    questions: dict[str, Question] = {}
    answers: dict[str, Answer] = {}
    is_cancelled = False
    for row in rows:
        if row.key == PROGRESS:
            progress = _decode_progress(row.value)
        elif row.key == CANCELLED:
            is_cancelled = True
        elif row.key[0] == "question":
            questions[str(row.key[1])] = _decode_question(row.value)
        elif row.key[0] == "answer":
            answers[str(row.key[1])] = _decode_answer(row.value)
    return TaskRows(progress, questions, answers, is_cancelled)


def progress_row(task_id: str, progress: float, total: float | None, message: str | None) -> PutRow:
    """The row of a report."""
    text = None if message is None else message[:MCP_STATUS_CHARACTERS_MAX]
    return _row(task_id, PROGRESS, Progress(float(progress), None if total is None else float(total), text, now_ms()))


def question_row(task_id: str, key: str, question: Question) -> PutRow:
    """The row of a question. The question that was asked first under the key stays."""
    return _row(task_id, ("question", key), question, keep_existing=True)


def answer_row(task_id: str, key: str, answer: Answer) -> PutRow:
    """The row of an answer. The first one stays."""
    return _row(task_id, ("answer", key), answer, keep_existing=True)


def cancelled_row(task_id: str) -> PutRow:
    """The row of a run that is asked to end."""
    return PutRow(task_id, CANCELLED, b"", ttl_seconds=MCP_TASK_ROWS_SECONDS)


def checked_question(key: str, message: str, schema: dict[str, Any] | None) -> Question:
    """A question that every client can show.

    Raises:
        InvalidArgument: the key or the schema cannot be used. A form has one level of text, numbers, booleans and
            choices.
    """
    if not _KEY.match(key):
        raise InvalidArgument(f"{key!r} cannot be the key of a question; use 1 to 64 letters, digits, '.', '_', '-'")
    if not message or len(message) > MCP_QUESTION_CHARACTERS_MAX:
        raise InvalidArgument(f"A question has 1 to {MCP_QUESTION_CHARACTERS_MAX} characters, not {len(message)}")
    form: dict[str, Any] = {"type": "object", "properties": {}} if schema is None else schema
    properties = form.get("properties")
    if form.get("type") != "object" or not isinstance(properties, dict):
        raise InvalidArgument('The schema of a question has "type": "object" and properties')
    for name, each in properties.items():
        if not isinstance(each, dict) or (each.get("type") not in _PRIMITIVES and not _is_choice(each)):
            raise InvalidArgument(
                f"Property {name!r} of a question must be a string, number, integer, boolean or list of choices: "
                "clients show a form of one level"
            )
    if len(msgspec.json.encode(form)) > MCP_SCHEMA_BYTES_MAX:
        raise InvalidArgument(f"The schema of a question has more than {MCP_SCHEMA_BYTES_MAX} bytes")
    return Question(message, form, now_ms())


def now_ms() -> int:
    """The time of this process. It is only shown."""
    return time.time_ns() // 1_000_000


def _is_choice(schema: dict[str, Any]) -> bool:
    return schema.get("type") == "array" and isinstance(schema.get("items"), dict)


def _row(task_id: str, key: tuple[str, ...], value: msgspec.Struct, *, keep_existing: bool = False) -> PutRow:
    encoded = msgspec.json.encode(value)
    return PutRow(task_id, key, encoded, keep_existing=keep_existing, ttl_seconds=MCP_TASK_ROWS_SECONDS)
