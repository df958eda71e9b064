"""A list of operations that commits as one, or not at all."""

from typing import TYPE_CHECKING, Annotated, Any, Final, Union

import msgspec

from fastness import limits
from fastness.wire import collections, entities, hosting, leases, locks, mail, queues, runs, states, worlds
from fastness.wire.fields import batch_of
from fastness.wire.requests import Request

STEPS: Final[tuple[type[Request[Any]], ...]] = tuple(
    kind
    for module in (queues, worlds, states, entities, collections, leases, locks, mail, hosting, runs)
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, Request) and kind.operation.atomic
)
if TYPE_CHECKING:
    Step = Request[Any]
else:
    Step = Union[STEPS]  # noqa: UP007


class Answers(msgspec.Struct, frozen=True):
    """The answer to each operation, in order."""

    answers: list[Any]


class CommitAtomic(Request[Answers], frozen=True, tag="atomic.commit"):
    """Execute every operation in one transaction. If one of them fails, nothing is written."""

    operations: Annotated[list[Step], batch_of(limits.ATOMIC_OPERATIONS_MAX, "operations")]

    def check(self) -> None:
        for operation in self.operations:
            operation.check()
