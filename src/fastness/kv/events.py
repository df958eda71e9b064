"""Events: what happened in a transaction. They are published once it is committed."""

from collections.abc import Callable, Sequence

import msgspec


class Event(msgspec.Struct, frozen=True, gc=False):
    """A layer defines the classes of its events; `runtime.publishing` has their subscribers.

    The garbage collector does not visit events, of which many wait to be logged; so they must not be part of a cycle.
    """


Publish = Callable[[Sequence[Event]], None]


def discard(events: Sequence[Event]) -> None:
    """Publish to no subscriber."""
    del events
