"""Queue administration over HTTP. `messages.py` has the endpoints for messages."""

from functools import partial
from typing import Any, Final

from starlette.responses import Response

from holdfast.server.http.endpoints import Endpoint, Parameter, json_response, operation
from holdfast.server.http.request_context import RequestContext
from holdfast.server.problems import JSON, HttpError
from holdfast.wire.queues import (
    Deliveries,
    GetQueuePolicy,
    PeekMessages,
    QueuePolicy,
    SetQueuePolicy,
)

_QUEUE: Final = "/v1/queues/{queue}"
_DEAD_LETTERS_DEFAULT: Final = 100


_operation: Final = partial(operation, tag="queues")


def _policy(context: RequestContext, given: dict[str, Any]) -> None:
    """The body is the policy itself."""
    del context
    given["policy"] = {name: given.pop(name) for name in list(given) if name not in ("queue", "universe", "tier")}


async def _dead_letters(context: RequestContext) -> Response:
    """Dead letters are messages of another queue, which queues may share."""
    queue = str(context.request.path_params["queue"])
    text = context.request.query_params.get("limit", str(_DEAD_LETTERS_DEFAULT))
    if not text.isdecimal() or len(text) > 9:
        raise HttpError(400, "invalid_query", f"limit is {text[:80]!r}; use a number")
    policy = await context.call(GetQueuePolicy(queue, context.universe))
    peek = PeekMessages(policy.dead_letter_queue or f"{queue}.dlq", int(text), context.universe)
    letters = (await context.call(peek)).messages
    return json_response(Deliveries([letter for letter in letters if letter.origin == queue]))


ENDPOINTS: Final[tuple[Endpoint, ...]] = (
    _operation(
        "PUT", _QUEUE + "/policy", SetQueuePolicy, "Set the policy of a queue.", prepare=_policy, body_type=QueuePolicy
    ),
    Endpoint(
        method="GET",
        path=_QUEUE + "/dead-letters",
        tag="queues",
        summary="List the dead letters of a queue, with their failed attempts.",
        handle=_dead_letters,
        parameters=(
            Parameter("queue", "path", required=True),
            Parameter("limit", "query", int),
            Parameter("universe", "query"),
        ),
        response_types={JSON: Deliveries},
    ),
)
