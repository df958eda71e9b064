"""Spans for OpenTelemetry, if its API package is installed and somebody has set it up; nothing at all otherwise.

The span of what an HTTP request asks for is a child of the caller's, which `traceparent` names. Calls of a stream begin
traces of their own: a frame carries the calls of many callers, and says of none of them where it comes from.

Names and attributes are those of OpenTelemetry's conventions for messaging: `send jobs`, `receive jobs`, `settle jobs`
for queues, and the operation's own name for everything else.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import lru_cache
from typing import Any, Final

from holdfast.errors import HoldfastError
from holdfast.server.logs import Sparing
from holdfast.wire.requests import Request

context: Any = None
propagate: Any = None
trace: Any = None
with suppress(ImportError):
    from opentelemetry import context, propagate, trace

_log = logging.getLogger("holdfast.tracing")
_log.addFilter(Sparing(per_second=1))
_KINDS: Final = {  # What the conventions call a kind of operation; settling is what acknowledges or gives back.
    "queues.put": "send",
    "queues.receive": "receive",
    "queues.ack": "settle",
    "queues.nack": "settle",
    "queues.reject": "settle",
    "queues.extend": "settle",
}


def is_on() -> bool:
    """Whether there is anybody to tell of spans. Many packages bring the API along, which alone tells nobody."""
    return trace is not None and _is_set_up(int(time.monotonic()))


@lru_cache(maxsize=1)
def _is_set_up(second: int) -> bool:
    """Asked once in a `second`: to answer, OpenTelemetry looks into the environment."""
    del second
    return not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)


def names_of(request: Request[Any]) -> tuple[str, dict[str, Any]]:
    """The name of the span of a request, and its attributes."""
    op = str(type(request).__struct_config__.tag)
    attributes: dict[str, Any] = {"holdfast.operation": op}
    if (universe := getattr(request, "universe", None)) is not None:
        attributes["holdfast.universe"] = universe
    queue = getattr(request, "queue", None)
    if queue is None:
        return op, attributes
    attributes |= {"messaging.system": "holdfast", "messaging.destination.name": queue}
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
    """Spans that begin inside are children of the one that these headers name, if they name one."""
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


def group_span(requests: Sequence[Request[Any]]) -> AbstractContextManager[None]:
    """One span around requests that are committed together; a request that is alone has a span of its own."""
    if len(requests) == 1:
        return span(requests[0])
    return _span("commit", {"holdfast.operation": "commit", "holdfast.group.size": len(requests)})


@contextmanager
def _span(name: str, attributes: dict[str, Any]) -> Iterator[None]:
    if not is_on():
        yield
        return
    around, current = _quietly(_begun, name, attributes) or (None, None)
    try:
        yield
    except BaseException as error:
        if isinstance(error, HoldfastError) and current is not None:
            _quietly(current.set_attribute, "error.type", error.code)
        if around is not None:
            _quietly(around.__exit__, type(error), error, error.__traceback__)
        raise
    if around is not None:
        _quietly(around.__exit__, None, None, None)


def _begun(name: str, attributes: dict[str, Any]) -> tuple[Any, Any]:
    around = trace.get_tracer("holdfast").start_as_current_span(name, kind=trace.SpanKind.SERVER, attributes=attributes)
    return around, around.__enter__()


def _quietly(tell: Callable[..., Any], *args: Any) -> Any:
    """Telemetry that fails is a line in the log: what a span is of may be committed by then, and is no failure."""
    try:
        return tell(*args)
    except Exception:
        _log.exception("a span could not be told of")
        return None
