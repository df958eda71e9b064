"""Gathering: calls that an event loop makes at the same time become one transaction.

    alone:      call ──► its own transaction, at once
    others are waiting for their sync: this turn's calls ──► one transaction ──► one sync ──► each its own answer

A transaction of an embedded store costs about as much as a small operation itself, so many callers do twice the work
without this. Each call stays by itself: one that raises has written nothing and disturbs nobody.
"""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from holdfast.errors import Closed, HoldfastError
from holdfast.kv import Database, Transaction
from holdfast.kv.batch import Work, run_batch, run_isolated
from holdfast.kv.execution import check_tier
from holdfast.layers.idempotency import Fresh, once, sending
from holdfast.limits import GROUP_ANSWERS_BYTES
from holdfast.plane.atomic import carry_out
from holdfast.plane.operations import OPERATIONS, operation_of
from holdfast.tiers import Tier
from holdfast.wire.answers import read_answer
from holdfast.wire.atomic import CommitAtomic
from holdfast.wire.frames import Call, encode
from holdfast.wire.mail import MailReceipts, Mails
from holdfast.wire.requests import Request

Run = Callable[[Transaction, Any], Any]
Events = list[tuple[Any, ...]]


class CallBatcher:
    """The calls of one event loop that are under way. Only CRITICAL ones: the others do not wait for anything."""

    def __init__(self, database: Database, publish: Callable[[Events], None]) -> None:
        self._transact = database.transact_async
        self._publish = publish
        self._under_way = 0
        self._works: list[Work] = []
        self._callers: list[asyncio.Future[Any]] = []  # Whoever waits for each of them.
        self._tasks: set[asyncio.Task[None]] = set()  # An event loop keeps only weak references to its tasks.

    async def call(self, run: Run, request: Any) -> Any:
        """The answer of `run(tx, request)`, once it is synced."""
        self._under_way += 1
        try:
            if self._under_way == 1:
                answer, events = await self._transact(_alone, run, request, tier=Tier.CRITICAL)
                if events:
                    self._publish(events)
                return answer
            loop = asyncio.get_running_loop()
            future = loop.create_future()
            self._works.append((run, request))
            self._callers.append(future)
            if len(self._works) == 1:
                loop.call_soon(self._start)
            return await future
        finally:
            self._under_way -= 1

    def _start(self) -> None:
        works, self._works = self._works, []
        callers, self._callers = self._callers, []
        task = asyncio.get_running_loop().create_task(self._commit(works, callers))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _commit(self, works: list[Work], callers: "list[asyncio.Future[Any]]") -> None:
        while works:
            try:
                outcomes, events = await self._transact(_together, works, tier=Tier.CRITICAL)
            except BaseException as error:
                for caller in callers:
                    if not caller.done():
                        caller.set_exception(error)
                if not isinstance(error, Exception):
                    raise
                return
            if events:
                self._publish(events)
            for caller, outcome in zip(callers, outcomes, strict=False):
                if caller.done():
                    continue  # Whoever asked was cancelled, and what they asked for has happened.
                if isinstance(outcome, Exception):
                    caller.set_exception(outcome)
                else:
                    caller.set_result(outcome)
            works, callers = works[len(outcomes) :], callers[len(outcomes) :]


def _alone(tx: Transaction, run: Run, request: Any) -> tuple[Any, Events]:
    return run(tx, request), tx.events


def _together(tx: Transaction, works: list[Work]) -> tuple[list[Any], Events]:
    return run_batch(tx, works, Exception), tx.events


# Batches from the stream: the calls of one frame share a transaction.
#
#     calls, in order ──► only reads: one snapshot
#                    └──► otherwise: one transaction, at the strongest tier requested by any of them
#
# Each call sees the writes of those before it. A batch that grows too large ends; the rest forms the next one.


_CRITICAL = Tier.CRITICAL  # Looking a member up on its enumeration costs as much as the rest of a look at a call.
_IMPORTANT = Tier.IMPORTANT
_TRANSACTIONS = frozenset(kind for kind, operation in OPERATIONS.items() if operation.run is not None)
_ENVELOPE_BYTES = 256  # What a mail counts for beside its body, and a receipt.


def is_batchable(request: Any) -> bool:
    """Whether a request is one transaction, and nothing else."""
    if request.__class__ in _TRANSACTIONS:
        return True
    operation = operation_of(request)
    return isinstance(request, CommitAtomic) if operation.now is None else not request.wait_seconds


def _always() -> bool:
    return True


async def call_batch(transport: Any, calls: Sequence[Call], wanted: Callable[[], bool] = _always) -> list[Any]:
    """The answers to the first of the calls, or the errors that they raised: of as many as make one group.

    Whoever has more calls than answers asks again with the rest. Only for calls that `is_batchable` says can share.
    They are not begun if they are not `wanted` any more when their turn comes: whoever sent them sends them again.
    """
    sendings = transport.services.sendings
    any_again = any(call.again for call in calls)
    later = sendings.heard(again=any_again)
    first = sendings.heard(again=False) if any_again else later
    works: list[Work] = []
    answers: _Answers | None = None
    tier, writes = _IMPORTANT, False
    for call in calls:
        request: Request[Any] = call.request
        if request.tier is _CRITICAL:
            tier = _CRITICAL
        elif request.tier is not _IMPORTANT:
            works.append((_refuse, request.tier))
            continue
        operation = operation_of(request)
        if operation.reads_only:
            answers = answers or _Answers()
            works.append((answers.read, (operation.run, request)))
            continue
        writes = True
        if operation.now is not None:
            answers = answers or _Answers()
            works.append((answers.read, (operation.now, request)))
            continue
        if operation.run is not None:
            work: Work = operation.run, request
        else:
            assert isinstance(request, CommitAtomic), "the caller has asked is_groupable"
            work = partial(_carry_out_apart, request=request), transport.services
        works.append(work if call.key is None else _keyed(work, request, call.key, later if call.again else first))
    database, events = transport.services.database, []
    outcomes: list[Any]
    try:
        together = database.transact_async if writes else database.read_async
        outcomes, events = await together(_run_each, works, answers, wanted, tier=tier)
    except HoldfastError as error:
        outcomes = [error] * len(calls)
    if events:  # Whoever waits for an answer does not wait for this.
        asyncio.get_running_loop().call_soon(transport.services.publish, events)
    return outcomes


class _Answers:
    """Those to the reads of one group: only so many of them are in memory before somebody takes them."""

    __slots__ = ("_bytes",)

    def __init__(self) -> None:
        self._bytes = 0

    def read(self, tx: Transaction, work: Work) -> Any:
        run, request = work
        answer = run(tx, request)
        # Relays read mail and receipts all the time, and to encode them takes as long as to read them.
        if answer.__class__ is Mails:
            self._bytes += sum([len(mail.body) + _ENVELOPE_BYTES for mail in answer.mails])
        elif answer.__class__ is MailReceipts:
            self._bytes += len(answer.receipts) * _ENVELOPE_BYTES
        else:
            self._bytes += len(encode(answer))
        return answer

    def begin(self) -> None:
        """A transaction may be run again."""
        self._bytes = 0

    def are_many(self) -> bool:
        return self._bytes > GROUP_ANSWERS_BYTES


def _carry_out_apart(tx: Transaction, services: Any, request: CommitAtomic) -> Any:
    """Where many write and one is refused for the sake of another, that is no reason to run the group again."""
    return run_isolated(tx, partial(carry_out, request=request), services)


def _refuse(tx: Transaction, tier: Tier) -> None:
    del tx
    check_tier(tier)


def _keyed(work: Work, request: Request[Any], key: str, fresh: Fresh) -> Work:
    """The work, carried out once."""
    run, given = work

    def run_once(tx: Transaction, given: Any) -> Any:
        call = sending(key, request, fresh)
        return once(tx, call, partial(read_answer, request), run, given)

    return run_once, given


def _run_each(
    tx: Transaction, works: Sequence[Work], answers: _Answers | None, wanted: Callable[[], bool]
) -> tuple[list[Any], list[Any]]:
    # A call that is sent for the first time does not look for its key, so it must not run behind its own repetition.
    # That a connection ended is said before the next one of its client is heard, and transactions of an embedded store
    # run one at a time: this one either has its turn before the repetition, which then finds the key, or hears of the
    # end here, however long it stood in line. (Where stores are shared, nothing is taken for sent for the first time.)
    if not wanted():
        raise Closed("The connection ended before the call was begun; send it again")
    if answers is None:
        return run_batch(tx, works), tx.events
    answers.begin()
    return run_batch(tx, works, enough=answers.are_many), tx.events
