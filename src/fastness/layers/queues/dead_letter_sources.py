"""Which queues send their dead letters to a queue.

    (u, universe, "dead-letter-sources", dead letter queue, queue)  ->  empty

The policy of a queue names its dead letter queue. The index has those that name another one than `<queue>.dlq`. An
entry can outlive the policy that it was written for, so every entry is compared with the policy.
"""

from collections.abc import Sequence

from fastness.kv import Subspace, Transaction
from fastness.layers.queues.keys import QueueKey, keys_of
from fastness.layers.queues.policies import SUFFIX, dead_letter_queue, exists, policy_of
from fastness.layers.worlds import matching_elements
from fastness.wire.permissions import checked_queues, covers_queue
from fastness.wire.queues import QueuePolicy


def change(tx: Transaction, queue: QueueKey, earlier: QueuePolicy, policy: QueuePolicy) -> None:
    """Follow a change of a queue's policy."""
    if earlier.dead_letter_queue == policy.dead_letter_queue:
        return
    forget(tx, queue, earlier)
    if policy.dead_letter_queue is not None:
        tx.put(_of(queue.universe, policy.dead_letter_queue).key(queue.name), b"")


def forget(tx: Transaction, queue: QueueKey, policy: QueuePolicy) -> None:
    """Remove the entry of a queue with this policy."""
    if policy.dead_letter_queue is not None:
        tx.delete(_of(queue.universe, policy.dead_letter_queue).key(queue.name))


def sources(
    tx: Transaction, dead: QueueKey, *, after: str, limit: int, only: Sequence[str] = ()
) -> tuple[list[str], str | None]:
    """At most `limit` names of queues that send their dead letters to `dead`, and where to continue, or None.

    An entry may be outdated, so there may be fewer, and more after them. `only` limits it to these names and patterns:
    where to continue is one of these names, too.
    """
    index = _of(dead.universe, dead.name)
    if only:
        names = matching_elements(tx, index, checked_queues(only), after, limit)
    else:
        begin, end = index.range()
        pairs = tx.scan(index.key(after) + b"\x00" if after else begin, end, limit=limit)
        names = [str(index.unpack(key)[0]) for key, _ in pairs]
    last = names[-1] if len(names) == limit else None
    by_name = dead.name.removesuffix(SUFFIX)
    is_possible = dead.name.endswith(SUFFIX) and covers_queue(only, by_name)
    if is_possible and by_name > after and (last is None or by_name < last):
        names = sorted({*names, by_name})
    found = [name for name in names if name and _sends_to(tx, QueueKey(dead.universe, name), dead)]
    if len(found) > limit:
        found = found[:limit]
        last = found[-1]
    return found, last


def _sends_to(tx: Transaction, queue: QueueKey, dead: QueueKey) -> bool:
    policy = policy_of(tx, queue)
    return (
        policy.dead_letter_rule != "never" and dead_letter_queue(queue, policy) == dead and exists(tx, keys_of(queue))
    )


def _of(universe: str, dead: str) -> Subspace:
    return Subspace("u", universe, "dead-letter-sources", dead)
