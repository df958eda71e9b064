"""Queue administration over HTTP. `messages.py` has the endpoints for messages."""

from functools import partial
from typing import Any, Final

from starlette.responses import Response

from holdfast.server.http.endpoints import Endpoint, Parameter, json_response, operation
from holdfast.server.http.problems import JSON, HttpError
from holdfast.server.http.request_context import RequestContext
from holdfast.wire.queues import (
    Deliveries,
    GetQueuePolicy,
    GetQueueStats,
    ListQueues,
    ListSchedules,
    PauseQueue,
    PeekMessages,
    PurgeQueue,
    QueuePolicy,
    RedriveMessages,
    RemoveSchedule,
    SetQueuePolicy,
    SetSchedule,
    SurveyQueues,
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
    _operation("GET", "/v1/surveys/queues", SurveyQueues, "Summarize each queue."),
    _operation("GET", "/v1/queues", ListQueues, "List the names of queues, in order."),
    _operation("GET", _QUEUE, GetQueueStats, "Read the number of messages in each state."),
    _operation("GET", _QUEUE + "/policy", GetQueuePolicy, "Read the policy of a queue."),
    _operation(
        "PUT", _QUEUE + "/policy", SetQueuePolicy, "Set the policy of a queue.", prepare=_policy, body_type=QueuePolicy
    ),
    _operation("POST", _QUEUE + "/pause", PauseQueue, "Pause deliveries of a queue.", fixed={"paused": True}),
    _operation("POST", _QUEUE + "/resume", PauseQueue, "Resume deliveries of a queue.", fixed={"paused": False}),
    _operation("POST", _QUEUE + "/purge", PurgeQueue, "Remove all messages that are not leased."),
    _operation(
        "POST", _QUEUE + "/redrive", RedriveMessages, "Move dead letters back to the queue, all or the given ones."
    ),
    _operation("GET", _QUEUE + "/peek", PeekMessages, "Read ready messages without leasing them."),
    Endpoint(
        method="GET",
        path=_QUEUE + "/dead-letters",
        tag="queues",
        summary="List the dead letters of a queue, with their last errors.",
        handle=_dead_letters,
        parameters=(
            Parameter("queue", "path", required=True),
            Parameter("limit", "query", int),
            Parameter("universe", "query"),
        ),
        response_types={JSON: Deliveries},
    ),
    _operation("GET", _QUEUE + "/schedules", ListSchedules, "List the schedules of a queue."),
    _operation(
        "PUT",
        _QUEUE + "/schedules/{name}",
        SetSchedule,
        "Create or replace a schedule, which enqueues a message by a cron expression.",
    ),
    _operation("DELETE", _QUEUE + "/schedules/{name}", RemoveSchedule, "Remove a schedule."),
)
