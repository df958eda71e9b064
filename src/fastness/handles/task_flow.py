"""What follows a step of a task: the messages to put and the documents of groups, without any call to a plane."""

from collections.abc import Callable
from typing import Any, Final, NamedTuple, Protocol

import msgspec

from fastness.errors import InvalidArgument
from fastness.handles.task_control import Reject
from fastness.limits import STATE_BYTES_MAX, TASK_GROUP_RESULT_BYTES_MIN
from fastness.wire.canonical import canonical
from fastness.wire.json_values import encode_json
from fastness.wire.queues import NewMessage
from fastness.wire.tasks import TASK_ATTRIBUTE, GroupDocument, Join, Step, TaskCall, TaskGroup, TaskMessage

_GROUP_MEMBER_BYTES: Final = 16  # Of a document, for the number of a member and the length of its result.
_JSON: Final = "application/json"
NO_RESULT: Final = object()


class RunningMessage(Protocol):
    """The message of a running task, received on a thread or on an event loop."""

    cancelled: bool

    @property
    def id(self) -> str: ...

    @property
    def queue(self) -> str: ...

    @property
    def attempts(self) -> int: ...


class RunnableTask(Protocol):
    """A task that a worker can run."""

    def received(self, args: list[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """The arguments as the function's annotations say.

        Raises:
            InvalidArgument: they do not fit.
        """
        ...

    def message_keys(self, args: list[Any], kwargs: dict[str, Any]) -> dict[str, str]:
        """The options `key` and `unique_key` that follow from arguments."""
        ...

    def run(self, message: RunningMessage, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Call the function, with this message as the current job."""
        ...

    async def run_async(self, message: RunningMessage, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Call the function without blocking the event loop."""
        ...


FindTask = Callable[[str], RunnableTask]


class NewTaskMessage(NamedTuple):
    """A message to put, and its queue."""

    queue: str
    message: NewMessage


class NewGroup(NamedTuple):
    """The state document of a group to create."""

    key: str
    document: GroupDocument


class Started(NamedTuple):
    """What starts a chain: its first message, or those of a group and the group's documents."""

    messages: list[NewTaskMessage]
    groups: list[NewGroup]


def start(
    steps: list[Step],
    *,
    new_id: Callable[[], str],
    find_task: FindTask,
    result: Any = NO_RESULT,
    join: Join | None = None,
    correlation_id: str | None = None,
) -> Started:
    """Start a chain after a step with `result`. The result of its last step goes to `join`.

    Raises:
        InvalidArgument: the results of a group of this size do not fit its document.
    """
    started = Started([], [])
    step, then = steps[0], steps[1:]
    if isinstance(step, TaskCall):
        body, options = _body_and_options(step, result, find_task)
        body = msgspec.structs.replace(body, then=then, join=join)
        options.setdefault("correlation_id", correlation_id)
        started.messages.append(NewTaskMessage(step.queue, _task_message(body, options)))
        return started
    key = None
    if then or join is not None:
        key = f"tasks/groups/{new_id()}"
        started.groups.append(NewGroup(key, _new_document(len(step.members), then, join, correlation_id)))
    for number, member in enumerate(step.members):
        first = start(
            member,
            new_id=new_id,
            find_task=find_task,
            result=result if step.takes_result else NO_RESULT,
            join=None if key is None else Join(key, number),
            correlation_id=correlation_id,
        )
        started.messages.extend(first.messages)
        started.groups.extend(first.groups)
    return started


def _task_message(body: TaskMessage, options: dict[str, Any]) -> NewMessage:
    """The message of a call."""
    attributes = {**options.get("attributes", {}), TASK_ATTRIBUTE: body.task}
    return NewMessage(payload=encode_json(body), **{"content_type": _JSON, **options, "attributes": attributes})


def decoded_body(payload: bytes) -> TaskMessage:
    """The body of a received message.

    Raises:
        Reject: it is not the body of a task message.
    """
    try:
        return msgspec.json.decode(payload, type=TaskMessage)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise Reject(f"The payload is not a call of a task ({error}); put it with `send` of a task") from None


def with_result(document: GroupDocument, member: int, result: Any) -> GroupDocument:
    """The document of a group with the result of one of its chains.

    Raises:
        Reject: the result is too large for it.
    """
    size = len(encode_json(result))
    if size > document.result_bytes_max:
        raise Reject(
            f"The result has {size} bytes, and {document.result_bytes_max} are kept of each member of this group; "
            "store it as a blob and return its hash"
        )
    return msgspec.structs.replace(document, results={**document.results, member: result})


def results_of(document: GroupDocument) -> list[Any]:
    """The results of a group, in the order of its members."""
    return [document.results[member] for member in range(document.members)]


def step_count(steps: list[Step]) -> int:
    """The number of calls and groups in a chain, with those that are put on failures."""
    count = len(steps)
    for step in steps:
        chains = step.members if isinstance(step, TaskGroup) else step.on_failure
        count += sum(map(step_count, chains))
    return count


def nesting_of(steps: list[Step]) -> int:
    """How deep chains are nested in a chain; 1 if it has no groups and nothing is put on failures."""
    inner = [
        nesting_of(chain)
        for step in steps
        for chain in (step.members if isinstance(step, TaskGroup) else step.on_failure)
    ]
    return 1 + max(inner, default=0)


def _body_and_options(call: TaskCall, result: Any, find_task: FindTask) -> tuple[TaskMessage, dict[str, Any]]:
    args, options = list(call.args), dict(call.options)
    if call.takes_result and result is not NO_RESULT:
        args.insert(0, result)
    if call.keys_from_result:
        options = {**find_task(call.task).message_keys(args, call.kwargs), **options}
    drops_result = not options.get("keep_result", False)
    return TaskMessage(call.task, args, call.kwargs, on_failure=call.on_failure, drops_result=drops_result), options


def _new_document(members: int, then: list[Step], join: Join | None, correlation_id: str | None) -> GroupDocument:
    document = GroupDocument(members, STATE_BYTES_MAX, then, join, correlation_id)
    left = STATE_BYTES_MAX - len(canonical(msgspec.to_builtins(document))) - members * _GROUP_MEMBER_BYTES
    if left < members * TASK_GROUP_RESULT_BYTES_MIN:
        raise InvalidArgument(
            f"The steps after a group of {members} leave no space for its results: they and the results have at most "
            f"{STATE_BYTES_MAX} bytes; pass large arguments as blobs"
        )
    return msgspec.structs.replace(document, result_bytes_max=left // members)
