"""The actions on queues: their attributes, tags and permissions, dead letters, and move tasks."""

import json
import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable, Mapping
from typing import Any, Final

from fastness.errors import InvalidName, QueueNotFound
from fastness.limits import (
    MOVE_TASK_RATE_MAX,
    MOVE_TASKS_LISTED_MAX,
    SQS_LIST_MAX,
    SQS_POLICY_ACTIONS_MAX,
    SQS_POLICY_STATEMENTS_MAX,
    SQS_POLICY_TRIES_MAX,
)
from fastness.names import checked_name
from fastness.server.sqs.caller import SqsCaller
from fastness.server.sqs.calls import authorize, execute
from fastness.server.sqs.errors import UNAVAILABLE, SqsError, missing_parameter
from fastness.server.sqs.messages import invalid_value
from fastness.server.sqs.queue_urls import (
    queue_arn,
    queue_at,
    queue_does_not_exist,
    queue_of_arn,
    queue_url,
    resource_not_found,
)
from fastness.server.sqs.settings_cache import SettingsCache
from fastness.server.sqs.shapes import ACTIONS
from fastness.server.transport import ServerTransport
from fastness.wire.requests import Answer, Request
from fastness.wire.sqs import (
    ATTRIBUTES,
    COMPUTED_ATTRIBUTES,
    CancelMoveTask,
    CreateSqsQueue,
    DeleteSqsQueue,
    GetSqsQueue,
    GetSqsSettings,
    ListMoveTasks,
    ListSqsQueues,
    ListSqsSources,
    MoveTask,
    PurgeSqsQueue,
    SetSqsAttributes,
    SqsQueue,
    SqsQueueNames,
    StartMoveTask,
    TagSqsQueue,
    UntagSqsQueue,
)

Parameters = Mapping[str, Any]
Output = dict[str, Any]
Statements = list[dict[str, Any]]

_ALL: Final = "All"
_SOURCE, _DESTINATION, _RATE = "SourceArn", "DestinationArn", "MaxNumberOfMessagesPerSecond"
_LABEL: Final = re.compile(r"[A-Za-z0-9_-]{1,80}\Z")
_ACCOUNT: Final = re.compile(r"[0-9]{12}\Z", re.ASCII)


class QueueActions:
    """Executes actions on queues."""

    def __init__(self, transport: ServerTransport, settings: SettingsCache) -> None:
        self._transport = transport
        self._settings = settings

    async def create_queue(self, caller: SqsCaller, parameters: Parameters) -> Output:
        name = parameters["QueueName"]
        request = CreateSqsQueue(name, parameters.get("Attributes", {}), parameters.get("tags", {}), caller.universe)
        await self._execute(caller, request)
        self._settings.forget(caller.universe, name)
        return {"QueueUrl": queue_url(caller, name)}

    async def get_queue_url(self, caller: SqsCaller, parameters: Parameters) -> Output:
        name, owner = parameters["QueueName"], parameters.get("QueueOwnerAWSAccountId")
        try:
            request = GetSqsQueue(checked_name("queue", name), universe=caller.universe)
        except InvalidName:
            raise queue_does_not_exist() from None
        authorize(caller, request)
        if owner is not None and owner != caller.account:
            raise queue_does_not_exist()
        await self._settings.get(caller.universe, name)
        return {"QueueUrl": queue_url(caller, name)}

    async def list_queues(self, caller: SqsCaller, parameters: Parameters) -> Output:
        limit, after = _page(parameters)
        prefix = parameters.get("QueueNamePrefix", "")
        request = ListSqsQueues(prefix, after, limit or SQS_LIST_MAX, caller.universe)
        try:
            found = await self._execute(caller, request)
        except InvalidName:  # No queue has a name that begins so.
            return {}
        output = _names(caller, "QueueUrls", found, limit)
        return output if output["QueueUrls"] or "NextToken" in output else {}

    async def get_queue_attributes(self, caller: SqsCaller, parameters: Parameters) -> Output:
        names = parameters.get("AttributeNames", ())
        for name in names:
            if name != _ALL and name not in ATTRIBUTES and name not in COMPUTED_ATTRIBUTES:
                raise SqsError("InvalidAttributeName", f"Unknown Attribute {name[:200]}.")
        found = (await self._get(caller, parameters)).attributes
        wanted = found if _ALL in names else {name: found[name] for name in names if name in found}
        return {"Attributes": wanted} if wanted else {}

    async def set_queue_attributes(self, caller: SqsCaller, parameters: Parameters) -> Output:
        queue = queue_at(caller, parameters["QueueUrl"])
        await self._set(caller, queue, parameters["Attributes"])
        return {}

    async def delete_queue(self, caller: SqsCaller, parameters: Parameters) -> Output:
        queue = queue_at(caller, parameters["QueueUrl"])
        try:
            await self._execute(caller, DeleteSqsQueue(queue, caller.universe))
        finally:
            self._settings.forget(caller.universe, queue)
        return {}

    async def purge_queue(self, caller: SqsCaller, parameters: Parameters) -> Output:
        queue = queue_at(caller, parameters["QueueUrl"])
        await self._execute(caller, PurgeSqsQueue(queue, caller.universe))
        return {}

    async def list_dead_letter_source_queues(self, caller: SqsCaller, parameters: Parameters) -> Output:
        queue = queue_at(caller, parameters["QueueUrl"])
        limit, after = _page(parameters)
        request = ListSqsSources(queue, after, limit or SQS_LIST_MAX, caller.universe)
        return _names(caller, "queueUrls", await self._execute(caller, request), limit)

    # Tags

    async def tag_queue(self, caller: SqsCaller, parameters: Parameters) -> Output:
        queue = queue_at(caller, parameters["QueueUrl"])
        await self._execute(caller, TagSqsQueue(queue, parameters["Tags"], caller.universe))
        return {}

    async def untag_queue(self, caller: SqsCaller, parameters: Parameters) -> Output:
        queue = queue_at(caller, parameters["QueueUrl"])
        await self._execute(caller, UntagSqsQueue(queue, parameters["TagKeys"], caller.universe))
        return {}

    async def list_queue_tags(self, caller: SqsCaller, parameters: Parameters) -> Output:
        tags = (await self._get(caller, parameters)).tags
        return {"Tags": tags} if tags else {}

    # Permissions are statements of the Policy attribute. They are kept, and have no effect: tokens decide.

    async def add_permission(self, caller: SqsCaller, parameters: Parameters) -> Output:
        queue, label = queue_at(caller, parameters["QueueUrl"]), parameters["Label"]
        statement = _statement(caller, queue, parameters)

        def added(statements: Statements) -> Statements:
            if any(each.get("Sid") == label for each in statements):
                raise invalid_value("Label", label, "Already exists.")
            if len(statements) >= SQS_POLICY_STATEMENTS_MAX:
                raise SqsError(
                    "OverLimit", f"A policy has at most {SQS_POLICY_STATEMENTS_MAX} statements; remove some."
                )
            return [*statements, statement]

        await self._change_statements(caller, queue, parameters, added)
        return {}

    async def remove_permission(self, caller: SqsCaller, parameters: Parameters) -> Output:
        queue, label = queue_at(caller, parameters["QueueUrl"]), parameters["Label"]

        def removed(statements: Statements) -> Statements:
            left = [each for each in statements if each.get("Sid") != label]
            if len(left) == len(statements):
                raise invalid_value("Label", label, "can't find label.")
            return left

        await self._change_statements(caller, queue, parameters, removed)
        return {}

    async def _change_statements(
        self, caller: SqsCaller, queue: str, parameters: Parameters, change: Callable[[Statements], Statements]
    ) -> None:
        """Change the statements of a queue's policy; again, if another call changes them meanwhile."""
        found = await self._get(caller, parameters)
        for _ in range(SQS_POLICY_TRIES_MAX):
            policy = _policy(found)
            wanted = _with_statements(queue, policy, change(policy["Statement"]))
            before = found.attributes.get("Policy", "")
            found = await self._set(caller, queue, {"Policy": wanted}, if_policy=before)
            if found.attributes.get("Policy", "") == wanted:
                return
        hint = f"Too many calls change the permissions of {queue} at once; try again"
        raise SqsError("ServiceUnavailable", UNAVAILABLE, hint=hint)

    # Move tasks

    async def start_message_move_task(self, caller: SqsCaller, parameters: Parameters) -> Output:
        source = queue_of_arn(caller, _SOURCE, parameters[_SOURCE])
        arn = parameters.get(_DESTINATION)
        destination = None if arn is None else queue_of_arn(caller, _DESTINATION, arn)
        per_second = parameters.get(_RATE)
        if per_second is not None and not 1 <= per_second <= MOVE_TASK_RATE_MAX:
            raise invalid_value(_RATE, per_second, f"Value must be between 1 and {MOVE_TASK_RATE_MAX}.")
        request = StartMoveTask(source, destination, per_second, caller.universe)
        try:
            task = await self._execute_task(caller, request)
        except SqsError as error:
            if not (await self._transport.call(GetSqsSettings(source, caller.universe))).exists:
                raise
            raise resource_not_found(_DESTINATION, error.hint) from None
        return {"TaskHandle": task.handle}

    async def list_message_move_tasks(self, caller: SqsCaller, parameters: Parameters) -> Output:
        source = queue_of_arn(caller, _SOURCE, parameters[_SOURCE])
        limit = parameters.get("MaxResults", 1)
        if not 1 <= limit <= MOVE_TASKS_LISTED_MAX:
            raise invalid_value("MaxResults", limit, f"Value must be between 1 and {MOVE_TASKS_LISTED_MAX}.")
        found = await self._execute_task(caller, ListMoveTasks(source, limit, caller.universe))
        return {"Results": [_task_entry(caller, task) for task in found.tasks]}

    async def cancel_message_move_task(self, caller: SqsCaller, parameters: Parameters) -> Output:
        task = await self._execute_task(caller, CancelMoveTask(parameters["TaskHandle"], caller.universe))
        return {"ApproximateNumberOfMessagesMoved": task.moved}

    async def _get(self, caller: SqsCaller, parameters: Parameters) -> SqsQueue:
        queue = queue_at(caller, parameters["QueueUrl"])
        prefix = queue_arn(caller, "").removesuffix(":")
        return await self._execute(caller, GetSqsQueue(queue, prefix, caller.universe))

    async def _set(
        self, caller: SqsCaller, queue: str, attributes: dict[str, str], *, if_policy: str | None = None
    ) -> SqsQueue:
        changed = await self._execute(caller, SetSqsAttributes(queue, attributes, caller.universe, if_policy))
        self._settings.forget(caller.universe, queue)
        return changed

    async def _execute(self, caller: SqsCaller, request: Request[Answer]) -> Answer:
        authorize(caller, request)
        return await execute(self._transport, caller, request)

    async def _execute_task(self, caller: SqsCaller, request: Request[Answer]) -> Answer:
        try:
            return await self._execute(caller, request)
        except QueueNotFound as error:  # The other actions name queues by URLs, and answer QueueDoesNotExist.
            raise resource_not_found(_SOURCE, str(error)) from None


def _page(parameters: Parameters) -> tuple[int | None, str]:
    """How many names a page has, if that is given, and the name after which it starts."""
    limit: int | None = parameters.get("MaxResults")
    if limit is not None and not 1 <= limit <= SQS_LIST_MAX:
        raise invalid_value("MaxResults", limit, f"MaxResults must be an integer between 1 and {SQS_LIST_MAX}.")
    token = parameters.get("NextToken")
    if token is None:
        return limit, ""
    try:
        return limit, checked_name("queue", urlsafe_b64decode(token.encode("ascii")).decode("ascii"))
    except (ValueError, InvalidName):
        raise invalid_value("NextToken", token, "Send the NextToken of the page before.") from None


def _names(caller: SqsCaller, member: str, found: SqsQueueNames, limit: int | None) -> Output:
    output: Output = {member: [queue_url(caller, name) for name in found.names]}
    if limit is not None and found.next is not None:  # As documented: without MaxResults there is no NextToken.
        output["NextToken"] = urlsafe_b64encode(found.next.encode()).decode()
    return output


def _policy(queue: SqsQueue) -> dict[str, Any]:
    """The Policy of a queue; a new one if it has none, or one without a list of statements."""
    text = queue.attributes.get("Policy", "")
    policy: Any = json.loads(text) if text else {}
    statements = policy.get("Statement", []) if isinstance(policy, dict) else []
    if isinstance(statements, dict):
        statements = [statements]  # A single statement may stand without a list.
    if not isinstance(statements, list):
        statements = []
    return {**policy, "Statement": [each for each in statements if isinstance(each, dict)]}


def _with_statements(queue: str, policy: dict[str, Any], statements: Statements) -> str:
    if not statements:
        return ""
    head = {"Version": "2012-10-17", "Id": f"{queue}/SQSDefaultPolicy"}
    return json.dumps({**head, **policy, "Statement": statements}, separators=(",", ":"))


def _statement(caller: SqsCaller, queue: str, parameters: Parameters) -> dict[str, Any]:
    label, accounts, actions = parameters["Label"], parameters["AWSAccountIds"], parameters["Actions"]
    if not _LABEL.match(label):
        raise invalid_value("Label", label, "It has 1 to 80 alphanumeric characters, hyphens and underscores.")
    if not accounts:
        raise invalid_value("PrincipalId", accounts, "Unable to verify.", hint="At least one account is needed.")
    for account in accounts:
        if not _ACCOUNT.match(account):
            raise invalid_value("PrincipalId", account, "Unable to verify.", hint="An account has 12 digits.")
    if not actions:
        raise missing_parameter("Actions")
    if len(actions) > SQS_POLICY_ACTIONS_MAX:
        raise SqsError("OverLimit", f"{len(actions)} Actions were found, maximum allowed is {SQS_POLICY_ACTIONS_MAX}.")
    for action in actions:
        if action != "*" and action not in ACTIONS:
            raise invalid_value(
                "ActionName", f"SQS:{action}", "Please refer to the appropriate WSDL for a list of valid actions. "
            )
    return {
        "Sid": label,
        "Effect": "Allow",
        "Principal": {"AWS": [f"arn:aws:iam::{account}:root" for account in accounts]},
        "Action": [f"SQS:{action}" for action in actions],
        "Resource": queue_arn(caller, queue),
    }


def _task_entry(caller: SqsCaller, task: MoveTask) -> Output:
    entry: Output = {
        "Status": task.status,
        "SourceArn": queue_arn(caller, task.source),
        "ApproximateNumberOfMessagesMoved": task.moved,
        "ApproximateNumberOfMessagesToMove": task.to_move,
        "StartedTimestamp": task.started_ms,
    }
    if task.status == "RUNNING":  # As documented: only of tasks that can be cancelled.
        entry["TaskHandle"] = task.handle
    if task.destination is not None:
        entry["DestinationArn"] = queue_arn(caller, task.destination)
    if task.per_second is not None:
        entry["MaxNumberOfMessagesPerSecond"] = task.per_second
    if task.reason is not None:
        entry["FailureReason"] = task.reason
    return entry
