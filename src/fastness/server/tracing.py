"""OpenTelemetry spans, if its API package is installed and a tracer provider is configured; otherwise a no-op.

The span of an HTTP request is a child of the caller's span, which `traceparent` names. Calls of a stream start their
own traces: a frame carries the calls of many callers, without their trace contexts.

Names and attributes follow OpenTelemetry's conventions for messaging: `send jobs`, `receive jobs`, `settle jobs`
for queues, and the operation's own name for everything else.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import lru_cache
from typing import Any, Final

from fastness.errors import FastnessError
from fastness.server.logs import RateLimitFilter
from fastness.wire.requests import Request

context: Any = None
propagate: Any = None
trace: Any = None
with suppress(ImportError):
    from opentelemetry import context, propagate, trace

_log = logging.getLogger("fastness.tracing")
_log.addFilter(RateLimitFilter(per_second=1))
_KINDS: Final = {  # Operation types of the conventions; ack, nack, reject and extend are "settle".
    "queues.put": "send",
    "queues.receive": "receive",
    "queues.ack": "settle",
    "queues.nack": "settle",
    "queues.reject": "settle",
    "queues.extend": "settle",
    "queues.change_visibility": "settle",
}


def is_on() -> bool:
    """Whether spans are exported. The API package alone, which many packages depend on, exports nothing."""
    return trace is not None and _has_provider(int(time.monotonic()))


@lru_cache(maxsize=1)
def _has_provider(second: int) -> bool:
    """Cached per `second`, because OpenTelemetry reads the environment to find its provider."""
    del second
    return not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)


def names_of(request: Request[Any]) -> tuple[str, dict[str, Any]]:
    """The span name of a request, and its attributes."""
    op = str(type(request).__struct_config__.tag)
    attributes: dict[str, Any] = {"fastness.operation": op}
    if (universe := getattr(request, "universe", None)) is not None:
        attributes["fastness.universe"] = universe
    queue = getattr(request, "queue", None)
    if queue is None:
        return op, attributes
    attributes |= {"messaging.system": "fastness", "messaging.destination.name": queue}
    kind = _KINDS.get(op)
    if kind is None:
        return f"{op} {queue}", attributes
    attributes |= {"messaging.operation.name": op.partition(".")[2], "messaging.operation.type": kind}
    items = getattr(request, "messages", None) or getattr(request, "leases", None)
    if items is not None and len(items) > 1:
        attributes["messaging.batch.message_count"] = len(items)
    return f"{kind} {queue}", attributes


@contextmanager
def caused_by(headers: Mapping[str, str]) -> Iterator[None]:
    """Make spans inside the `with` block children of the span that these headers name, if any."""
    if not is_on():
        yield
        return
    token = context.attach(propagate.extract(headers))
    try:
        yield
    finally:
        context.detach(token)


def span(request: Request[Any]) -> AbstractContextManager[None]:
    """A span around a request."""
    return _span(*names_of(request))


def batch_span(requests: Sequence[Request[Any]]) -> AbstractContextManager[None]:
    """One span around a batch of requests; a single request has the span of its operation."""
    if len(requests) == 1:
        return span(requests[0])
    return _span("commit", {"fastness.operation": "commit", "fastness.group.size": len(requests)})


@contextmanager
def _span(name: str, attributes: dict[str, Any]) -> Iterator[None]:
    if not is_on():
        yield
        return
    manager, current = _ignore_errors(_start_span, name, attributes) or (None, None)
    try:
        yield
    except BaseException as error:
        if isinstance(error, FastnessError) and current is not None:
            _ignore_errors(current.set_attribute, "error.type", error.code)
        if manager is not None:
            _ignore_errors(manager.__exit__, type(error), error, error.__traceback__)
        raise
    if manager is not None:
        _ignore_errors(manager.__exit__, None, None, None)


def _start_span(name: str, attributes: dict[str, Any]) -> tuple[Any, Any]:
    manager = trace.get_tracer("fastness").start_as_current_span(
        name, kind=trace.SpanKind.SERVER, attributes=attributes
    )
    return manager, manager.__enter__()


def _ignore_errors(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function of the telemetry and log its errors, which must not fail a request that may be committed."""
    try:
        return function(*args)
    except Exception:
        _log.exception("a span could not be recorded")
        return None
