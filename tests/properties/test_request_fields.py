"""Every field of every request, and of the structs in it, is used when the request is executed: none is dropped.

While requests are executed on a plane in memory, the fields of their classes are replaced by descriptors that record
who reads them. Reads of checks do not count: a field that is checked, and then forgotten, is ignored as well. The
fields of a struct that is stored as it is are read by other requests, and it comes back as it was given.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import msgspec
import pytest

from fastness.backends.memory import MemoryDatabase
from fastness.errors import FastnessError, InvalidArgument
from fastness.plane.services import Services
from fastness.testing.clock import ManualClock
from fastness.wire.atomic import CommitAtomic
from fastness.wire.blobs import OpenBlob
from fastness.wire.catalog import REQUESTS
from fastness.wire.hosting import CommitTurn
from fastness.wire.inboxes import (
    Control,
    DomainEvent,
    Effect,
    EffectReceipt,
    InboundMessage,
    InboxItem,
    Timer,
    TimerFired,
)
from fastness.wire.leases import CheckLease, LeaseProof
from fastness.wire.locks import CheckLock, LockProof
from fastness.wire.mail import GetMailPolicy, MailPolicy, SetMailPolicy
from fastness.wire.queues import (
    AckMessages,
    ChangeVisibility,
    CheckMessages,
    GetQueuePolicy,
    GetResult,
    ListSchedules,
    MessageLease,
    NackMessages,
    NewMessage,
    NewResult,
    PackedAck,
    PutMessages,
    QueuePolicy,
    ReadQueueHistory,
    ReceiveMessages,
    RejectMessages,
    SetQueuePolicy,
    SetSchedule,
    VisibilityChange,
)
from fastness.wire.quotas import GetQuota, Quota, SetQuota
from fastness.wire.requests import Request
from fastness.wire.states import RemoveState, UpdateState
from fastness.wire.worlds import CheckRestore, CheckWorld, CommitSnapshot, PromoteSnapshot, PutItem, ReadInbox
from tests.properties.test_request_bounds import cases_of, places, refusal, sample
from tests.support.failures import Failures
from tests.support.populated_plane import GENESIS, WRITES, PopulatedPlane
from tests.support.request_values import options_of, right

# What these say is only compared with what is stored, so a check is what uses it.
COMPARED = {CheckLease, CheckLock, CheckMessages, CheckRestore, CheckWorld, LeaseProof, LockProof, MessageLease, Quota}
# Structs that a request stores as they are.
STORED: dict[type[msgspec.Struct], set[type[msgspec.Struct]]] = {
    AckMessages: {NewResult},
    PutItem: {Effect, Timer},
    SetMailPolicy: {MailPolicy},
    SetQueuePolicy: {QueuePolicy},
    SetQuota: {Quota},
    SetSchedule: {NewMessage},
}


def more_of(populated: PopulatedPlane) -> dict[type[Request[Any]], list[Request[Any]]]:
    """Requests with structs that the samples lack, and with fields that have a meaning together only."""
    call = populated.transport.call
    call(SetQueuePolicy("results", QueuePolicy(history="durable")))
    call(PutMessages("results", [NewMessage()] * 5))
    received = call(ReceiveMessages("results", "ada", 5)).messages
    leases = [MessageLease(each.id, each.lease_id, each.fence) for each in received]
    packed = [PackedAck(b"\x01" * 16, 1, [], b"\x01")]
    items: list[InboxItem] = [
        DomainEvent(schema="a@1", payload=b"1", effects=(Effect("mail", b"1"),), timers=(Timer(1, b"1"),)),
        EffectReceipt(intent_hash=b"1", effect_kind="mail", adapter_id="a", signature=b"1"),
        InboundMessage(inbox_name="a"),
        TimerFired(timer_id="a"),
    ]
    puts = [
        PutMessages("jobs", [NewMessage(blob=GENESIS, blob_size=1)]),
        PutMessages("jobs", [NewMessage(debounce_key="k", debounce_seconds=1.0, debounce_max_seconds=2.0)]),
        PutMessages("jobs", [NewMessage(unique_key="k", unique_until="leased")]),
    ]
    return {
        PutMessages: [*puts],
        CommitAtomic: [CommitAtomic([put]) for put in puts],
        ReceiveMessages: [ReceiveMessages("jobs", "ada", acks=packed)],
        AckMessages: [
            AckMessages("results", leases[:1], results=[NewResult(b"1")]),
            AckMessages("results", leases[1:2], results=[NewResult(blob=GENESIS, blob_size=1)]),
            AckMessages("results", [], packed=packed),
        ],
        NackMessages: [NackMessages("results", leases[2:3])],
        RejectMessages: [RejectMessages("results", leases[3:4])],
        ChangeVisibility: [ChangeVisibility("results", [VisibilityChange(leases[4], 1.0)])],
        ReadQueueHistory: [ReadQueueHistory("results")],
        CommitTurn: [
            CommitTurn("hosted", "h1", populated.claim.fence, 1, 1, effects=[(0, EFFECT)], timers=[(0, Timer(1, b"1"))])
        ],
        GetResult: [GetResult("results", received[1].id)],
        UpdateState: [UpdateState("s", b"\x01", lease=populated.lease)],
        RemoveState: [RemoveState("s", lease=populated.lease)],
        PutItem: [PutItem("w", item) for item in items],
    }


class Reads:
    """Which fields were read, and by which request: its class, the class of the struct, and the field."""

    def __init__(self) -> None:
        self.request: type[msgspec.Struct] = Request
        self.found: set[tuple[type[msgspec.Struct], type[msgspec.Struct], str]] = set()

    def note(self, struct: type[msgspec.Struct], field: str) -> None:
        reader = sys._getframe(2).f_code
        name = reader.co_name.lstrip("_")
        is_check = name == "check" or name.startswith("check_") or reader.co_filename == "<string>"  # Of check_types.
        if struct in COMPARED or not is_check:
            self.found.add((self.request, struct, field))


class Recorded:
    """A field of a class, whose reads are noted. The encoders of msgspec read fields without it."""

    def __init__(self, member: Any, reads: Reads) -> None:
        self._member = member
        self._reads = reads

    def __get__(self, instance: Any, owner: Any) -> Any:
        if instance is None:
            return self._member
        self._reads.note(type(instance), self._member.__name__)
        return self._member.__get__(instance, owner)

    def __set__(self, instance: Any, value: Any) -> None:
        self._member.__set__(instance, value)


@contextmanager
def recording(structs: set[type[msgspec.Struct]]) -> Iterator[Reads]:
    """Note the reads of the fields of these classes, also of those that they inherit."""
    reads = Reads()
    with pytest.MonkeyPatch.context() as patch:
        for owner in {owner for struct in structs for owner in struct.__mro__ if issubclass(owner, msgspec.Struct)}:
            for name in owner.__struct_fields__:
                if name in vars(owner):
                    patch.setattr(owner, name, Recorded(vars(owner)[name], reads))
        yield reads


@pytest.fixture
def populated(monkeypatch: pytest.MonkeyPatch) -> Iterator[PopulatedPlane]:
    monkeypatch.setattr(Services, "_note_sqs_work", lambda *_: None)
    clock = ManualClock()
    plane = PopulatedPlane(MemoryDatabase(clock=clock), clock)
    yield plane
    plane.transport.close()


def requests_of(populated: PopulatedPlane, kind: type[Request[Any]]) -> Iterator[Request[Any]]:
    """One that could be executed, and the same with another value in one field, at its bounds."""
    one = sample(populated, kind)
    yield one
    yield from (case.request for case in cases_of(one) if case.is_inside and case.field != "wait_seconds")
    yield from WRITES[kind](populated)[:1] if kind in WRITES else ()


def execute(populated: PopulatedPlane, request: Request[Any]) -> FastnessError | None:
    """Execute a request. It may be refused, also for another reason than its fields."""
    try:
        if isinstance(request, OpenBlob):
            list(populated.transport.receive(request))
            return None
        return refusal(populated.transport, request)
    except FastnessError as error:
        return error


def structs_in(kind: Any) -> set[type[msgspec.Struct]]:
    """A class of structs, and those in its fields."""
    found = {kind} if isinstance(kind, type) and issubclass(kind, msgspec.Struct) else set()
    inner = [field.type for struct in found for field in msgspec.structs.fields(struct)] + list(get_args(kind))
    return found.union(*map(structs_in, inner))


def use_a_quota(populated: PopulatedPlane) -> None:
    """Last: where there are quotas, they read the universe of every request that stores something."""
    execute(populated, SetQuota("main", QUOTA))
    populated.transport.services.quotas.connect("main")
    execute(populated, PutMessages("jobs", [NewMessage(b"x")]))


def test_no_field_of_a_request_is_ignored(populated: PopulatedPlane) -> None:
    more = more_of(populated)
    requests = {kind: [*more.get(kind, ()), *requests_of(populated, kind)] for kind in REQUESTS}
    fields = {
        (kind, struct, field.name)
        for kind, examples in requests.items()
        for each in examples
        for struct, field, _ in places(each)
    }
    with recording({struct for _, struct, _ in fields}) as reads:
        for kind, examples in requests.items():
            reads.request = kind
            for each in examples:
                execute(populated, each)
        reads.request = Request
        use_a_quota(populated)
    declared = {(kind, struct) for kind in REQUESTS if kind is not CommitAtomic for struct in structs_in(kind) - {kind}}
    assert declared - {(kind, struct) for kind, struct, _ in fields} == set(), "no example has these structs"
    used_later = {(struct, name) for kind, struct, name in reads.found if struct not in STORED.get(kind, ())}
    failures = Failures()
    for kind, struct, name in sorted(fields, key=str):
        with failures.of(f"{kind.__name__}: {struct.__name__}.{name}"):
            if struct in STORED.get(kind, ()):
                assert (struct, name) in used_later, "nothing reads it"
            else:
                assert (kind, struct, name) in reads.found, "nothing reads it"
    failures.check()


def alternatives(kind: Any) -> Iterator[Any]:
    """Values of each option of a type."""
    for option in options_of(kind):
        if get_origin(option) is Literal:
            yield from get_args(option)
        elif option is not NoneType:
            yield right(option)


def test_an_option_that_is_given_alone_is_used_or_refused(populated: PopulatedPlane) -> None:
    """An option that needs another one is refused without it: ignored, it would be missed only when it matters."""
    failures = Failures()
    for kind in REQUESTS:
        one = sample(populated, kind)
        for struct, field, put in list(places(one)):
            if field.required or field.name == "wait_seconds" or struct in STORED.get(kind, ()) or kind is SetQuota:
                continue
            for value in alternatives(field.type):
                with failures.of(f"{kind.__name__}: {struct.__name__}.{field.name} = {value!r:.30}"):
                    with recording({each for each, _, _ in places(one)}) as reads:
                        is_refused = execute(populated, put(value)) is not None
                    is_read = (Request, struct, field.name) in reads.found
                    assert is_read or is_refused or is_default(value, field), "it is ignored"
    failures.check()


def test_half_of_a_claim_is_refused(populated: PopulatedPlane) -> None:
    """A host that names only its fence, or only itself, would write as if it had no claim."""
    failures = Failures()
    for half in ({"owner": "h1"}, {"fence": populated.claim.fence}):
        for request in (CommitSnapshot("w", b"\x01", 2), PromoteSnapshot("w", 0)):
            with failures.of(half):
                error = execute(populated, msgspec.structs.replace(request, **half))
                assert isinstance(error, InvalidArgument)
                assert "give both" in str(error)
    failures.check()


# Structs that are stored as they are. In each of their fields, an example differs from the default.

EFFECT = Effect("mail", b"1", b"2", 3)
TIMER = Timer(1, b"2", b"3")
MAIL_POLICY = MailPolicy(5, 6.0)
RESULTS = [NewResult(b"1", "text/plain"), NewResult(blob=GENESIS, blob_size=1)]
QUOTA = Quota(messages=1_000, bytes=1 << 30, connections=10, rate_per_second=1_000.0)
POLICY = QueuePolicy(
    visibility_seconds=31.0,
    max_attempts=6,
    dead_letter_queue="dead",
    retention_seconds=1_000.0,
    dead_letter_retention_seconds=2_000.0,
    rate_per_second=3.0,
    paused=True,
    failures_kept=4,
    retry_delay_seconds=5.0,
    retry_factor=6.0,
    retry_delay_max_seconds=7.0,
    retry_jitter=0.8,
    history="durable",
    history_seconds=9_000.0,
    result_ttl_seconds=10.0,
    concurrency_per_key=11,
    rate_per_key=12.0,
    burst_per_key=13,
    fair=True,
    delay_seconds=14.0,
    dead_letter_rule="never",
    retention_by_age=True,
    group_batches=True,
)
MESSAGES = [
    NewMessage(
        b"x",
        content_type="text/plain",
        attributes={"a": "b"},
        correlation_id="c",
        priority=1,
        group="g",
        idempotency_key="i",
        delay_seconds=1.0,
        ttl_seconds=2.0,
        max_attempts=3,
        visibility_seconds=4.0,
        retry_delay_seconds=5.0,
        keep_result=True,
        tags=["red"],
    ),
    NewMessage(blob=GENESIS, blob_size=1, key="k", unique_key="u", unique_until="leased"),
    NewMessage(debounce_key="d", debounce_seconds=1.0, debounce_max_seconds=2.0),
]


def test_a_struct_that_is_stored_as_it_is_is_read_as_it_is(populated: PopulatedPlane) -> None:
    call = populated.transport.call
    read_back: list[tuple[msgspec.Struct, msgspec.Struct]] = []
    call(SetQueuePolicy("saved", POLICY))
    read_back.append((POLICY, call(GetQueuePolicy("saved"))))
    call(SetQuota("other", QUOTA))
    read_back.append((QUOTA, call(GetQuota("other"))))
    for message in MESSAGES:
        call(SetSchedule("jobs", "saved", "0 0 * * *", message))
        [saved] = [each.message for each in call(ListSchedules("jobs")).schedules if each.name == "saved"]
        read_back.append((message, saved))
    for result in RESULTS:
        call(PutMessages("jobs", [NewMessage(priority=0)]))
        [leased] = call(ReceiveMessages("jobs", "ada")).messages
        call(AckMessages("jobs", [MessageLease(leased.id, leased.lease_id, leased.fence)], results=[result]))
        kept = call(GetResult("jobs", leased.id))
        size = 0 if kept.blob is None else kept.size
        read_back.append((result, NewResult(kept.value or b"", kept.content_type, kept.blob, size)))
    call(SetMailPolicy(MAIL_POLICY))
    read_back.append((MAIL_POLICY, call(GetMailPolicy())))
    call(PutItem("caller", Control(command="go", effects=(EFFECT,), timers=(TIMER,))))
    item = call(ReadInbox("caller")).items[-1][1]
    read_back += [(EFFECT, item.effects[0]), (TIMER, item.timers[0])]
    changed = {type(given): set[str]() for given, _ in read_back}
    for given, found in read_back:
        assert found == given
        for field in msgspec.structs.fields(given):
            if not is_default(getattr(given, field.name), field):
                changed[type(given)].add(field.name)
    assert changed == {struct: set(struct.__struct_fields__) for structs in STORED.values() for struct in structs}


def is_default(value: Any, field: msgspec.structs.FieldInfo) -> bool:
    default = field.default
    if default is msgspec.NODEFAULT and field.default_factory is not msgspec.NODEFAULT:
        default = field.default_factory()
    return bool(value == default)


# The recorder.


class Given(msgspec.Struct, frozen=True):
    used: int = 0
    checked: int = 0
    forgotten: int = 0


def test_a_field_that_is_only_checked_or_encoded_counts_as_ignored() -> None:
    def check_range(given: Given) -> bool:
        return given.checked > 0

    with recording({Given}) as reads:
        given = Given(1, 1, 1)
        assert check_range(given)
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(given)) == {"used": 1, "checked": 1, "forgotten": 1}
        assert given.used == 1
    assert reads.found == {(Request, Given, "used")}
    assert given.forgotten == 1
