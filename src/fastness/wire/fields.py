"""The types of fields: each states its bounds once, and every way into a plane refuses what is outside of them.

    delay_seconds: Annotated[DelaySeconds | None, Meta(description="How long to hold it back.")] = None

From these types follow the checks of decoders and of embedded calls (`type_checks.py`), the texts of refusals, the
OpenAPI document, the options of commands and the input schemas of MCP tools. What a decoder cannot check, or what has
an error of its own, is a `Rule`.
"""

import operator
from collections.abc import Callable
from functools import cache, reduce
from operator import or_
from types import UnionType
from typing import Annotated, Any, Final, Literal, NamedTuple, Union, get_args, get_origin

import msgspec
from msgspec import Meta

from fastness import limits
from fastness.errors import BatchTooLarge, EmptyBatch, InvalidArgument, InvalidName
from fastness.lock_rules import Mode
from fastness.names import (
    KEY_PATTERN,
    NAME_PATTERN,
    QUEUE_NAME_PATTERN,
    checked_key,
    checked_name,
    checked_queue_name,
    is_key,
    known_names,
)


class Rule(NamedTuple):
    """What a decoder cannot check of a value that has the right type."""

    fits: Callable[[Any], object] | None  # A fast answer; if it is False, `check` decides. None: the size of a list.
    check: Callable[[str, Any], object]  # Takes the field's name and the value; raises the error of a refused one.


def ruled(check: Callable[[str, Any], object], fits: Callable[[Any], object] | None, **schema: Any) -> Meta:
    """Describe a rule to `type_checks.py`, and its JSON schema to readers."""
    return Meta(extra={"rule": Rule(fits, check)}, extra_json_schema=schema)


def described(**schema: Any) -> Meta:
    """Bounds that what executes the request checks."""
    return Meta(extra_json_schema=schema)


def _or_empty(rule: Any) -> Meta:
    """The rule of a type, for a text that may be empty, too."""
    [meta] = rule.__metadata__
    check, pattern = meta.extra["rule"].check, meta.extra_json_schema["pattern"]
    return ruled(lambda field, text: text and check(field, text), operator.not_, pattern=f"^$|{pattern}")


def worded(words: str, **bounds: Any) -> Meta:
    """Bounds that a decoder checks, and the words for what is allowed."""
    return Meta(extra={"words": words}, **bounds)


def batch_of(most: int, noun: str, *, least: int = 1) -> Meta:
    """A list of `least` (0 or 1) to `most` items, with the errors of a batch."""

    def check(field: str, items: Any) -> None:
        del field
        if len(items) < least:
            raise EmptyBatch(f"The batch has no {noun}; name at least one")
        if len(items) > most:
            raise BatchTooLarge(f"One batch has at most {most} {noun}, not {len(items)}; split it")

    return ruled(check, None, minItems=least, maxItems=most)


def short_text(most: int, *, least: int = 1) -> Meta:
    """A text of `least` to `most` bytes."""

    def check(field: str, text: str) -> None:
        try:
            if len(text.encode()) <= most:
                return
        except UnicodeEncodeError:
            pass
        shown = text if len(text) <= 60 else f"{text[:59]}…"
        raise InvalidArgument(f"{field} is {shown!r}; give a text of {least} to {most} bytes; hash a longer one")

    fits: Callable[[Any], bool] = lambda text: text.isascii() and len(text) <= most  # noqa: E731
    return Meta(min_length=least, max_length=most, extra={"rule": Rule(fits, check)})


@cache
def bare(kind: Any) -> Any:
    """A type without the bounds that annotate it and its parts."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return bare(args[0])
    if origin is None or origin is Literal:
        return kind
    parts = tuple(each if each is ... else bare(each) for each in args)
    return reduce(or_, parts) if origin in (Union, UnionType) else origin[parts]


def short_name(noun: str, most: int) -> Meta:
    """A name of at most `most` characters."""

    def check(field: str, name: str) -> None:
        if len(checked_name(field, name)) > most:
            raise InvalidName(f"The {noun} has at most {most} characters; {name[:40]!r}… has {len(name)}")

    pattern = NAME_PATTERN.replace(str(limits.NAME_BYTES_MAX), str(most))
    return ruled(check, lambda name: len(name) <= most and name in known_names, pattern=pattern, maxLength=most)


def description_of(kind: Any) -> str:
    """The help of a field of this type; empty if it has none."""
    metas = get_args(kind)[1:] if get_origin(kind) is Annotated else ()
    return next((each.description for each in metas if isinstance(each, Meta) and each.description), "")


def described_fields(struct: type[msgspec.Struct]) -> list[msgspec.structs.FieldInfo]:
    """The fields of a struct that have help: those that a user gives as options."""
    return [field for field in msgspec.structs.fields(struct) if description_of(field.type)]


def default_of(field: msgspec.structs.FieldInfo) -> Any:
    """The default of a field; `NODEFAULT` if it has none."""
    return field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()


def one_of(*words: str) -> Meta:
    """One of these words."""
    pattern = f"^({'|'.join(words)})$"
    return Meta(pattern=pattern, extra={"words": " or ".join(map(repr, words))}, extra_json_schema={"enum": [*words]})


# Names.
Name = Annotated[str, ruled(checked_name, known_names.__contains__, pattern=NAME_PATTERN)]
QueueName = Annotated[
    str,
    ruled(
        checked_queue_name,
        lambda name: name in known_names and len(name) <= limits.QUEUE_NAME_CHARACTERS_MAX,
        pattern=QUEUE_NAME_PATTERN,
    ),
]
Key = Annotated[str, ruled(checked_key, is_key, pattern=KEY_PATTERN, maxLength=limits.NAME_BYTES_MAX)]
NameOrAll = Annotated[
    str,
    ruled(
        lambda field, name: name == "*" or checked_name(field, name),
        known_names.__contains__,
        pattern=f"^\\*$|{NAME_PATTERN}",
    ),
]
RunId = Annotated[str, short_name("id of a run", limits.RUN_ID_BYTES_MAX)]
NameAfter = Annotated[str, _or_empty(Name)]  # Where a page starts: after this name, or at the first one.
RunIdAfter = Annotated[str, _or_empty(RunId)]
KeyAfter = Annotated[str, _or_empty(Key)]
Hash = Annotated[
    str, worded("the hash that storing it returned: 64 hex digits in lower case", pattern="^[0-9a-f]{64}$")
]
Owner = Annotated[str, short_text(limits.OWNER_BYTES_MAX)]
IdempotencyKey = Annotated[str, short_text(limits.IDEMPOTENCY_KEY_BYTES_MAX)]
MessageKey = Annotated[str, short_text(limits.KEY_CHARACTERS_MAX)]
Tag = Annotated[str, short_text(limits.TAG_BYTES_MAX)]
CorrelationId = Annotated[
    str,
    worded(
        f"1 to {limits.CORRELATION_ID_CHARACTERS_MAX} printable ASCII characters",
        pattern=f"^[ -~]{{1,{limits.CORRELATION_ID_CHARACTERS_MAX}}}$",
    ),
]
ContentType = Annotated[str, worded("at most 255 printable ASCII characters", pattern="^[!-~][ -~]{0,254}$")]
SearchedText = Annotated[str, Meta(min_length=1, max_length=limits.SEARCH_TEXT_CHARACTERS_MAX)]
MailId = Annotated[
    str,
    worded(
        f"1 to {limits.MAIL_ID_CHARACTERS_MAX} printable ASCII characters",
        pattern=f"^[ -~]{{1,{limits.MAIL_ID_CHARACTERS_MAX}}}$",
    ),
]

# Numbers.
Count = Annotated[int, Meta(ge=0)]
RecordNumber = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]  # Part of a key.
Limit = Annotated[int, Meta(ge=1, le=limits.READ_ENTRIES_MAX)]
SummaryLimit = Annotated[int, Meta(ge=1, le=limits.SUMMARY_LIST_MAX)]
Priority = Annotated[int, Meta(ge=0, le=limits.PRIORITY_MAX)]
MaxAttempts = Annotated[int, Meta(ge=1, le=limits.MAX_ATTEMPTS_MAX)]

# Times.
TimeMs = Annotated[int, Meta(ge=0, le=limits.TIME_MS_MAX)]
DelaySeconds = Annotated[float, Meta(ge=0, le=limits.DELAY_SECONDS_MAX)]
DebounceSeconds = Annotated[float, Meta(ge=0.001, le=limits.DELAY_SECONDS_MAX)]
VisibilitySeconds = Annotated[float, Meta(ge=0.001, le=limits.VISIBILITY_SECONDS_MAX)]
RetentionSeconds = Annotated[float, Meta(ge=0.001, le=limits.TTL_SECONDS_MAX)]
WaitSeconds = Annotated[float, Meta(ge=0)]  # A server waits for `wait_seconds_max` at most.
ReceiveWaitSeconds = Annotated[float, Meta(ge=0, le=limits.RECEIVE_WAIT_SECONDS_MAX)]
LeaseTtlSeconds = Annotated[float, Meta(ge=0.001, le=limits.LEASE_TTL_SECONDS_MAX)]
LeaseWaitSeconds = Annotated[float, Meta(ge=0, le=limits.LEASE_WAIT_SECONDS_MAX)]

# Lists.
MessageBatch: Final = batch_of(limits.MESSAGES_MAX, "messages")

LockMode = Annotated[str, one_of(*(mode.value for mode in Mode))]
LockClaim = Annotated[
    str,
    worded(
        f"1 to {limits.LOCK_SESSION_ID_CHARACTERS_MAX} letters, digits, _ or -",
        pattern=f"^[A-Za-z0-9_-]{{1,{limits.LOCK_SESSION_ID_CHARACTERS_MAX}}}$",
    ),
]
LockSessionId = Annotated[
    str,
    worded(
        f"16 to {limits.LOCK_SESSION_ID_CHARACTERS_MAX} letters, digits, _ or -",
        pattern=f"^[A-Za-z0-9_-]{{16,{limits.LOCK_SESSION_ID_CHARACTERS_MAX}}}$",
    ),
]
LockPaths = Annotated[
    list[Annotated[list[str], Meta(min_length=1, max_length=2)]],
    Meta(min_length=1, max_length=limits.LOCK_CLAIM_PATHS_MAX),
]
