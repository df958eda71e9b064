"""The record of a history: operations as their clients saw them."""

import hashlib
import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from enum import StrEnum
from itertools import pairwise
from typing import Any, Final

import msgspec

from fastness.errors import FastnessError, InvalidArgument, RetryAdvice

REPORT_LINES_MAX: Final = 50  # Longer reports are not readable.
NEVER: Final = 2**63 - 1
encode: Final = msgspec.msgpack.Encoder(order="deterministic").encode


class Outcome(StrEnum):
    """What a client knows about its operation."""

    OK = "ok"
    FAILED = "failed"
    UNKNOWN = "unknown"


class Operation(msgspec.Struct, frozen=True):
    """One call of one client. `returned` is NEVER unless its outcome is known."""

    client: str
    kind: str
    key: Hashable
    argument: Any
    invoked: int
    returned: int = NEVER
    outcome: Outcome = Outcome.UNKNOWN
    result: Any = None

    def __str__(self) -> str:
        request = f"{self.kind} {self.key!r}" + ("" if self.argument is None else f" {self.argument!r}")
        answer = repr(self.result) if self.outcome is Outcome.OK else self.outcome.value
        return (
            f"[{self.invoked}..{'' if self.returned == NEVER else self.returned}] {self.client}: {request} -> {answer}"
        )


class Violation(AssertionError):
    """No correct system can produce this history. `operations` are the ones that contradict each other."""

    def __init__(self, message: str, operations: Iterable[Operation]) -> None:
        unique = {operation.invoked: operation for operation in operations}
        self.message = message
        self.operations = tuple(unique[invoked] for invoked in sorted(unique))
        lines = [message, *map(str, self.operations[:REPORT_LINES_MAX])]
        if len(self.operations) > REPORT_LINES_MAX:
            lines.append(f"and {len(self.operations) - REPORT_LINES_MAX} more, in `operations`")
        super().__init__("\n    ".join(lines))


class History:
    """A thread-safe record of operations."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._position = 0
        self._operations: dict[int, Operation] = {}
        self._power_losses: list[int] = []

    def record(self, client: str, kind: str, key: Hashable, argument: Any, call: Callable[[], Any]) -> Operation:
        """Run `call` and return the operation as it ended; a FastnessError becomes its outcome.

        Any other exception propagates and leaves the operation UNKNOWN.
        """
        operation = self.invoke(client, kind, key, argument)
        try:
            result = call()
        except FastnessError as error:
            return self.raised(operation, error)
        return self.ok(operation, result)

    def invoke(self, client: str, kind: str, key: Hashable, argument: Any = None) -> Operation:
        """Record that `client` starts a call. End the operation with `ok`, `failed`, `unknown` or `raised`."""
        with self._lock:
            self._position += 1
            operation = Operation(client, kind, key, argument, self._position)
            self._operations[operation.invoked] = operation
            return operation

    def ok(self, operation: Operation, result: Any = None) -> Operation:
        """End an operation that happened and returned `result`."""
        return self._end(operation, Outcome.OK, result)

    def failed(self, operation: Operation) -> Operation:
        """End an operation that certainly did not happen, and never will."""
        return self._end(operation, Outcome.FAILED)

    def unknown(self, operation: Operation) -> Operation:
        """End an operation whose answer was lost."""
        return self._end(operation, Outcome.UNKNOWN)

    def raised(self, operation: Operation, error: FastnessError) -> Operation:
        """End an operation that raised: UNKNOWN if, by the error's `retry`, it may have happened; otherwise FAILED."""
        return self.unknown(operation) if error.retry is RetryAdvice.IDEMPOTENT else self.failed(operation)

    def power_lost(self) -> None:
        """Record that the power was lost: commits that were not durable are gone."""
        with self._lock:
            self._position += 1
            self._power_losses.append(self._position)

    @property
    def power_losses(self) -> tuple[int, ...]:
        """The positions of the power losses so far."""
        with self._lock:
            return tuple(self._power_losses)

    @property
    def operations(self) -> tuple[Operation, ...]:
        """All operations so far, in the order of invocation."""
        with self._lock:
            return tuple(self._operations.values())

    def digest(self) -> str:
        """The SHA-256 over every field of every operation; equal histories have equal digests."""
        return hashlib.sha256(encode(self.operations)).hexdigest()

    def render(self, limit: int = REPORT_LINES_MAX) -> str:
        """The last `limit` operations, one per line."""
        operations = self.operations
        hidden = max(0, len(operations) - limit)
        return "\n".join(
            [f"({hidden} earlier operations)"] * bool(hidden) + [str(each) for each in operations[hidden:]]
        )

    def _end(self, operation: Operation, outcome: Outcome, result: Any = None) -> Operation:
        with self._lock:
            if self._operations.get(operation.invoked) is not operation:
                raise InvalidArgument(
                    f"{operation} has already ended, or belongs to another history; end each operation once"
                )
            self._position += 1
            returned = NEVER if outcome is Outcome.UNKNOWN else self._position
            ended = msgspec.structs.replace(operation, returned=returned, outcome=outcome, result=result)
            self._operations[operation.invoked] = ended
            return ended


def by_key(history: History, *kinds: str) -> dict[Hashable, list[Operation]]:
    keys: dict[Hashable, list[Operation]] = {}
    for operation in history.operations:
        if operation.kind in kinds:
            keys.setdefault(operation.key, []).append(operation)
    return keys


def check_increases(name: str, granted: Sequence[tuple[int, Operation]]) -> None:
    """Check numbers in their order, with the calls that got them: each was granted once, and real time agrees.

    Raises:
        Violation: two calls got the same number, or a call had returned before that of a lower number was made.
    """
    newest: tuple[int, Operation] | None = None
    for before, after in pairwise(granted):
        (number, one), (next_number, other) = before, after
        if number == next_number:
            raise Violation(f"{name}{number} was granted twice", [one, other])
        newest = max(newest or before, before, key=lambda each: each[1].invoked)
        if other.returned < newest[1].invoked:
            message = f"{name}{next_number} had returned before the call that got {newest[0]} was made"
            raise Violation(message, [other, newest[1]])
