"""Handlers: the functions that execute requests, registered by the class of request that they take.

    @transaction    def put(tx, request)                one transaction over layers
    @service        def receive(stores, request, call)  more than one transaction: waiting, bodies, object stores
    @immediate      def log(stores, request, call)      an answer from memory, without waiting
    @best_effort_read  def get(stores, request)         a read that adds values of the session logs

A function names its request in its annotation. One that takes a `call` handles the idempotency key itself; for a
transaction the key is handled by the transport.
"""

from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Any, TypeVar

import msgspec

from fastness.errors import DiskFull
from fastness.kv import Transaction
from fastness.layers.quotas import quotas_of
from fastness.wire.requests import Request

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
    takes_call: bool = False  # `serve` or `immediate` takes a third argument, the keyed call.


HANDLERS: dict[type[Request[Any]], Handler] = {}
BEST_EFFORT_READS: dict[type[Request[Any]], Handler] = {}  # For requests of these classes with `best_effort` set.


def transaction(function: Function) -> Function:
    """Register a function over a transaction."""
    kind = _request_of(function)
    _register(kind, Handler(run=function, reads_only=kind.operation.reads))
    return function


def service(function: Function, *, run_without_waiting: Run | None = None) -> Function:
    """Register a function that does more than one transaction."""
    takes_call = "call" in signature(function).parameters
    handler = Handler(serve=function, run_without_waiting=run_without_waiting, takes_call=takes_call)
    _register(_request_of(function), handler)
    return function


def best_effort_read(function: Function) -> Function:
    """Register the function for requests with `best_effort` set; the others are transactions."""
    BEST_EFFORT_READS[_request_of(function)] = Handler(serve=function)
    return function


def immediate(function: Function) -> Function:
    """Register a function that answers from memory."""
    takes_call = "call" in signature(function).parameters
    _register(_request_of(function), Handler(immediate=function, takes_call=takes_call))
    return function


def _request_of(function: Callable[..., object]) -> type[Request[Any]]:
    kind: type[Request[Any]] = signature(function).parameters["request"].annotation
    return kind


def _register(kind: type[Request[Any]], handler: Handler) -> None:
    if kind in HANDLERS:
        raise ValueError(f"{kind.__name__} has a handler already")
    HANDLERS[kind] = _guarded(handler) if kind.operation.stores else handler


def _guarded(handler: Handler) -> Handler:
    """The handler of a request that adds data.

    It raises DiskFull while the disk is nearly full, and QuotaExceeded if its universe has no room for it.
    """
    run, serve, immediate = handler.run, handler.serve, handler.immediate
    assert handler.run_without_waiting is None, "no request that adds data can wait"
    return msgspec.structs.replace(
        handler,
        run=run and _guarded_run(run),
        serve=serve and _guarded_serve(serve),
        immediate=immediate and _guarded_serve(immediate),
    )


def _guarded_run(run: Run) -> Run:
    @wraps(run)
    def guarded(tx: Transaction, request: Any) -> Any:
        if tx.low_space:
            raise low_space_error()
        if tx.usage is None:
            return run(tx, request)
        quotas = quotas_of(tx)
        quotas.check_request(request)
        result = run(tx, request)
        quotas.check_written(tx, request)
        return result

    return guarded


def _guarded_serve(serve: Serve) -> Serve:
    @wraps(serve)
    def guarded(stores: Any, request: Any, *args: Any) -> Any:
        database = stores.services.database
        if database.low_space:
            raise low_space_error()
        if database.usage is not None:
            quotas_of(database).check_request(request)
        return serve(stores, request, *args)

    return guarded


def low_space_error() -> DiskFull:
    """The error of a write while the disk is nearly full."""
    return DiskFull(
        "The disk is nearly full (disk_reserve_bytes); nothing was written. Reads, acks and deletes still work: "
        "free some space, then try again. `fastness space` shows what is stored"
    )
