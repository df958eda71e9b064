"""Every field of every request refuses values just outside of its declared bounds, and accepts those at its bounds.

The types of fields state their bounds (`fastness.wire.fields`), and what executes a request enforces them. Here the two
are compared: each case is a request that could be executed, in which one field has another value.
"""

import asyncio
import math
import re
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Literal, NamedTuple, get_args, get_origin

import msgspec
import pytest

import fastness
from fastness.backends.memory import MemoryDatabase
from fastness.errors import Conflict, FastnessError, Fenced, InvalidArgument, Unsupported, Validation
from fastness.kv import Transaction
from fastness.plane.embedded import AsyncEmbeddedTransport
from fastness.plane.executor import execute
from fastness.plane.operations import OPERATIONS
from fastness.plane.services import Services
from fastness.testing.clock import ManualClock
from fastness.wire.atomic import STEPS, CommitAtomic
from fastness.wire.blobs import WriteBlob
from fastness.wire.catalog import REQUESTS
from fastness.wire.collections import CommitRows, DeleteRow, DeleteRows, PutRow
from fastness.wire.entities import EntityWrite, SeenEntity, WriteEntities
from fastness.wire.fields import bare
from fastness.wire.hosting import CommitTurn
from fastness.wire.inboxes import DomainEvent, Effect, EffectReceipt, InboundMessage, Timer, TimerFired
from fastness.wire.locks import CheckLock, LockProof
from fastness.wire.queues import AckMessages, NewResult
from fastness.wire.requests import Request
from fastness.wire.runs import UpdateRun
from fastness.wire.type_checks import bounds_of, check_types
from fastness.wire.worlds import CommitSnapshot, PromoteSnapshot, PutItem
from tests.support.failures import Failures
from tests.support.http_server import serving
from tests.support.populated_plane import PopulatedPlane, request_of
from tests.support.request_values import filled, is_decodable, options_of, right, structs_in, unannotated

TEXTS = (
    "",
    "a b",
    "ü",
    ".",
    "..",
    "a/b",
    "a\n",
    "\0",
    "\x7f",
    "g" * 64,
    "0" * 63,
    "0" * 65,
    "unknown",
    *("x" * n for n in (129, 256)),
)


class Case(NamedTuple):
    """A request in which one field has a value at its bounds, or outside of them."""

    request: Request[Any]
    struct: str
    field: str
    value: Any
    is_inside: bool
    kind: Any = None  # The type of the field.

    @property
    def place(self) -> tuple[str, str]:
        return self.struct, self.field

    def __str__(self) -> str:
        return f"{type(self.request).__name__}: {self.struct}.{self.field} = {self.value!r:.70}"


def cases_of(request: Request[Any]) -> Iterator[Case]:
    for struct, field, put in places(request):
        for value, is_inside in edges(field.type, bounds_of(field.type)):
            yield Case(put(value), struct.__name__, field.name, value, is_inside, field.type)


def places(value: Any) -> Iterator[tuple[type[msgspec.Struct], msgspec.structs.FieldInfo, Callable[[Any], Any]]]:
    """Each field of a struct, and of those in it, and a function that returns the struct with another value there."""
    if isinstance(value, msgspec.Struct):
        for field in msgspec.structs.fields(value):
            replace = partial(replaced, value, field.name)
            if field.name != "tier":
                yield type(value), field, replace
            for struct, inner, put in places(getattr(value, field.name)):
                yield struct, inner, composed(replace, put)
    elif isinstance(value, list | tuple):
        first = {type(item): number for number, item in reversed([*enumerate(value)])}  # Of each class.
        for number in first.values():
            for struct, inner, put in places(value[number]):
                replace = partial(with_item, value, number)
                yield struct, inner, composed(replace, put)


def composed(outer: Callable[[Any], Any], inner: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: outer(inner(value))


def replaced(struct: msgspec.Struct, field: str, value: Any) -> Any:
    return msgspec.structs.replace(struct, **{field: value})


def with_item(items: Any, number: int, value: Any) -> Any:
    return type(items)([*items[:number], value, *items[number + 1 :]])


def edges(kind: Any, bounds: Mapping[str, Any]) -> Iterator[tuple[Any, bool]]:
    """Values of a type that are at its bounds (True) or just outside of them (False)."""
    for option in map(unannotated, options_of(unannotated(kind))):
        origin = get_origin(option)
        if origin is Literal:
            yield "unknown", False
        elif option in (int, float):
            step = 1 if option is int else 0.001
            for keyword, sign in (("minimum", -1), ("maximum", 1)):
                if keyword in bounds:
                    yield option(bounds[keyword]), True
                    yield option(bounds[keyword] + sign * step), False
            if option is float and bounds:
                yield from ((value, False) for value in (math.nan, math.inf))
        elif option is str:
            yield from text_edges(bounds)
        elif origin in (list, tuple) and (options_of(option)[0] is option):
            yield from list_edges(option, bounds)
        elif origin is dict and "propertyNames" in bounds:
            yield {"a b": right(get_args(option)[1])}, False


def text_edges(bounds: Mapping[str, Any]) -> Iterator[tuple[str, bool]]:
    if not bounds:
        return
    lengths = (bounds[each] for each in ("minLength", "maxLength") if each in bounds)
    named = [*bounds.get("enum", ()), *("x" * (length + more) for length in lengths for more in (0, 1))]
    pattern = bounds.get("pattern", "").replace("$", r"\Z")
    for number in set(map(int, re.findall(r"(?<=[{,])\d+(?=})", pattern))):
        named += ["0" * number, "0" * (number + 1), "x" * number, "x" * (number + 1)]
    for text in dict.fromkeys((*named, *TEXTS)):
        is_inside = (
            re.search(pattern, text) is not None
            and text in bounds.get("enum", (text,))
            and bounds.get("minLength", 0) <= len(text) <= bounds.get("maxLength", len(text))
        )
        if not is_inside or text in named:
            yield text, is_inside


def list_edges(kind: Any, bounds: Mapping[str, Any]) -> Iterator[tuple[Any, bool]]:
    origin, item = get_origin(kind), get_args(kind)[0]
    make: Callable[[int], Any] = lambda number: (  # noqa: E731
        f"n{number}"
        if bare(item) is str and not bounds_of(item)
        else ["record_id", f"task/{number}"]
        if bare(item) == list[str]
        else right(item)
    )
    if bounds.get("minItems"):
        yield origin(), False
    if "maxItems" in bounds:
        for count in (bounds["maxItems"], bounds["maxItems"] + 1):
            yield origin(map(make, range(count))), count == bounds["maxItems"]


# Requests that could be executed.

# Fields that name what was granted or counted before: another value is a conflict, or changes nothing.
MATCHED = {
    *((kind, "owner") for kind in ("CommitTurn", "FailTurn", "ReleaseWorlds", "RenewWorlds", "SendToWorld")),
    *((kind, "owner") for kind in ("CommitSnapshot", "PromoteSnapshot")),
    *((kind, "expected_head") for kind in ("AppendEntries", "CommitTurn")),
    *((kind, "session") for kind in ("LeaveMailbox", "ReadMail")),
    ("LeaseProof", "txn_id"),
    *((kind, "session") for kind in ("PutEntity", "WriteEntities")),  # Checked if a field is logged under it.
}
# Fields whose highest value is refused for a reason that a bound cannot describe.
NARROWER = {
    "session": "a session's name and kind are limited together",
    "kind": "as for a session",
    "take": "an item is taken once",
}
PATH = ("record_id", "task/1")
SAMPLES: dict[type[Request[Any]], Callable[[PopulatedPlane], Request[Any]]] = {
    CheckLock: lambda populated: CheckLock(LockProof(populated.locks, *PATH, 1)),
    CommitRows: lambda _: CommitRows("notes", [PutRow("p", ("a",), b"1"), DeleteRow("p", ("b",)), DeleteRows("q")]),
    CommitSnapshot: lambda populated: CommitSnapshot("hosted", b"\x01", 1, owner="h1", fence=populated.claim.fence),
    PromoteSnapshot: lambda populated: PromoteSnapshot("hosted", 1, owner="h1", fence=populated.claim.fence),
    CommitTurn: lambda populated: CommitTurn(
        "hosted", "h1", populated.claim.fence, 1, 1, effects=[(0, Effect("mail", b"1"))]
    ),
    WriteEntities: lambda _: WriteEntities(
        [EntityWrite("task", "one", {"note": b"\x02"})], [SeenEntity("task", "one", 1)]
    ),
    UpdateRun: lambda populated: UpdateRun("r-1", populated.run_fence, state="completed"),
}


# Requests with structs that the samples lack.
MORE: dict[type[Request[Any]], Callable[[PopulatedPlane], list[Request[Any]]]] = {
    AckMessages: lambda populated: [AckMessages("jobs", populated.leases[:1], results=[NewResult(b"1")])],
    PutItem: lambda _: [
        PutItem("w", DomainEvent(schema="a@1", timers=(Timer(1, b"1"),))),
        PutItem("w", EffectReceipt(intent_hash=b"1", effect_kind="mail", adapter_id="a", signature=b"1")),
        PutItem("w", InboundMessage(inbox_name="a")),
        PutItem("w", TimerFired(timer_id="a")),
    ],
}


def samples(populated: PopulatedPlane) -> Iterator[Request[Any]]:
    """Requests of every class that could be executed, with every struct."""
    for kind in REQUESTS:
        yield sample(populated, kind)
        yield from MORE[kind](populated) if kind in MORE else ()


def sample(populated: PopulatedPlane, kind: type[Request[Any]]) -> Request[Any]:
    """A request that could be executed."""
    make = SAMPLES.get(kind)
    request = request_of(populated, kind) if make is None else make(populated)
    if request is None:
        request = filled(kind)
        names = {"world": "w", "queue": "jobs"}
        known = {name: value for name, value in names.items() if getattr(request, name, None) is not None}
        request = msgspec.structs.replace(request, **known)
    return request


@pytest.fixture
def populated(monkeypatch: pytest.MonkeyPatch) -> Iterator[PopulatedPlane]:
    monkeypatch.setattr(Services, "_note_sqs_work", lambda *_: None)
    clock = ManualClock()
    plane = PopulatedPlane(MemoryDatabase(clock=clock), clock)
    yield plane
    plane.transport.close()


def all_cases(populated: PopulatedPlane) -> Iterator[Case]:
    for request in samples(populated):
        yield from cases_of(request)


def refusal(transport: Any, request: Request[Any]) -> FastnessError | None:
    """The error of a request, or of an item of it whose outcome is an error."""
    try:
        if isinstance(request, WriteBlob):
            return refused_outcome(transport.send(request, [b"a"]))
        return refused_outcome(transport.call(request))
    except FastnessError as error:
        return error


def refused_outcome(answer: Any) -> FastnessError | None:
    for name in ("outcomes", "mails", "answers"):
        for each in getattr(answer, name, ()):
            if getattr(each, "code", None) == InvalidArgument.code:
                return InvalidArgument(each.detail)
            if (inner := refused_outcome(each)) is not None:
                return inner
    return None


def check_refusal(case: Case, error: FastnessError | None) -> None:
    if case.place in MATCHED:
        assert error is None or isinstance(error, Validation | Conflict | Fenced), repr(error)
        return
    assert error is not None, "it is accepted"
    if isinstance(error, Unsupported):
        assert "encrypt one" in str(error)  # It is the first that is checked.
        return
    assert isinstance(error, Validation), repr(error)
    assert is_explained(case, str(error)), str(error)


def is_explained(case: Case, text: str) -> bool:
    """Whether an error names the field, or shows the value, the number of its items, or the bound."""
    value = case.value
    highest = bounds_of(case.kind).get("maximum", math.inf)
    if case.field.endswith("_blob") and "blob" in text:
        return True
    shown = [case.field, repr(value)[:40], *map(repr, value if isinstance(value, dict) else ())]
    if isinstance(value, int | float):
        shown += [f"{value:,}", f"to {highest} ", f"to {highest:,} "]
    if isinstance(value, list | tuple | str):
        shown += [f"{len(value)}", f"{len(value):,}", "is empty", "at most", "at least one"]
    return any(each in text for each in shown)


def test_values_outside_of_the_bounds_are_refused_and_nothing_is_written(populated: PopulatedPlane) -> None:
    failures = Failures()
    for request in samples(populated):
        kind, cases = type(request), [each for each in cases_of(request) if not each.is_inside]
        before = populated.everything()
        for case in cases:
            with failures.of(case):
                check_refusal(case, refusal(populated.transport, case.request))
                if kind in STEPS:
                    check_refusal(case, refusal(populated.transport, CommitAtomic([case.request])))
        with failures.of(kind.__name__):
            # A snapshot is stored as a blob before the transaction that refuses it.
            may_write = kind is CommitSnapshot or any(each.place in MATCHED for each in cases)
            assert may_write or populated.everything() == before
    failures.check()


class RollbackError(Exception):
    """Ends a transaction that is not to be committed."""


def refusal_undone(populated: PopulatedPlane, case: Case) -> FastnessError | None:
    """The error of a request that is executed, and then undone if it can be."""

    def work(tx: Transaction) -> None:
        if (error := refused_outcome(execute(tx, case.request))) is not None:
            raise error
        raise RollbackError

    if OPERATIONS[type(case.request)].run is None:
        would_wait = case.field == "wait_seconds" and case.is_inside
        return None if would_wait else refusal(populated.transport, case.request)
    with suppress(RollbackError):
        try:
            populated.transport.services.database.transact(work)
        except FastnessError as error:
            return error
    return None


def test_values_at_the_bounds_are_accepted(populated: PopulatedPlane) -> None:
    """They may be refused for another reason, for example because nothing has the name."""
    failures = Failures()
    for request in samples(populated):
        cases = list(cases_of(request))
        of_bounds = {(each.place, kind_of(refusal_undone(populated, each))) for each in cases if not each.is_inside}
        for case in cases:
            if case.is_inside:
                with failures.of(case):
                    check_types(case.request)
                    error = refusal_undone(populated, case)
                    says_value = f"{case.field} is {case.value}" in str(error) or f"{case.value!r:.30}" in str(error)
                    is_of_bound = isinstance(error, Validation) and (
                        says_value or (case.place, kind_of(error)) in of_bounds
                    )
                    assert case.field in NARROWER or not is_of_bound, repr(error)
    failures.check()


def kind_of(error: FastnessError | None) -> str:
    """The text of an error without the values in it."""
    return "" if error is None else re.sub(r"'.*?'|[\d.,]+", "#", str(error))


WRONG: tuple[Any, ...] = (True, 5, 5.0, "5", b"5", None, [], {}, object())  # Each is wrong for some types.


def others_of(kind: Any) -> Iterator[Any]:
    """Values of all types, and those as the items of a list or dictionary."""
    yield from WRONG
    for option in options_of(kind):
        origin, items = get_origin(option), get_args(option)
        if origin is list:
            yield from ([each] for each in WRONG)
        elif origin is dict:
            yield from ({right(items[0]): each} for each in WRONG)
            yield from ({each: right(items[1])} for each in WRONG if isinstance(each, Hashable))


def test_values_that_a_server_could_not_decode_are_refused_by_an_embedded_plane(populated: PopulatedPlane) -> None:
    """In the fields of every request, and of the structs in it."""
    failures = Failures()
    for request in samples(populated):
        before = populated.everything()
        for struct, field, put in places(request):
            for value in others_of(bare(field.type)):
                case = Case(put(value), struct.__name__, field.name, value, False)
                if not is_decodable(case.request):
                    with failures.of(case):
                        error = refusal(populated.transport, case.request)
                        assert type(error) is InvalidArgument, repr(error)
                        assert str(error).startswith(field.name), str(error)
        with failures.of(type(request).__name__):
            assert populated.everything() == before
    failures.check()


# Other ways in.


def errors_of(populated: PopulatedPlane) -> list[tuple[Case, FastnessError]]:
    """Each refused request with its error."""
    cases = [each for each in all_cases(populated) if not each.is_inside and not isinstance(each.request, WriteBlob)]
    errors = [(case, refusal(populated.transport, case.request)) for case in cases if case.place not in MATCHED]
    return [(case, error) for case, error in errors if error is not None]


async def test_requests_on_an_event_loop_are_refused_with_the_same_errors(populated: PopulatedPlane) -> None:
    failures = Failures()
    transport = AsyncEmbeddedTransport(populated.transport.services)
    for case, error in errors_of(populated):
        with failures.of(case):
            found = await async_refusal(transport, case.request)
            assert (type(found), str(found)) == (type(error), str(error))
    failures.check()


async def async_refusal(transport: Any, request: Request[Any]) -> FastnessError | None:
    try:
        return refused_outcome(await transport.call(request))
    except FastnessError as error:
        return error


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    with serving() as running:
        yield running


async def test_remote_requests_are_refused_with_the_same_errors(server: Any) -> None:
    """Compared with an embedded plane that is empty, as the server is. Nothing is written there.

    The hash of a blob is in the path of a GET, so without a hash, or with a slash in it, there is no such path.
    """
    with fastness.open("memory:") as embedded:
        local: Any = embedded._transport
        cases = [
            case
            for kind in REQUESTS
            if kind.operation.network
            for case in cases_of(filled(kind))
            if not case.is_inside
            and case.place not in MATCHED
            and (case.place != ("GetBlob", "hash") or case.value not in ("", "a/b"))
        ]
        errors = [refusal(local, case.request) for case in cases]
    failures = Failures()
    async with fastness.connect_async(server.url) as plane:
        transport: Any = plane._transport
        found = await asyncio.gather(*(async_refusal(transport, case.request) for case in cases))
        for case, error, remote in zip(cases, errors, found, strict=True):
            if isinstance(error, Validation):
                with failures.of(case):
                    assert (type(remote), str(remote)) == (type(error), str(error))
        assert (await plane.survey_queues()).queues == []
        assert (await plane.worlds()) == []
    failures.check()


# The declarations.

STRUCTS = {struct for kind in REQUESTS for struct in structs_in(kind)}

# The main bounds that users know, apart from the declarations.
KNOWN: dict[tuple[str, str], tuple[float, float]] = {
    ("NewMessage", "priority"): (0, 9),
    ("NewMessage", "max_attempts"): (1, 1_000),
    ("NewMessage", "delay_seconds"): (0, 31_536_000),
    ("NewMessage", "ttl_seconds"): (0.001, 315_360_000),
    ("NewMessage", "visibility_seconds"): (0.001, 43_200),
    ("NewMessage", "retry_delay_seconds"): (0, 31_536_000),
    ("QueuePolicy", "visibility_seconds"): (0.001, 43_200),
    ("QueuePolicy", "max_attempts"): (1, 1_000),
    ("QueuePolicy", "failures_kept"): (0, 100),
    ("QueuePolicy", "retry_factor"): (1, 1_000),
    ("QueuePolicy", "retry_jitter"): (0, 1),
    ("QueuePolicy", "rate_per_second"): (0.001, 1_000_000),
    ("QueuePolicy", "retention_seconds"): (0.001, 315_360_000),
    ("QueuePolicy", "dead_letter_retention_seconds"): (0.001, 315_360_000),
    ("ReceiveMessages", "max_messages"): (1, 256),
    ("ReceiveMessages", "wait_seconds"): (0, 3_600),
    ("ExtendMessages", "seconds"): (0.001, 43_200),
    ("PeekMessages", "limit"): (1, 10_000),
    ("ReadMail", "limit"): (1, 256),
    ("AcquireLease", "ttl_seconds"): (0.001, 86_400),
    ("AcquireLease", "wait_seconds"): (0, 3_600),
    ("AcquireLocks", "lease_seconds"): (1, 3_600),
    ("ClaimWorlds", "lease_seconds"): (0.001, 3_600),
    ("ClaimEffects", "limit"): (1, 128),
    ("PutMessages", "messages"): (1, 256),
    ("NackMessages", "leases"): (1, 256),
    ("AppendEntries", "entries"): (1, 256),
    ("CommitAtomic", "operations"): (1, 256),
    ("CommitRows", "changes"): (1, 256),
    ("NewMessage", "key"): (1, 256),
    ("NewMessage", "idempotency_key"): (1, 256),
    ("NewMessage", "unique_key"): (1, 256),
    ("ReceiveMessages", "owner"): (1, 256),
    ("PutRow", "partition"): (1, 1_024),
}


def test_the_declared_bounds_are_those_that_users_know() -> None:
    failures = Failures()
    kinds = {
        (struct.__name__, field.name): field.type for struct in STRUCTS for field in msgspec.structs.fields(struct)
    }
    for place, known in KNOWN.items():
        with failures.of(place):
            bounds = bounds_of(kinds[place])
            pairs = (("minimum", "maximum"), ("minItems", "maxItems"), ("minLength", "maxLength"))
            [found] = [(bounds.get(least), bounds.get(most)) for least, most in pairs if most in bounds]
            assert found == known
    for place in (("PutMessages", "universe"), ("AppendEntries", "world"), ("NewMessage", "group")):
        with failures.of(place):
            assert re.search(bounds_of(kinds[place])["pattern"], "x" * 255)
            assert not re.search(bounds_of(kinds[place])["pattern"], "x" * 256)
            assert not re.search(bounds_of(kinds[place])["pattern"], "a b")
    failures.check()


# Numbers that are refused out of a range that is not declared, or that depends on another field.
UNDECLARED = {
    ("NewMessage", "debounce_max_seconds"),
    ("NewMessage", "debounce_seconds"),
    ("NewMessage", "unique_until"),
    ("VisibilityChange", "seconds"),
}
# Nothing but the OpenAPI document and its own checks see these. A push or a mail is refused by its own outcome.
ELSEWHERE = {"DomainEvent", "PushItem", "Row"}


def test_every_number_has_a_bound_and_every_bound_is_tried(populated: PopulatedPlane) -> None:
    tried = {(struct.__name__, field.name) for request in samples(populated) for struct, field, _ in places(request)}
    bounded = {
        (struct.__name__, field.name)
        for struct in STRUCTS
        for field in msgspec.structs.fields(struct)
        if bounds_of(field.type) and struct.__name__ not in ELSEWHERE
    }
    assert bounded <= tried
    unbounded = [
        (struct.__name__, field.name, put)
        for request in samples(populated)
        for struct, field, put in places(request)
        if {int, float} & {*options_of(bare(field.type))} and not bounds_of(field.type)
    ]
    failures = Failures()
    for struct, name, put in unbounded:
        with failures.of(f"{struct}.{name}"):
            errors = [
                refusal_undone(populated, Case(put(value), struct, name, value, False)) for value in (-1, 1 << 62)
            ]
            is_refused = any(f"{name} is -1; give " in str(error) for error in errors)
            is_named = name.endswith(("seconds", "limit", "max_messages"))
            assert (is_refused or is_named) == ((struct, name) in UNDECLARED), errors
    failures.check()
