"""Programs: pure reducers that also say what is to be done.

    @fastness.program
    def counter(state, event, context):
        if event.name == "order":
            context.call("charge_card", event.json())
        return {"orders": (state or {"orders": 0})["orders"] + 1}

A program is called with every item of its world's inbox, in order, and returns the next state: None, text, numbers,
bytes, lists and dicts of them. Its result depends on its arguments only. The same events give the same state again
whenever the journal is replayed; what the context collects is carried out once, with the commit of the turn.

    {"turn": now_ms}     entry    opens a turn: the time that its events see
    {"seq", "type", …}   ingress  an event
    {"aside": sequence}  entry    in the place of an item that was set aside; it changes nothing

The folded state of a world is {"now": now_ms, "state": the program's state}.
"""

import inspect
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from functools import update_wrapper
from typing import Any, Final, Unpack

import msgspec

from fastness.errors import BatchTooLarge, InvalidArgument, InvalidValue, PayloadTooLarge, TransactionEnded
from fastness.handles.queues import MessageOptions, new_message, payload_of
from fastness.limits import (
    EFFECT_ATTEMPTS,
    EFFECT_ATTEMPTS_MAX,
    EFFECT_KIND_BYTES_MAX,
    EFFECT_PARAMS_BYTES_MAX,
    EMITTED_BYTES_MAX,
    EMITTED_MAX,
    INBOX_INLINE_BYTES_MAX,
    INBOX_REQUESTS_MAX,
    INBOX_TEXT_BYTES_MAX,
    INTENT_HASH_BYTES_MAX,
)
from fastness.names import checked_key, checked_name
from fastness.wire.canonical import canonical
from fastness.wire.inboxes import DomainEvent, Effect, InboxItem, Timer
from fastness.wire.json_values import decode_json
from fastness.wire.mail import NewMail
from fastness.wire.queues import NewMessage
from fastness.wire.restores import Entry

Handle = Callable[[Any, "Event", "TurnContext"], Any]

_CALL_BYTES: Final = 16  # The last bytes of the intent hash of a program's effect: the height and number of its call.
_TIME_NS_MAX: Final = (1 << 63) - 1
_NAME_FIELDS: Final = {
    "domain_event": "schema",
    "receipt": "effect_kind",
    "inbox": "inbox_name",
    "timer_fired": "timer_id",
    "control": "command",
}


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """An inbox item, as a program sees it.

    `kind` is domain_event, receipt, inbox, timer_fired or control. `name` is the schema of a domain event, the kind of
    the effect that a receipt answers, the name of an inbox (`mail` for mail), the name of a timer, or a command.
    """

    kind: str
    name: str
    payload: bytes = b""
    key: bytes | None = None  # Of a domain event.
    error: str | None = None  # Of a receipt: the effect is dead, after this error.
    headers: Mapping[str, str] = {}  # Of a message from outside: `from`, `id`, … of mail.
    sender: str | None = None  # Of a domain event from another universe: `world@universe`, which the plane has checked.
    call_id: str | None = None  # Of a receipt: what `context.call` returned.
    height: int = 0  # Of its record in the journal.
    sequence: int = 0  # In the inbox.

    def json(self) -> Any:
        """The payload, from JSON.

        Raises:
            InvalidValue: it is not JSON, or nested too deep.
        """
        return decode_json(self.payload)

    def is_receipt(self, kind: str | None = None) -> bool:
        """Whether it is the receipt of an effect, of this kind if one is given."""
        return self.kind == "receipt" and kind in (None, self.name)

    def is_timer(self, name: str | None = None) -> bool:
        """Whether a timer has fired, with this name if one is given."""
        return self.kind == "timer_fired" and name in (None, self.name)


class TurnContext:
    """What a program can do besides returning its state. It is valid during one call of the program.

    Everything is done if the turn is committed, and only then. A wrong argument raises at once and emits nothing.
    """

    def __init__(self, now_ms: int, height: int) -> None:
        self._emitted = Emitted()
        self._now_ms = now_ms
        self._height = height
        self._bytes = 0
        self._has_ended = False

    @property
    def now(self) -> datetime:
        """The time of the turn, which is recorded in the journal: a replay sees the same time."""
        return datetime.fromtimestamp(0, UTC) + timedelta(milliseconds=self._now_ms)

    def call(self, kind: str, params: Any = None, *, max_attempts: int = EFFECT_ATTEMPTS) -> str:
        """Ask for an effect: the adapter of this kind is called at least once, with `params` as JSON, or bytes.

        Its result arrives as an event: `event.is_receipt(kind)`, with this call's id as `event.call_id`.

        Raises:
            InvalidArgument, InvalidValue, PayloadTooLarge, BatchTooLarge: an argument is wrong, or it is too much.
        """
        _check_text("kind", kind, EFFECT_KIND_BYTES_MAX)
        if max_attempts.__class__ is not int or not 1 <= max_attempts <= EFFECT_ATTEMPTS_MAX:
            raise InvalidArgument(f"max_attempts is {max_attempts!r}; an effect has 1 to {EFFECT_ATTEMPTS_MAX}")
        payload, _ = payload_of(params)
        if len(payload) > EFFECT_PARAMS_BYTES_MAX:
            raise PayloadTooLarge(
                f"The parameters of {kind} have {len(payload)} bytes and may have {EFFECT_PARAMS_BYTES_MAX}; store a "
                "blob and pass its hash"
            )
        calls = self._emitted.calls
        self._count(calls, INBOX_REQUESTS_MAX, "effects", len(payload))
        calls.append(Effect(kind, b"", payload, max_attempts))
        return f"{self._height}.{len(calls) - 1}"

    def timer(
        self,
        name: str,
        *,
        seconds: float | timedelta | None = None,
        at: datetime | None = None,
        payload: bytes = b"",
    ) -> None:
        """Start a timer, or replace the one of that name. It arrives as an event: `event.is_timer(name)`.

        Args:
            name: 1 to 128 bytes of text.
            seconds: how long after the time of the turn it fires.
            at: when it fires, as an aware datetime; instead of `seconds`.
            payload: bytes for the event.
        """
        at_ns = self._deliver_at_ns(seconds, at)
        if payload.__class__ is not bytes or len(payload) > INBOX_INLINE_BYTES_MAX:
            raise InvalidArgument(f"The payload of a timer is at most {INBOX_INLINE_BYTES_MAX} bytes")
        self._set_timer(name, at_ns, payload)

    def cancel_timer(self, name: str) -> None:
        """Cancel the timer of that name, if it is pending. One that has fired already still arrives."""
        self._set_timer(name, None)

    def send(self, world: str, body: Any, *, schema: str = "message", key: str | bytes | None = None) -> None:
        """Send a domain event to another world: `body` as JSON, or bytes. It arrives exactly once.

        `world@universe` is a world of another universe, if both universes allow it (`plane.hosting.set_policy`). The
        receiver's event has the `sender`.

        The turn fails if the world does not exist or is archived, or if a universe does not allow it.
        """
        address_of(world)
        _check_text("schema", schema)
        encoded = key.encode() if isinstance(key, str) else key
        if encoded is not None and (encoded.__class__ is not bytes or len(encoded) > INBOX_TEXT_BYTES_MAX):
            raise InvalidArgument(f"The key of an event is text or bytes, at most {INBOX_TEXT_BYTES_MAX} bytes")
        payload, _ = payload_of(body)
        self._emit(EmittedEvent(world, DomainEvent(schema=schema, key=encoded, payload=payload)), len(payload))

    def put(self, queue: str, body: Any, **options: Unpack[MessageOptions]) -> None:
        """Put a message into a queue, exactly once, with the options of `queue.put`."""
        checked_name("queue", queue)
        try:
            message = new_message(body, **options)
        except TypeError as error:
            raise InvalidArgument(f"The options of a message are wrong: {error}") from error
        self._emit(EmittedMessage(queue, message), len(message.payload))

    def mail(self, to: str, body: Any, *, sender: str | None = None, correlation_id: str | None = None) -> None:
        """Send a mail, exactly once: to `agent`, or `agent@universe` of the same universe.

        Args:
            to: the address.
            body: as JSON, or bytes.
            sender: the agent that sends it; by default the one with the name of this world.
            correlation_id: of the conversation.
        """
        for address in (to, sender):
            if address is not None:
                checked_name("agent", address)
        payload, content_type = payload_of(body)
        mail = NewMail(to, payload, content_type=content_type, correlation_id=correlation_id)
        self._emit(EmittedMail(sender, mail), len(payload))

    def publish(self, value: Any, *, key: str | None = None) -> None:
        """Write a state document, which others can read: by default `worlds/<name of this world>`."""
        if key is not None:
            checked_key("state", key)
        encoded = canonical(value)
        self._emit(EmittedState(key, encoded), len(encoded))

    def end(self) -> "Emitted":
        """End the call of the program; what it has emitted."""
        self._has_ended = True
        return self._emitted

    def _emit(self, emitted: "EmittedOperation", size: int) -> None:
        self._count(self._emitted.operations, EMITTED_MAX, "messages, mails, sends and documents", size)
        self._emitted.operations.append(emitted)

    def _set_timer(self, name: str, at_ns: int | None, payload: bytes = b"") -> None:
        _check_text("name of a timer", name, INTENT_HASH_BYTES_MAX)
        timers = self._emitted.timers
        if name not in timers:
            self._count(timers, INBOX_REQUESTS_MAX, "timers", 0)
        timers[name] = None if at_ns is None else Timer(at_ns, name.encode(), payload)

    def _count(self, emitted: "list[Any] | dict[str, Any]", most: int, what: str, size: int) -> None:
        """Check that one more may be emitted, and count its bytes."""
        if self._has_ended:
            raise TransactionEnded("The call of the program has ended; use the context that the next call is given")
        if len(emitted) >= most:
            raise BatchTooLarge(f"A program emits at most {most} {what} for each event; send itself an event for more")
        if self._bytes + size > EMITTED_BYTES_MAX:
            raise PayloadTooLarge(
                f"A program emits at most {EMITTED_BYTES_MAX} bytes for each event; store blobs and send their hashes"
            )
        self._bytes += size

    def _deliver_at_ns(self, seconds: float | timedelta | None, at: datetime | None) -> int:
        if (seconds is None) == (at is None):
            raise InvalidArgument("A timer needs either seconds or at")
        if at is not None:
            if at.tzinfo is None:
                raise InvalidArgument(f"at is {at!r}; pass a datetime with a time zone, as context.now has")
            delta = at - datetime.fromtimestamp(0, UTC)
            at_ns = (delta // timedelta(microseconds=1)) * 1_000
        else:
            after = seconds.total_seconds() if isinstance(seconds, timedelta) else seconds
            if not isinstance(after, int | float) or not 0 <= after < _TIME_NS_MAX / 1e9:
                raise InvalidArgument(f"seconds is {seconds!r}; a timer fires 0 or more seconds after the turn")
            at_ns = self._now_ms * 1_000_000 + round(after * 1_000_000_000)
        if not 0 <= at_ns <= _TIME_NS_MAX:
            raise InvalidArgument("A timer fires after 1970 and before 2262")
        return at_ns


class EmittedEvent(msgspec.Struct, frozen=True):
    """A domain event for another world."""

    world: str
    event: DomainEvent


class EmittedMessage(msgspec.Struct, frozen=True):
    """A message for a queue."""

    queue: str
    message: NewMessage


class EmittedMail(msgspec.Struct, frozen=True):
    """A mail; without a sender, from the agent with the name of the world."""

    sender: str | None
    mail: NewMail


class EmittedState(msgspec.Struct, frozen=True):
    """A state document; without a key, that of the world."""

    key: str | None
    value: bytes


EmittedOperation = EmittedEvent | EmittedMessage | EmittedMail | EmittedState


class Emitted:
    """What a program has emitted for one event. A timer of None is to be cancelled."""

    def __init__(self) -> None:
        self.calls: list[Effect] = []  # Without their intent hashes, which depend on the world.
        self.timers: dict[str, Timer | None] = {}
        self.operations: list[EmittedOperation] = []


class Program:
    """A named program. Called, it is the function that it was made of."""

    def __init__(self, name: str, handle: Handle) -> None:
        """The program of this name.

        Raises:
            InvalidName: it is no name of a program.
            InvalidArgument: `handle` is not a plain function.
        """
        if not _is_plain_function(handle):
            raise InvalidArgument(
                f"The program {name} must be a plain function of (state, event, context), not {handle!r}; use an "
                "adapter or a workflow for what waits"
            )
        self.name = checked_name("program", name)
        self.handle = handle
        self.reducer = ProgramReducer(self)
        update_wrapper(self, handle)

    def __call__(self, state: Any, event: Event, context: TurnContext) -> Any:
        return self.handle(state, event, context)

    def state_of(self, folded: Any) -> Any:
        """The state that the program returned last, from what its reducer has folded."""
        return None if folded is None else folded["state"]

    def __repr__(self) -> str:
        return f"<program {self.name}>"


class ProgramReducer:
    """Folds the journal of a program's world: {"now": the time of the last turn, "state": of the program}."""

    reads_payloads = True  # The bytes of payloads that are blobs are read before the entry is folded.

    def __init__(self, program: Program) -> None:
        self._program = program

    def __call__(self, state: Any, entry: Entry) -> Any:
        """The state after an entry of the journal; None before the first turn."""
        if entry.kind == "entry":
            turn_ms = turn_of(entry.value)
            return state if turn_ms is None else opened(state, turn_ms)
        if entry.kind != "ingress":
            return state
        return self.fold(state, event_of(entry.height, entry.value))[0]

    def fold(self, state: Any, event: Event) -> tuple[Any, Emitted]:
        """The state after an event, and what the program has emitted for it."""
        before = opened(state, 0) if state is None else state
        context = TurnContext(before["now"], event.height)
        after = self._program.handle(before["state"], event, context)
        if inspect.isawaitable(after):
            if inspect.iscoroutine(after):
                after.close()
            raise InvalidValue(f"The program {self._program.name} returned an awaitable, not a state")
        return {"now": before["now"], "state": after}, context.end()


def opening(now_ms: int) -> bytes:
    """The entry that opens a turn."""
    return canonical({"turn": now_ms})


def turn_of(value: Any) -> int | None:
    """The time of a turn, if an entry opens one."""
    if isinstance(value, dict) and len(value) == 1 and isinstance(turn_ms := value.get("turn"), int):
        return turn_ms
    return None


def opened(state: Any, now_ms: int) -> dict[str, Any]:
    """A folded state at the beginning of a turn."""
    return {"now": now_ms, "state": None if state is None else state["state"]}


def ingress_of(sequence: int, item: InboxItem, payload: bytes) -> dict[str, Any]:
    """The value of an item's record in the journal, with the bytes of its payload."""
    return {"seq": sequence, **msgspec.to_builtins(item, builtin_types=(bytes,)), "payload": payload}


def event_of(height: int, value: Mapping[str, Any]) -> Event:
    """The event of an ingress record."""
    kind = value["type"]
    hashed: bytes = value.get("intent_hash", b"")
    return Event(
        kind=kind,
        name=value[_NAME_FIELDS[kind]],
        payload=value.get("payload", b""),
        key=value.get("key"),
        error=value.get("error"),
        # In the order of the journal: an item that has just arrived may have another one.
        headers=dict(sorted(value.get("headers", {}).items())),
        sender=value.get("sender"),
        call_id=call_id_of(hashed) if kind == "receipt" else None,
        height=height,
        sequence=value["seq"],
    )


def intent_hash(prefix: bytes, height: int, number: int) -> bytes:
    """The intent hash of the effect `number` of the record at `height`; the prefix identifies the world."""
    return prefix + height.to_bytes(_CALL_BYTES // 2, "big") + number.to_bytes(_CALL_BYTES // 2, "big")


def call_id_of(hashed: bytes) -> str | None:
    """The id of the call that an intent hash was made for; None if a program has not made it."""
    if len(hashed) != 2 * _CALL_BYTES:
        return None
    height, number = hashed[_CALL_BYTES : -_CALL_BYTES // 2], hashed[-_CALL_BYTES // 2 :]
    return f"{int.from_bytes(height, 'big')}.{int.from_bytes(number, 'big')}"


def address_of(address: str) -> tuple[str, str | None]:
    """The world and the universe that an address names: `world`, or `world@universe`.

    Raises:
        InvalidName: it is no address.
    """
    name, at, universe = checked_name("world", address).partition("@")
    return checked_name("world", name), checked_name("universe", universe) if at else None


def _is_plain_function(handle: object) -> bool:
    return callable(handle) and not (inspect.iscoroutinefunction(handle) or inspect.isasyncgenfunction(handle))


def _check_text(what: str, text: object, bytes_max: int = INBOX_TEXT_BYTES_MAX) -> None:
    try:
        if isinstance(text, str) and 1 <= len(text.encode()) <= bytes_max:
            return
    except UnicodeEncodeError:  # Half of a surrogate pair.
        pass
    raise InvalidArgument(f"The {what} is {str(text)[:100]!r}; use text of 1 to {bytes_max} bytes")
