"""Where messages are that cannot be found by their ids alone, one record for each.

    "l" | id  ->  "w" | group        blocked behind its group
                  "k" | key          ready or waiting, with a key
                  "l" | lease | position

Messages without job options that are ready or delayed need none: their keys follow from their ids and priorities.
"""

from typing import Final

from fastness.layers.queues.counters import QueueTransaction

IN_GROUP: Final = b"w"
WITH_KEY: Final = b"k"
LEASED: Final = b"l"


def set_group(queue_tx: QueueTransaction, id: bytes, group: str) -> None:
    queue_tx.tx.put(queue_tx.keys.locations + id, IN_GROUP + group.encode())


def set_key(queue_tx: QueueTransaction, id: bytes, key: str) -> None:
    queue_tx.tx.put(queue_tx.keys.locations + id, WITH_KEY + key.encode())


def set_lease(queue_tx: QueueTransaction, id: bytes, ref: bytes) -> None:
    queue_tx.tx.put(queue_tx.keys.locations + id, LEASED + ref)


def clear(queue_tx: QueueTransaction, id: bytes) -> None:
    queue_tx.tx.delete(queue_tx.keys.locations + id)


def find(queue_tx: QueueTransaction, id: bytes) -> tuple[bytes, bytes] | None:
    """The kind of a message's location, and the group, key or lease; None if it has none."""
    stored = queue_tx.tx.get(queue_tx.keys.locations + id)
    return None if stored is None else (stored[:1], stored[1:])
