"""A list of operations, carried out in one transaction."""

from functools import partial
from typing import Any, Final

from holdfast.errors import BatchTooLarge, EmptyBatch, MailNotFound, rebuild
from holdfast.kv import Transaction
from holdfast.layers.idempotency import KeyedCall, once
from holdfast.limits import ATOMIC_OPERATIONS_MAX
from holdfast.plane import entities, leases, mail, queues, states, worlds
from holdfast.wire.answers import decoder_of
from holdfast.wire.atomic import Answers, CommitAtomic
from holdfast.wire.entities import WriteEntities
from holdfast.wire.leases import CheckLease, KeepLease, ReleaseLease
from holdfast.wire.mail import ConfirmMail, SendMail, SentMails
from holdfast.wire.queues import (
    AckMessages,
    CheckMessages,
    ExtendMessages,
    NackMessages,
    Outcomes,
    PutMessages,
    RejectMessages,
)
from holdfast.wire.states import RemoveState, UpdateState
from holdfast.wire.worlds import AppendEntries, PutItem

_STEPS: Final[dict[type[Any], Any]] = {
    PutMessages: queues.put,
    AckMessages: queues.ack,
    NackMessages: queues.nack,
    RejectMessages: queues.reject,
    ExtendMessages: queues.extend,
    CheckMessages: queues.check,
    AppendEntries: worlds.append,
    PutItem: worlds.put_item,
    UpdateState: states.update,
    RemoveState: states.remove,
    CheckLease: leases.check,
    KeepLease: leases.keepalive,
    ReleaseLease: leases.release,
    SendMail: mail.send,
    ConfirmMail: mail.confirm,
}


def commit(transport: Any, request: CommitAtomic, call: KeyedCall | None = None) -> Any:
    if call is None:
        return transport.transact(carry_out, transport.services, request, tier=request.tier)
    work = partial(carry_out, services=transport.services, request=request)
    return transport.transact(once, call, decoder_of(request), work, tier=request.tier)


def carry_out(tx: Transaction, services: Any, request: CommitAtomic) -> Answers:
    """Carry every operation out, or raise what the first one that fails raises.

    Raises:
        EmptyBatch, BatchTooLarge: there are none, or more than one commit may have.
    """
    if not request.operations:
        raise EmptyBatch("There is nothing to commit; add operations first")
    if len(request.operations) > ATOMIC_OPERATIONS_MAX:
        raise BatchTooLarge(f"One commit has at most {ATOMIC_OPERATIONS_MAX} operations; split it")
    answers = []
    for step in request.operations:
        if isinstance(step, WriteEntities):
            answer: Any = entities.write_in(tx, step, services.policy)
        else:
            answer = _STEPS[type(step)](tx, step)
        if isinstance(answer, Outcomes | SentMails):
            for outcome in answer.outcomes if isinstance(answer, Outcomes) else answer.mails:
                if outcome.code is not None:
                    raise rebuild(outcome.code, outcome.detail or outcome.code)
        elif isinstance(step, ConfirmMail) and answer.count < len(set(step.ids)):
            # Whoever confirmed it has done what it asked for; the rest of this list would do it again.
            raise MailNotFound(f"Mail of {step.agent} was confirmed before, or its time is over; nothing was committed")
        answers.append(answer)
    return Answers(answers)
