"""Invalid input and use raise a typed error, and nothing is written."""

from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from typing import Any

from fastness import limits
from fastness.errors import (
    Closed,
    FastnessError,
    InvalidArgument,
    InvalidKey,
    InvalidValue,
    KeyTooLarge,
    NestedTransaction,
    NotSynchronous,
    TransactionEnded,
    TransactionTooLarge,
    UnsupportedTier,
    ValueTooLarge,
)
from fastness.kv import Database, Transaction
from fastness.testing.conformance.workloads import clear_subspace, contents, get, put, raises, run_async
from fastness.tiers import Tier


def check_a_function_that_raises_has_written_nothing(database: Database) -> None:
    subspace = clear_subspace(database)
    database.transact(put, subspace.key("kept"), b"1")

    def work(tx: Transaction) -> None:
        tx.put(subspace.key("a"), b"1")
        tx.delete_range(*subspace.range())
        raise LookupError("on purpose")

    raises(LookupError, lambda: database.transact(work))
    raises(LookupError, partial(run_async, database.transact_async, work))
    assert contents(database, subspace) == {("kept",): b"1"}


def check_oversized_and_mistyped_input_is_refused(database: Database) -> None:
    subspace = clear_subspace(database)
    key = subspace.key("a")
    long_key = subspace.prefix + bytes(limits.KEY_BYTES_MAX)
    wrong: list[tuple[type[FastnessError], Callable[[Transaction], Any]]] = [
        (KeyTooLarge, lambda tx: tx.put(long_key, b"")),
        (KeyTooLarge, lambda tx: tx.delete(long_key)),
        (ValueTooLarge, lambda tx: tx.put(key, bytes(limits.VALUE_BYTES_MAX + 1))),
        (InvalidKey, lambda tx: tx.put("text", b"")),  # type: ignore[arg-type]
        (InvalidKey, lambda tx: tx.put(b"", b"")),
        (InvalidKey, lambda tx: tx.get("text")),  # type: ignore[arg-type]
        (InvalidKey, lambda tx: tx.get(bytearray(b"a"))),  # type: ignore[arg-type]
        (InvalidKey, lambda tx: tx.scan("a", b"b", limit=1)),  # type: ignore[arg-type]
        (InvalidKey, lambda tx: tx.delete_range(b"a", None)),  # type: ignore[arg-type]
        (InvalidValue, lambda tx: tx.put(key, "text")),  # type: ignore[arg-type]
        (InvalidArgument, lambda tx: tx.scan(b"b", b"a", limit=1)),
        (InvalidArgument, lambda tx: tx.delete_range(b"b", b"a")),
        (InvalidArgument, lambda tx: tx.scan(b"a", b"b", limit=0)),
        (InvalidArgument, lambda tx: tx.scan(b"a", b"b", limit=limits.SCAN_ITEMS_MAX + 1)),
    ]
    for error, misuse in wrong:

        def work(tx: Transaction, misuse: Callable[[Transaction], Any] = misuse) -> None:
            tx.put(subspace.key("before"), b"1")
            misuse(tx)

        raises(error, partial(database.transact, work))
    assert contents(database, subspace) == {}


def check_a_transaction_that_writes_too_much_is_refused(database: Database) -> None:
    subspace = clear_subspace(database)

    def too_many_bytes(tx: Transaction) -> None:
        for number in range(limits.TRANSACTION_BYTES_MAX // limits.VALUE_BYTES_MAX + 1):
            tx.put(subspace.key(number), bytes(limits.VALUE_BYTES_MAX))

    def too_many_keys(tx: Transaction) -> None:
        for number in range(limits.TRANSACTION_BYTES_MAX // limits.WRITE_COST_BYTES):
            tx.put(b"%d" % number, b"")

    raises(TransactionTooLarge, lambda: database.transact(too_many_bytes))
    raises(TransactionTooLarge, lambda: database.transact(too_many_keys))
    assert contents(database, subspace) == {}


def check_transactions_do_not_nest(database: Database) -> None:
    subspace = clear_subspace(database)

    def outer(tx: Transaction, inner: Callable[[], Any]) -> None:
        tx.put(subspace.key("a"), b"1")
        inner()

    for inner in (lambda: database.transact(get, b"a"), lambda: database.read(get, b"a"), database.close):
        raises(NestedTransaction, partial(database.transact, outer, inner))
        raises(NestedTransaction, partial(run_async, database.transact_async, outer, inner))
    assert contents(database, subspace) == {}


def check_an_ended_transaction_refuses_use(database: Database) -> None:
    subspace = clear_subspace(database)
    kept = [database.transact(lambda tx: tx), database.read(lambda tx: tx)]
    uses: list[Callable[[Transaction], Any]] = [
        lambda tx: tx.get(subspace.key("a")),
        lambda tx: tx.put(subspace.key("a"), b""),
        lambda tx: tx.delete(subspace.key("a")),
        lambda tx: tx.scan(*subspace.range(), limit=1),
        lambda tx: tx.delete_range(*subspace.range()),
        lambda tx: tx.now_ms,
        lambda tx: tx.new_id(),
    ]
    for tx in kept:
        for use in uses:
            raises(TransactionEnded, partial(use, tx))


def check_asynchronous_work_is_refused(database: Database) -> None:
    subspace = clear_subspace(database)

    async def coroutine(tx: Transaction) -> None:
        tx.put(subspace.key("a"), b"1")

    def generator(tx: Transaction) -> Iterator[None]:
        tx.put(subspace.key("a"), b"1")
        yield

    async def asynchronous_generator(tx: Transaction) -> AsyncIterator[None]:
        tx.put(subspace.key("a"), b"1")
        yield

    for work in (coroutine, generator, asynchronous_generator):
        raises(NotSynchronous, partial(database.transact, work))
        raises(NotSynchronous, partial(database.read, work))
    assert contents(database, subspace) == {}


def check_an_unsupported_tier_is_refused(database: Database) -> None:
    subspace = clear_subspace(database)
    wrong: list[Any] = [Tier.BEST_EFFORT, "critical", None]
    for tier in wrong:
        raises(UnsupportedTier, partial(database.transact, put, subspace.key("a"), b"1", tier=tier))
        raises(UnsupportedTier, partial(database.read, get, subspace.key("a"), tier=tier))
    assert contents(database, subspace) == {}


def check_a_closed_database_refuses_use(database: Database) -> None:
    subspace = clear_subspace(database)
    watch = database.watch(subspace.prefix)
    database.transact(put, subspace.key("a"), b"1", tier=Tier.IMPORTANT)
    database.close()
    database.close()
    raises(Closed, lambda: database.transact(get, b"a"))
    raises(Closed, lambda: database.read(get, b"a"))
    raises(Closed, partial(run_async, database.transact_async, get, b"a"))
    raises(Closed, partial(run_async, database.read_async, get, b"a"))
    raises(Closed, lambda: database.watch(b"a"))
    raises(Closed, database.sync)
    raises(Closed, lambda: watch.wait(0))
