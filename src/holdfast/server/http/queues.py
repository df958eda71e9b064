"""Queues over HTTP: looking at them and running them. Messages themselves are in `messages.py`."""

from typing import Any, Final

from starlette.responses import Response

from holdfast.server.http.endpoints import Endpoint, Parameter, noun, rendered
from holdfast.server.http.problems import JSON, Refusal
from holdfast.server.http.request_context import Visit
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
)

_QUEUE: Final = "/v1/queues/{queue}"
_LETTERS: Final = 100


def _row(method: str, path: str, request: Any, summary: str, **options: Any) -> Endpoint:
    return noun(method, path, request, summary, of="queues", **options)


def _policy(visit: Visit, given: dict[str, Any]) -> None:
    """The body is the policy itself."""
    del visit
    given["policy"] = {name: given.pop(name) for name in list(given) if name not in ("queue", "universe", "tier")}


async def _dead_letters(visit: Visit) -> Response:
    """The dead letters of one queue, which are messages of another."""
    queue = str(visit.http.path_params["queue"]).lower()
    text = visit.http.query_params.get("limit", str(_LETTERS))
    if not text.isdecimal() or len(text) > 9:
        raise Refusal(400, "invalid_query", f"limit is {text[:80]!r}; give a number")
    policy = await visit.ask(GetQueuePolicy(queue, visit.universe))
    peek = PeekMessages(policy.dead_letter_queue or f"{queue}.dlq", int(text), visit.universe)
    letters = (await visit.ask(peek)).messages
    return rendered(Deliveries([letter for letter in letters if letter.origin == queue]))


ENDPOINTS: Final[tuple[Endpoint, ...]] = (
    _row("GET", "/v1/queues", ListQueues, "Names of queues, in order"),
    _row("GET", _QUEUE, GetQueueStats, "How many messages are in which state"),
    _row("GET", _QUEUE + "/policy", GetQueuePolicy, "What holds for messages that do not say otherwise"),
    _row("PUT", _QUEUE + "/policy", SetQueuePolicy, "Give a queue another policy", fill=_policy, takes=QueuePolicy),
    _row("POST", _QUEUE + "/pause", PauseQueue, "Deliver nothing until resumed", fixed={"paused": True}),
    _row("POST", _QUEUE + "/resume", PauseQueue, "Deliver again", fixed={"paused": False}),
    _row("POST", _QUEUE + "/purge", PurgeQueue, "Remove every message that nobody holds"),
    _row("POST", _QUEUE + "/redrive", RedriveMessages, "Put dead letters back, those named or all"),
    _row("GET", _QUEUE + "/peek", PeekMessages, "Messages that are ready; nothing is consumed"),
    Endpoint(
        method="GET",
        path=_QUEUE + "/dead-letters",
        noun="queues",
        summary="The dead letters of a queue, with the last error of each",
        handle=_dead_letters,
        parameters=(
            Parameter("queue", "path", required=True),
            Parameter("limit", "query", int),
            Parameter("universe", "query"),
        ),
        answers={JSON: Deliveries},
    ),
    _row("GET", _QUEUE + "/schedules", ListSchedules, "The schedules of a queue"),
    _row("PUT", _QUEUE + "/schedules/{name}", SetSchedule, "Put a message whenever a cron expression says so"),
    _row("DELETE", _QUEUE + "/schedules/{name}", RemoveSchedule, "Remove a schedule"),
)
