"""Queue administration over HTTP. `messages.py` has the endpoints for messages."""

from typing import Final

from starlette.responses import Response

from fastness.server.http.endpoints import Endpoint, Parameter, json_response
from fastness.server.http.request_context import RequestContext
from fastness.server.problems import JSON, HttpError
from fastness.wire.fields import Limit, Name
from fastness.wire.queues import Deliveries, GetQueuePolicy, PeekMessages

_QUEUE: Final = "/v1/queues/{queue}"
_DEAD_LETTERS_DEFAULT: Final = 100


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
    Endpoint(
        method="GET",
        path=_QUEUE + "/dead-letters",
        tag="queues",
        summary="List the dead letters of a queue, with their failed attempts.",
        handle=_dead_letters,
        parameters=(
            Parameter("queue", "path", Name, required=True),
            Parameter("limit", "query", Limit),
            Parameter("universe", "query", Name),
        ),
        response_types={JSON: Deliveries},
    ),
)
