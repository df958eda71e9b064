"""The 23 actions of the SQS API, executed by requests to the plane.

    QueueActions     queues, attributes, tags, permissions, dead letters, move tasks
    MessageActions   messages, one by one and in batches

Every request is authorized as one of the caller, before anything is read of the queue.
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from fastness.server.context import ServerContext
from fastness.server.sqs.caller import SqsCaller
from fastness.server.sqs.message_actions import MessageActions
from fastness.server.sqs.queue_actions import QueueActions
from fastness.server.sqs.settings_cache import SettingsCache

_Execute = Callable[[SqsCaller, Mapping[str, Any]], Awaitable[dict[str, Any]]]


class SqsActions:
    """Executes the actions on the queues of a server."""

    def __init__(self, context: ServerContext) -> None:
        settings = SettingsCache(context.transport)
        queues = QueueActions(context.transport, settings)
        messages = MessageActions(context.transport, settings)
        self._actions: Final[Mapping[str, _Execute]] = {
            "AddPermission": queues.add_permission,
            "CancelMessageMoveTask": queues.cancel_message_move_task,
            "ChangeMessageVisibility": messages.change_message_visibility,
            "ChangeMessageVisibilityBatch": messages.change_message_visibility_batch,
            "CreateQueue": queues.create_queue,
            "DeleteMessage": messages.delete_message,
            "DeleteMessageBatch": messages.delete_message_batch,
            "DeleteQueue": queues.delete_queue,
            "GetQueueAttributes": queues.get_queue_attributes,
            "GetQueueUrl": queues.get_queue_url,
            "ListDeadLetterSourceQueues": queues.list_dead_letter_source_queues,
            "ListMessageMoveTasks": queues.list_message_move_tasks,
            "ListQueueTags": queues.list_queue_tags,
            "ListQueues": queues.list_queues,
            "PurgeQueue": queues.purge_queue,
            "ReceiveMessage": messages.receive_message,
            "RemovePermission": queues.remove_permission,
            "SendMessage": messages.send_message,
            "SendMessageBatch": messages.send_message_batch,
            "SetQueueAttributes": queues.set_queue_attributes,
            "StartMessageMoveTask": queues.start_message_move_task,
            "TagQueue": queues.tag_queue,
            "UntagQueue": queues.untag_queue,
        }

    async def call(self, caller: SqsCaller, action: str, parameters: dict[str, Any]) -> dict[str, Any]:
        """The output of an action.

        Raises:
            SqsError: the answer is this error.
            FastnessError: the answer is the error that `errors.sqs_error` makes of it.
        """
        return await self._actions[action](caller, parameters)
