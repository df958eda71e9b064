"""The settings of queues, as they were at most a second ago.

Every call that sends or receives messages needs them, and they hardly ever change. Whether the queue exists is checked
again in the transaction of the call. A node sees its own changes at once.
"""

from collections import OrderedDict
from collections.abc import Callable
from time import monotonic
from typing import Final

from fastness.limits import SQS_SETTINGS_CACHED_MAX, SQS_SETTINGS_CACHED_SECONDS
from fastness.server.sqs.queue_urls import queue_does_not_exist
from fastness.server.transport import ServerTransport
from fastness.wire.sqs import GetSqsSettings, SqsSettings

_Key = tuple[str, str]


class SettingsCache:
    """Reads the settings of queues, and remembers those of the queues that were used last."""

    def __init__(self, transport: ServerTransport, seconds: Callable[[], float] = monotonic) -> None:
        self._transport = transport
        self._seconds = seconds
        self._found: Final[OrderedDict[_Key, tuple[float, SqsSettings]]] = OrderedDict()
        self._changes = 0  # A read that began before a change is not remembered.

    async def get(self, universe: str, queue: str) -> SqsSettings:
        """The settings of a queue.

        Raises:
            SqsError: it does not exist. That is not remembered.
        """
        key, now = (universe, queue), self._seconds()
        found = self._found.get(key)
        if found is not None and now < found[0]:
            return found[1]
        changes = self._changes
        settings = await self._transport.call(GetSqsSettings(queue, universe))
        if not settings.exists:
            self._found.pop(key, None)
            raise queue_does_not_exist()
        if changes == self._changes:
            self._found[key] = (now + SQS_SETTINGS_CACHED_SECONDS, settings)
            self._found.move_to_end(key)
            if len(self._found) > SQS_SETTINGS_CACHED_MAX:
                self._found.popitem(last=False)
        return settings

    def forget(self, universe: str, queue: str) -> None:
        """Read the settings of a queue again: they have changed."""
        self._changes += 1
        self._found.pop((universe, queue), None)
