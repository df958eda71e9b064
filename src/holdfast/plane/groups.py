"""Calls that came together are committed together: one transaction, one sync, each call by itself all the same."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from holdfast.errors import Closed, DatabaseFailed, HoldfastError, UnsupportedTier
from holdfast.kv import Transaction
from holdfast.kv.groups import Work, run_group
from holdfast.kv.transact import check_tier
from holdfast.layers.once import once, sending
from holdfast.plane.atomic import carry_out
from holdfast.plane.execute import operation_of
from holdfast.tiers import Tier
from holdfast.wire.answers import decoder_of
from holdfast.wire.atomic import CommitAtomic
from holdfast.wire.frames import Call
from holdfast.wire.requests import Request


def is_groupable(request: Request[Any]) -> bool:
    """Whether a request is one transaction, and nothing else."""
    return operation_of(request).run is not None or isinstance(request, CommitAtomic)


def _always() -> bool:
    return True


async def call_group(port: Any, calls: Sequence[Call], wanted: Callable[[], bool] = _always) -> list[Any]:
    """The answer to each call, or the error that it raised. Only for calls that `is_groupable` says can share.

    They are not begun if they are not `wanted` any more when their turn comes: whoever sent them sends them again.
    """
    outcomes: dict[int, Any] = {call.number: _no_such_tier(call) for call in calls}
    reads = [call for call in calls if _reads_only(call)]
    for tier in (Tier.IMPORTANT, Tier.CRITICAL):
        await _reads(port, [call for call in reads if call.request.tier is tier], tier, outcomes, wanted)
        writes = [call for call in calls if call.request.tier is tier and not _reads_only(call)]
        await _writes(port, writes, tier, outcomes, wanted)
    return [outcomes[call.number] for call in calls]


async def _reads(
    port: Any, calls: Sequence[Call], tier: Tier, outcomes: dict[int, Any], wanted: Callable[[], bool]
) -> None:
    if calls:
        works = [_work(port, call.request) for call in calls]
        try:
            results = await port.parts.database.read_async(_read_each, works, wanted, tier=tier)
        except HoldfastError as error:
            results = [error] * len(calls)
        outcomes.update(zip((call.number for call in calls), results, strict=True))


async def _writes(
    port: Any, calls: Sequence[Call], tier: Tier, outcomes: dict[int, Any], wanted: Callable[[], bool]
) -> None:
    shared = port.parts.shared
    while calls:
        works = [_keyed(_work(port, call.request), call, shared) for call in calls]
        try:
            results, notes = await port.parts.database.transact_async(_write_each, works, wanted, tier=tier)
        except HoldfastError as error:
            results, notes = [error] * len(calls), []
        if notes:
            port.parts.tell(notes)
        outcomes.update(zip((call.number for call in calls), results, strict=False))
        calls = calls[len(results) :]


def _work(port: Any, request: Request[Any]) -> Work:
    if isinstance(request, CommitAtomic):
        return partial(carry_out, request=request), port.parts
    run = operation_of(request).run
    assert run is not None, "the caller has asked is_groupable"
    return run, request


def _keyed(work: Work, call: Call, shared: bool) -> Work:
    """The work, carried out once if its call has a key."""
    if call.key is None:
        return work
    run, given = work
    # Where several servers share the key space, another one may be at work on the first sending of a call.
    key, fresh = call.key, not call.again and not shared
    request, decode = call.request, decoder_of(call.request)

    def run_once(tx: Transaction, given: Any) -> Any:
        return once(tx, sending(key, request, fresh=fresh), lambda tx: run(tx, given), decode)

    return run_once, given


def _reads_only(call: Call) -> bool:
    request: Request[Any] = call.request
    return operation_of(request).reads_only


def _no_such_tier(call: Call) -> HoldfastError:
    """What is answered to a call that neither of the tiers of transactions carries out."""
    try:
        check_tier(call.request.tier)
    except UnsupportedTier as error:
        return error
    return DatabaseFailed("The call was not carried out; send it again")


def _write_each(tx: Transaction, works: Sequence[Work], wanted: Callable[[], bool]) -> tuple[list[Any], list[Any]]:
    # A call that is sent for the first time does not look for its key, so it must not run behind its own repetition.
    # That a connection ended is said before the next one of its client is heard, and transactions of an embedded store
    # run one at a time: this one either has its turn before the repetition, which then finds the key, or hears of the
    # end here, however long it stood in line. (Where stores are shared, nothing is taken for sent for the first time.)
    if not wanted():
        raise _unwanted()
    return run_group(tx, works), tx.notes


def _read_each(tx: Transaction, works: Sequence[Work], wanted: Callable[[], bool]) -> list[Any]:
    if not wanted():
        raise _unwanted()
    results: list[Any] = []
    for run, request in works:
        try:
            results.append(run(tx, request))
        except HoldfastError as error:
            results.append(error)
    return results


def _unwanted() -> Closed:
    return Closed("The connection ended before the call was begun; send it again")
