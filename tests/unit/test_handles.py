"""Planes and their handles, synchronous and asynchronous."""

import gc
import importlib
import inspect
import pkgutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import fastness
from fastness import AsyncPlane, Plane, Tier, Transaction, handles
from fastness.errors import Closed, InvalidArgument, NestedTransaction, UnsupportedTier
from tests.support.failures import Failures

ASYNC = [
    handle
    for module in pkgutil.iter_modules(handles.__path__)
    if module.name not in ("push_listening", "sync", "workers")  # They are not generated.
    for name, handle in vars(importlib.import_module(f"fastness.handles.{module.name}")).items()
    if name.startswith("Async") and handle.__module__ == f"fastness.handles.{module.name}"
]
FOR_ASYNCIO = {"__enter__": "__aenter__", "__exit__": "__aexit__", "__iter__": "__aiter__", "__next__": "__anext__"}


# These only create a handle or use memory, so there is nothing to await.
WAITS_FOR_NOTHING = {
    "AsyncAtomic._add",
    "AsyncAtomic.ack",
    "AsyncAtomic.confirm",
    "AsyncAtomic.rows",
    "AsyncAtomic.send",
    "AsyncMailbox.__iter__",
    "AsyncMailbox._fault",
    "AsyncMailbox._marked",
    "AsyncMailbox._opened",
    "AsyncMailbox._own_key",
    "AsyncMailbox._unsealed",
    "AsyncMailbox.subscribe",
    "AsyncPlane.collection",
    "AsyncPlane.mailbox",
    "AsyncPlane.within",
    "AsyncWithin.collection",
    "AsyncWithin.mailbox",
    "AsyncWithin.queue",
    "AsyncWithin.state",
    "AsyncWithin.world",
    "AsyncWorkflows.get",
    "AsyncAtomic.append",
    "AsyncAtomic.check",
    "AsyncAtomic.deliver",
    "AsyncAtomic.nack",
    "AsyncAtomic.put",
    "AsyncAtomic.put_many",
    "AsyncAtomic.reject",
    "AsyncAtomic.remove",
    "AsyncAtomic.signal_run",
    "AsyncAtomic.start_run",
    "AsyncAtomic.update",
    "AsyncSharedLock._find_loss",
    "AsyncSharedLock.check",
    "AsyncAtomic.write",
    "AsyncEffectClaim.json",
    "AsyncEffects.claimed",
    "AsyncLease._find_loss",
    "AsyncLease._stop_renewal",
    "AsyncLeaseKey.held",
    "AsyncMessage._check_received_here",
    "AsyncMessage._content",
    "AsyncMessage._sidecar",
    "AsyncMessage.collection",
    "AsyncMessage.json",
    "AsyncMessage.mark_lost",
    "AsyncMessage.mark_refused",
    "AsyncMessage.mark_settled",
    "AsyncMessage.raise_if_cancelled",
    "AsyncPlane.atomic",
    "AsyncPlane.queue",
    "AsyncQueue._checked_messages",
    "AsyncQueue.held",
    "AsyncQueue.subscribe",
    "AsyncEntities.transaction",
    "AsyncIngress.watch",
    "AsyncPushListener.stop",
    "AsyncPushWatch.__iter__",
    "AsyncPushWatch.filtered",
    "AsyncPlane.lease",
    "AsyncPlane.state",
    "AsyncPlane.world",
    "AsyncTieredTransaction.remove",
    "AsyncTieredTransaction.write",
}


def twin_of(handle: type) -> type:
    module = importlib.import_module(handle.__module__.replace("handles.", "handles.sync."))
    twin: type = vars(module)[handle.__name__.removeprefix("Async")]
    return twin


def methods(handle: type) -> dict[str, Any]:
    return {name: part for name, part in vars(handle).items() if inspect.isfunction(part)}


def as_sync(function: Any) -> str:
    """A signature with synchronous types."""
    return str(inspect.signature(function)).replace("Async", "").replace("handles.sync.", "handles.")


def test_sync_and_async_handles_have_the_same_methods() -> None:
    failures = Failures()
    for handle in ASYNC:
        with failures.of(handle):
            twins = {FOR_ASYNCIO.get(name, name) for name in methods(twin_of(handle))}
            assert set(methods(handle)) == twins
    failures.check()


def test_sync_and_async_methods_have_the_same_signature() -> None:
    failures = Failures()
    for handle in ASYNC:
        with failures.of(handle):
            for name, twin in methods(twin_of(handle)).items():
                method = methods(handle)[FOR_ASYNCIO.get(name, name)]
                assert as_sync(method) == as_sync(twin), name
                assert method.__doc__ == twin.__doc__, name
                assert not inspect.iscoroutinefunction(twin), name
                waits = f"{handle.__name__}.{name}" not in WAITS_FOR_NOTHING and name not in (
                    "__init__",
                    "__repr__",
                    "_table",
                )
                assert inspect.iscoroutinefunction(method) == waits, name
    failures.check()


@pytest.fixture(params=["memory", "dir"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return "memory:" if request.param == "memory" else f"dir:{tmp_path}"


@pytest.fixture
def plane(url: str) -> Iterator[Plane]:
    with fastness.open(url) as plane:
        yield plane


TIERS = [Tier.CRITICAL, Tier.IMPORTANT]


@pytest.mark.parametrize("tier", TIERS)
def test_pairs_are_written_read_scanned_and_deleted(plane: Plane, tier: Tier) -> None:
    pairs = plane.pairs
    assert pairs.get(b"a", tier=tier) is None
    assert [pairs.put(key, b"1", tier=tier) for key in (b"a", b"b", b"c")] == [tier] * 3
    assert pairs.get(b"a", tier=tier) == b"1"
    assert pairs.scan(b"a", b"c") == [(b"a", b"1"), (b"b", b"1")]
    assert pairs.scan(b"a", b"z", limit=2, reverse=True, tier=tier) == [(b"c", b"1"), (b"b", b"1")]
    assert pairs.delete(b"b", tier=tier) is tier
    assert pairs.scan(b"a", b"z") == [(b"a", b"1"), (b"c", b"1")]


@pytest.mark.parametrize("tier", TIERS)
async def test_pairs_are_written_read_scanned_and_deleted_asynchronously(url: str, tier: Tier) -> None:
    async with fastness.open_async(url) as plane:
        pairs = plane.pairs
        assert await pairs.get(b"a", tier=tier) is None
        assert [await pairs.put(key, b"1", tier=tier) for key in (b"a", b"b", b"c")] == [tier] * 3
        assert await pairs.get(b"a", tier=tier) == b"1"
        assert await pairs.scan(b"a", b"c") == [(b"a", b"1"), (b"b", b"1")]
        assert await pairs.scan(b"a", b"z", limit=2, reverse=True, tier=tier) == [(b"c", b"1"), (b"b", b"1")]
        assert await pairs.delete(b"b", tier=tier) is tier
        assert await pairs.scan(b"a", b"z") == [(b"a", b"1"), (b"c", b"1")]


def move(tx: Transaction, origin: bytes, *, to: bytes) -> bytes:
    value = tx.get(origin)
    assert value is not None
    tx.put(to, value)
    tx.delete(origin)
    return value


def test_a_plane_transacts_with_arguments_and_a_result(plane: Plane) -> None:
    plane.pairs.put(b"a", b"1")
    assert plane.transact(move, b"a", to=b"b", tier=Tier.IMPORTANT) == b"1"
    assert plane.pairs.scan(b"a", b"z") == [(b"b", b"1")]


async def test_a_plane_transacts_asynchronously(url: str) -> None:
    async with fastness.open_async(url) as plane:
        await plane.pairs.put(b"a", b"1")
        assert await plane.transact(move, b"a", to=b"b", tier=Tier.IMPORTANT) == b"1"
        assert await plane.pairs.scan(b"a", b"z") == [(b"b", b"1")]


def test_an_argument_may_be_called_work(plane: Plane) -> None:
    assert plane.transact(lambda tx, *, work, self: (work, self), work=1, self=2) == (1, 2)


def test_a_function_that_raises_has_written_nothing(plane: Plane) -> None:
    def fail(tx: Transaction) -> None:
        tx.put(b"a", b"1")
        raise LookupError("on purpose")

    with pytest.raises(LookupError):
        plane.transact(fail)
    assert plane.pairs.get(b"a") is None


@pytest.mark.parametrize(
    "inside",
    [
        lambda plane: plane.transact(move, b"a", to=b"b"),
        lambda plane: plane.pairs.get(b"a"),
        lambda plane: plane.pairs.put(b"a", b"1"),
        lambda plane: plane.close(),
    ],
    ids=["transact", "get", "put", "close"],
)
def test_a_handle_inside_a_transaction_of_its_plane_is_refused(plane: Plane, inside: Any) -> None:
    with pytest.raises(NestedTransaction):
        plane.transact(lambda tx: inside(plane))
    assert plane.pairs.get(b"a") is None


def test_a_handle_raises_the_errors_of_the_plane(plane: Plane) -> None:
    with pytest.raises(UnsupportedTier):
        plane.pairs.put(b"a", b"1", tier=Tier.BEST_EFFORT)
    with pytest.raises(InvalidArgument):
        plane.pairs.scan(b"a", b"z", limit=0)


USES: list[Callable[[Any], Any]] = [
    lambda plane: plane.transact(Transaction.get, b"a"),
    lambda plane: plane.pairs.get(b"a"),
    lambda plane: plane.pairs.scan(b"a", b"b"),
    lambda plane: plane.pairs.put(b"a", b"1"),
    lambda plane: plane.pairs.delete(b"a"),
]


def test_leaving_the_context_closes_the_plane(url: str) -> None:
    with fastness.open(url) as plane:
        pass
    plane.close()
    for use in USES:
        with pytest.raises(Closed):
            use(plane)


async def test_leaving_the_async_context_closes_the_plane(url: str) -> None:
    async with fastness.open_async(url) as plane:
        pass
    await plane.close()
    for use in USES:
        with pytest.raises(Closed):
            await use(plane)


def test_a_context_that_raises_closes_the_plane(url: str) -> None:
    with pytest.raises(LookupError), fastness.open(url) as plane:
        raise LookupError("on purpose")
    with pytest.raises(Closed):
        plane.pairs.get(b"a")


async def test_an_opening_is_awaited_or_entered(url: str) -> None:
    plane = await fastness.open_async(url)
    assert isinstance(plane, AsyncPlane)
    await plane.close()
    async with await fastness.open_async(url) as plane:
        await plane.pairs.put(b"a", b"1")
    async with fastness.open_async(url) as plane:
        assert isinstance(plane, AsyncPlane)
    with pytest.raises(Closed):
        await plane.pairs.get(b"a")


async def test_an_opening_that_is_used_leaves_no_warning(url: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        async with fastness.open_async(url):
            pass
        await (await fastness.open_async(url)).close()
        gc.collect()
    assert [str(warning.message) for warning in caught] == []


def test_one_item_in_place_of_a_list_is_refused(plane: Plane) -> None:
    failures = Failures()
    calls: list[tuple[Callable[[Plane, Any], object], str]] = [
        (lambda plane, one: plane.mailbox("ada").send_many(one), r"wrap it in a list: send_many\("),
        (lambda plane, one: plane.mailbox("ada").confirm(one), "give an id, or a list of them"),
        (lambda plane, one: plane.activity.log_many("s", one), r"call log\(session, record\)"),
        (lambda plane, one: plane.blobs.write(one), r"call put\(data\)"),
        (lambda plane, one: plane.queue("jobs").redrive(one), r"wrap it in a list: redrive\("),
        (lambda plane, one: plane.tokens.create("t", universes="*", verbs=one), "give a list, or text with commas"),
    ]
    for call, instead in calls:
        for one in [{"a": 1}, b"bytes", 5]:
            with failures.of((call, instead, one)):
                before = plane.pairs.scan(b"", b"\xff")
                with pytest.raises(InvalidArgument, match=instead):
                    call(plane, one)
                assert plane.pairs.scan(b"", b"\xff") == before
    failures.check()


@pytest.mark.parametrize("one", [b"bytes", "text"])
async def test_one_item_in_place_of_a_list_is_refused_asynchronously(url: str, one: Any) -> None:
    async with fastness.open_async(url) as plane:
        with pytest.raises(InvalidArgument, match=r"call put\(data\)"):
            await plane.blobs.write(one)
        with pytest.raises(InvalidArgument, match=r"wrap it in a list: send_many\("):
            await plane.mailbox("ada").send_many(one)
