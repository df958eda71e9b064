"""A list of operations, executed in one transaction."""

from functools import partial

from holdfast.errors import BatchTooLarge, EmptyBatch, HoldfastError, MailNotFound, rebuild
from holdfast.kv import Transaction
from holdfast.layers.idempotency import KeyedCall, run_idempotent
from holdfast.limits import ATOMIC_OPERATIONS_MAX
from holdfast.plane import entities
from holdfast.plane.handlers import HANDLERS, service
from holdfast.plane.sharing import share_queues
from holdfast.plane.stores import AnyStores, Served
from holdfast.tiers import TierPolicy
from holdfast.wire.answers import decoder_of
from holdfast.wire.atomic import Answers, CommitAtomic
from holdfast.wire.entities import WriteEntities
from holdfast.wire.mail import ConfirmMail, SentMails
from holdfast.wire.queues import Outcomes, RefusedAck
from holdfast.wire.requests import Answer, Request


@service
def commit(stores: AnyStores, request: CommitAtomic, call: KeyedCall | None = None) -> Served[Answers]:
    work = partial(_execute_alone, policy=stores.services.policy, request=request)
    if call is None:
        return stores.transact(work, tier=request.tier)
    return stores.transact(run_idempotent, call, decoder_of(request), work, tier=request.tier)


def _execute_alone(tx: Transaction, policy: TierPolicy, request: CommitAtomic) -> Answers:
    """`execute_all` in a transaction that does nothing else."""
    share_queues(tx, request.operations)
    return execute_all(tx, policy, request)


def execute_all(tx: Transaction, policy: TierPolicy, request: CommitAtomic) -> Answers:
    """Execute every operation, or raise the error of the first one that fails.

    Raises:
        EmptyBatch, BatchTooLarge: there are none, or more than one commit may have.
    """
    if not request.operations:
        raise EmptyBatch("The commit has no operations; add at least one")
    if len(request.operations) > ATOMIC_OPERATIONS_MAX:
        raise BatchTooLarge(f"One commit has at most {ATOMIC_OPERATIONS_MAX} operations; split it")
    answers = []
    for step in request.operations:
        answer = execute_step(tx, policy, step)
        if isinstance(answer, Outcomes | SentMails):
            for outcome in answer.outcomes if isinstance(answer, Outcomes) else answer.mails:
                if outcome.code is not None:
                    raise rebuild(outcome.code, outcome.detail or outcome.code)
            if isinstance(answer, Outcomes) and answer.refused:
                raise _refused(answer.refused[0])
        elif isinstance(step, ConfirmMail) and answer.count < len(set(step.ids)):
            # The commit that confirmed it has done this work; the rest of the list would repeat it.
            raise MailNotFound(
                f"A mail of {step.agent} was confirmed before, or its time to live has passed; nothing was committed"
            )
        answers.append(answer)
    return Answers(answers)


def _refused(ack: RefusedAck) -> HoldfastError:
    """The error of a packed ack that was refused."""
    return rebuild(
        ack.code,
        f"The message at position {ack.position} of lease {ack.lease.hex()} is not leased any more; stop working on "
        "it. Nothing was committed",
    )


def execute_step(tx: Transaction, policy: TierPolicy, step: Request[Answer]) -> Answer:
    """Execute one operation that can be part of a larger commit (`Operation.atomic`)."""
    if isinstance(step, WriteEntities):
        return entities.write_in(tx, step, policy)  # type: ignore[return-value]
    run = HANDLERS[type(step)].run
    assert run is not None, "Operation.atomic is declared on transactions only"
    answer: Answer = run(tx, step)
    return answer
