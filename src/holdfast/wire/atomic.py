"""A list of operations that is committed as one, or not at all."""

from typing import Any

import msgspec

from holdfast.wire.entities import WriteEntities
from holdfast.wire.leases import CheckLease, KeepLease, ReleaseLease
from holdfast.wire.mail import ConfirmMail, SendMail
from holdfast.wire.queues import AckMessages, CheckMessages, ExtendMessages, NackMessages, PutMessages, RejectMessages
from holdfast.wire.requests import Request
from holdfast.wire.states import RemoveState, UpdateState
from holdfast.wire.worlds import AppendEntries, PutItem

Step = (
    PutMessages
    | AckMessages
    | NackMessages
    | RejectMessages
    | ExtendMessages
    | CheckMessages
    | AppendEntries
    | PutItem
    | UpdateState
    | RemoveState
    | WriteEntities
    | CheckLease
    | KeepLease
    | ReleaseLease
    | SendMail
    | ConfirmMail
)


class Answers(msgspec.Struct, frozen=True):
    """The answer to each operation, in order."""

    answers: list[Any]


class CommitAtomic(Request[Answers], frozen=True, tag="atomic.commit"):
    """Carry out every operation in one transaction. If one of them fails, none has happened."""

    operations: list[Step]

    def check(self) -> None:
        for operation in self.operations:
            operation.check()
