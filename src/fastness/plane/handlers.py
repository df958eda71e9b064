"""Handlers: the functions that execute requests, registered by the class of request that they take.

    @transaction    def put(tx, request)                one transaction over layers
    @service        def receive(stores, request, call)  more than one transaction: waiting, bodies, object stores
    @immediate      def log(stores, request, call)      an answer from memory, without waiting
    @best_effort_read  def get(stores, request)         a read that adds values of the session logs

A function names its request in its annotation. One that takes a `call` handles the idempotency key itself; for a
transaction the executor does.
"""

from collections.abc import Callable
from inspect import signature
from typing import Any, TypeVar

import msgspec

from fastness.errors import DiskFull
from fastness.kv import Transaction
from fastness.layers.quotas import quotas_of
from fastness.wire.requests import Answer, Request

Function = TypeVar("Function", bound=Callable[..., object])
Serve = Callable[..., Any]  # A handler that takes the stores.
Run = Callable[[Transaction, Any], Any]  # A handler of one class of requests, which the table does not distinguish.


class Handler(msgspec.Struct, frozen=True):
    """How a class of requests is executed: exactly one of `run`, `serve` and `immediate`."""

    run: Run | None = None
    serve: Serve | None = None  # Takes the stores; returns an awaitable on an event loop.
    immediate: Serve | None = None  # Takes the stores.
    run_without_waiting: Run | None = None  # Does all of `serve` if the call never waits.
    reads_only: bool = False  # `run` takes a snapshot.
    stores: bool = False  # It adds data: it is refused while there is no room.
    takes_call: bool = False  # `serve` or `immediate` takes a third argument, the keyed call.


HANDLERS: dict[type[Request[Any]], Handler] = {}
BEST_EFFORT_READS: dict[type[Request[Any]], Handler] = {}  # For requests of these classes with `best_effort` set.


def transaction(function: Function) -> Function:
    """Register a function over a transaction."""
    kind = _request_of(function)
    _register(kind, Handler(run=function, reads_only=kind.operation.reads, stores=kind.operation.stores))
    return function


def service(function: Function, *, run_without_waiting: Run | None = None) -> Function:
    """Register a function that does more than one transaction."""
    kind = _request_of(function)
    assert not (run_without_waiting and kind.operation.stores), "no request that adds data can wait"
    takes_call = "call" in signature(function).parameters
    stores = kind.operation.stores
    handler = Handler(serve=function, run_without_waiting=run_without_waiting, takes_call=takes_call, stores=stores)
    _register(kind, handler)
    return function


def best_effort_read(function: Function) -> Function:
    """Register the function for requests with `best_effort` set; the others are transactions."""
    BEST_EFFORT_READS[_request_of(function)] = Handler(serve=function)
    return function


def immediate(function: Function) -> Function:
    """Register a function that answers from memory."""
    kind = _request_of(function)
    takes_call = "call" in signature(function).parameters
    _register(kind, Handler(immediate=function, takes_call=takes_call, stores=kind.operation.stores))
    return function


def _request_of(function: Callable[..., object]) -> type[Request[Any]]:
    kind: type[Request[Any]] = signature(function).parameters["request"].annotation
    return kind


def _register(kind: type[Request[Any]], handler: Handler) -> None:
    if kind in HANDLERS:
        raise ValueError(f"{kind.__name__} has a handler already")
    HANDLERS[kind] = handler


def run_guarded(tx: Transaction, handler: Handler, request: Request[Answer]) -> Answer:
    """Run the handler of a request that is one transaction, between the guards of requests that add data.

    Raises:
        DiskFull: the disk is nearly full.
        QuotaExceeded: the universe has no room for the data.
    """
    run = handler.run
    assert run is not None, "the caller has checked that it is one transaction"
    answer: Answer
    if not handler.stores:
        answer = run(tx, request)
        return answer
    if tx.low_space:
        raise low_space_error()
    quotas = None if tx.usage is None else quotas_of(tx)
    if quotas is not None:
        quotas.check_request(request)
    answer = run(tx, request)
    if quotas is not None:
        quotas.check_written(tx, request)
    return answer


def low_space_error() -> DiskFull:
    """The error of a write while the disk is nearly full."""
    return DiskFull(
        "The disk is nearly full (disk_reserve_bytes); nothing was written. Reads, acks and deletes still work: "
        "free some space, then try again. `fastness space` shows what is stored"
    )
