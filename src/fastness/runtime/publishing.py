"""Publishes events: what happened in a transaction, once it is committed.

    tx.emit(event) ──► commit ──► database.publish ──► the subscribers of the event's class

The classes of events are defined by the layers that emit them, and `plane.services` subscribes to them.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, TypeVar

from fastness.kv import Event

AnEvent = TypeVar("AnEvent", bound=Event)

_log = logging.getLogger("fastness.activity")


class Publisher:
    """The subscribers by class of event."""

    def __init__(self) -> None:
        self._subscribers: defaultdict[type[Event], list[Callable[[list[Any]], None]]] = defaultdict(list)

    def subscribe(self, kind: type[AnEvent], subscriber: Callable[[list[AnEvent]], None]) -> None:
        """Call `subscriber` with the events of this class, in their order."""
        self._subscribers[kind].append(subscriber)

    def publish(self, events: Sequence[Event]) -> None:
        """Publish a committed transaction's events.

        A failure here is logged and not raised: the transaction is committed, and its caller must not repeat it.
        """
        for kind, group in groupby(events, type):
            found = list(group)
            for subscriber in self._subscribers[kind]:
                try:
                    subscriber(found)
                except Exception:
                    _log.exception("the events of a commit could not be published")
