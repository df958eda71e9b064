"""The requests that a standby may serve, where the plane is opened with `read_from="standby"`.

They show what is stored, and nothing is decided by their answers. Everything else stays on the primary: what writes,
what waits, and what must be current, such as the check of a lease, the cursor of a world, a policy, a token, or the key
of an agent.
"""

from collections.abc import Iterable
from typing import Any, Final

from fastness.wire.agents import ListAgents
from fastness.wire.collections import ListCollections, ListPartitions
from fastness.wire.entities import GetEntity, ReadChanges, ScanEntities
from fastness.wire.leases import ListLeases
from fastness.wire.mail import CountMail, ListBlocks, ListMailboxes
from fastness.wire.queues import (
    GetKey,
    GetMessage,
    GetQueueStats,
    ListLeasedMessages,
    ListQueues,
    ListSchedules,
    PeekMessages,
    ReadQueueHistory,
    SearchMessages,
    SurveyQueues,
)
from fastness.wire.requests import Request
from fastness.wire.states import GetState
from fastness.wire.universes import ListUniverses
from fastness.wire.worlds import DescribeWorld, ListSegments, ListSnapshots, ListWorlds, SurveyWorlds

STALE_READS: Final[frozenset[type[Request[Any]]]] = frozenset(
    (
        CountMail,
        DescribeWorld,
        GetEntity,
        GetKey,
        GetMessage,
        GetQueueStats,
        GetState,
        ListAgents,
        ListBlocks,
        ListCollections,
        ListLeasedMessages,
        ListLeases,
        ListMailboxes,
        ListPartitions,
        ListQueues,
        ListSchedules,
        ListSegments,
        ListSnapshots,
        ListUniverses,
        ListWorlds,
        PeekMessages,
        ReadChanges,
        ReadQueueHistory,
        ScanEntities,
        SearchMessages,
        SurveyQueues,
        SurveyWorlds,
    )
)


def may_be_stale(requests: Iterable[Request[Any]]) -> bool:
    """Whether a standby may serve all of these requests."""
    return all(type(request) in STALE_READS for request in requests)
