"""A list of operations, executed in one transaction."""

from collections.abc import Callable
from functools import partial
from typing import Any

from fastness.errors import FastnessError, MailNotFound, rebuild
from fastness.kv import Transaction
from fastness.layers.idempotency import KeyedCall, run_idempotent
from fastness.plane import entities
from fastness.plane.handlers import HANDLERS, run_guarded, service
from fastness.plane.services import Services
from fastness.plane.sharing import share_queues
from fastness.plane.stores import AnyStores, Served
from fastness.runtime.locks.table import LocksBegun
from fastness.wire.answers import decoder_of
from fastness.wire.atomic import Answers, CommitAtomic
from fastness.wire.entities import WriteEntities
from fastness.wire.mail import ConfirmMail, SentMails
from fastness.wire.queues import Outcomes, RefusedAck
from fastness.wire.requests import Answer, Request


@service
def commit(stores: AnyStores, request: CommitAtomic, call: KeyedCall | None = None) -> Served[Answers]:
    locked: set[str] = set()
    work = partial(_execute_alone, services=stores.services, request=request, locked=locked)
    args: tuple[Any, ...] = (work,) if call is None else (run_idempotent, call, decoder_of(request), work)
    transact: Callable[[], Any] = lambda: stores.transact(*args, tier=request.tier)  # noqa: E731
    writes = [step for step in request.operations if isinstance(step, WriteEntities)]
    return stores.entities.commit_rows(writes, transact, locked) if writes else transact()


def _execute_alone(tx: Transaction, services: Services, request: CommitAtomic, locked: set[str]) -> Answers:
    """`execute_all` in a transaction that does nothing else. `locked`: the universes whose rows are locked for it."""
    for step in () if services.shared_locks else request.operations:
        if isinstance(step, WriteEntities) and step.universe not in locked and services.has_lock_callers(step.universe):
            raise LocksBegun
    share_queues(tx, request.operations)
    return execute_all(tx, services, request)


def execute_all(tx: Transaction, services: Services, request: CommitAtomic) -> Answers:
    """Execute every operation, or raise the error of the first one that fails."""
    answers = []
    for step in request.operations:
        answer = execute_step(tx, services, step)
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


def _refused(ack: RefusedAck) -> FastnessError:
    """The error of a packed ack that was refused."""
    return rebuild(
        ack.code,
        f"The message at position {ack.position} of lease {ack.lease.hex()} is not leased any more; stop working on "
        "it. Nothing was committed",
    )


def execute_step(tx: Transaction, services: Services, step: Request[Answer]) -> Answer:
    """Execute one operation that can be part of a larger commit (`Operation.atomic`)."""
    if isinstance(step, WriteEntities):
        return entities.write_in(tx, step, services)  # type: ignore[return-value]
    return run_guarded(tx, HANDLERS[type(step)], step)
