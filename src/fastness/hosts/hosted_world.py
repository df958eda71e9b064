"""A world that this host has claimed: its journal and inbox, as a runner uses them."""

import os
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from functools import partial
from typing import Any, Final, Literal

import msgspec

from fastness.clock import Clock, SystemClock
from fastness.errors import BaselineRegressed, Fenced, LeaseRequired, PromotionRefused
from fastness.handles.worlds import AsyncWorld, Reducer
from fastness.hosts.step_context import StepPlanes
from fastness.limits import HOST_LEASE_SECONDS, SEGMENT_ENTRIES, SEGMENT_MARGIN, TURN_ITEMS_MAX
from fastness.wire import AsyncTransport
from fastness.wire.atomic import CommitAtomic, Step
from fastness.wire.blobs import GetBlob
from fastness.wire.canonical import canonical
from fastness.wire.hosting import ClaimedWorld, CommitTurn, SendToWorld, TurnCommitted
from fastness.wire.inboxes import DomainEvent, Effect, InboxItem, Timer
from fastness.wire.requests import Answer, Request
from fastness.wire.restores import Restored
from fastness.wire.worlds import CommitSnapshot, PromoteSnapshot, ReadInbox

Work = Callable[[], Coroutine[Any, Any, Any]]
AroundStep = Callable[[str, str, Work], Coroutine[Any, Any, Any]]  # Runs the work of a step, given its id and name.
_SEED_BYTES: Final = 16


class HostPolicy(msgspec.Struct, frozen=True):
    """What a host does with turns that fail, and how often it takes snapshots.

    After `max_attempts` failures of a turn, the item that makes it fail is set aside, or the world is stopped.
    """

    max_attempts: int = 5
    on_error: Literal["set_aside", "stop"] = "set_aside"
    snapshot_every: int = 256  # Records.
    lease_seconds: float = HOST_LEASE_SECONDS


class HostedWorld:
    """A claimed world. Its runner calls the methods one at a time; only `add` may be called meanwhile.

    After an error of `commit`, the outcome may be unknown. The world is then given back, and restored when it is
    claimed again.
    """

    def __init__(
        self,
        transport: AsyncTransport,
        universe: str,
        owner: str,
        claim: ClaimedWorld,
        *,
        policy: HostPolicy = HostPolicy(),  # noqa: B008
        request_turn: Callable[[], None] = lambda: None,
        request_compaction: Callable[[str, int], None] = lambda _world, _incarnation: None,
        planes: StepPlanes | None = None,
    ) -> None:
        """The world of a claim.

        Args:
            transport: carries requests to its plane.
            universe: its universe.
            owner: the name of the host that has claimed it.
            claim: the answer to the claim.
            policy: what the host does with turns that fail.
            request_turn: makes the host call `run_turn` of its runner soon, without items.
            request_compaction: makes the host compact the world, beside its turns.
            planes: the plane, as steps of workflows use it.
        """
        self.name = claim.world
        self.universe = universe
        self.program = claim.program
        self.incarnation = claim.incarnation
        self.owner = owner
        self.fence = claim.fence
        self.head = claim.head  # Of the journal, as far as this host knows it.
        self.items: deque[tuple[int, InboxItem]] = deque(claim.items)  # That are not yet taken, by their sequences.
        self.attempts = claim.attempts  # How often the next turn has failed.
        self.is_lost = False  # Another host may have it; nothing is committed any more.
        self.policy = policy
        self.now_ms = clock_of(transport).now_ms  # The time of the plane, as far as this process knows it.
        self.request_turn = request_turn
        self.around_step: AroundStep = lambda _id, _name, work: work()  # Tests watch the steps of workflows here.
        self.runs_tasks_here = False  # Whether steps on queues are run by this host, as in tests without workers.
        self.new_seed: Callable[[], bytes] = partial(os.urandom, _SEED_BYTES)  # For the random numbers of a workflow.
        self._request_compaction = request_compaction
        self._baseline_height = 0
        self._snapshot_heights: list[int] = []  # Of snapshots above the baseline.
        self.transport = transport
        self.planes = planes or StepPlanes(transport, universe)
        self._last = claim.items[-1][0] if claim.items else claim.cursor  # The last item that is known here.

    def add(self, items: Iterable[tuple[int, InboxItem]]) -> None:
        """Add items that arrived; those that are known already are skipped."""
        for sequence, item in items:
            if self._last is None or sequence > self._last:
                self.items.append((sequence, item))
                self._last = sequence

    async def restore(self, reducer: Reducer) -> Restored:
        """The state of the world, and the height up to which it is folded; the next turn is committed there.

        Raises:
            WorldNotFound: it was deleted.
            Corrupt: something is missing or damaged.
        """
        world = AsyncWorld(self.transport, self.universe, self.name, incarnation=self.incarnation)
        restored = await world.restore(reducer)
        self.head = restored.height
        self._baseline_height = restored.baseline_height
        self._snapshot_heights = []
        if restored.folded >= self.policy.snapshot_every:
            above = await world.snapshots.list(start=restored.baseline_height + 1)
            self._snapshot_heights = [snapshot.height for snapshot in above]
        return restored

    @property
    def wants_snapshot(self) -> bool:
        """Whether enough records follow the last snapshot."""
        last = self._snapshot_heights[-1] if self._snapshot_heights else self._baseline_height
        return self.head - last >= self.policy.snapshot_every

    async def payload(self, item: InboxItem) -> bytes:
        """The payload of an item: its own bytes, or those of its blob."""
        if item.payload_blob is None:
            return item.payload
        return (await self.transport.call(GetBlob(item.payload_blob, self.universe))).data

    async def commit(
        self,
        *,
        take: int | None = None,
        opening: Sequence[bytes] = (),
        entries: Sequence[bytes] = (),
        effects: Sequence[tuple[int, Effect]] = (),
        timers: Sequence[tuple[int, Timer]] = (),
        cancelled_timers: Sequence[bytes] = (),
        aside: Sequence[tuple[int, str]] = (),
        blobs: Sequence[str] = (),
        operations: Sequence[Step] = (),
    ) -> TurnCommitted:
        """Commit a turn, with other operations in the same commit; entries are canonical CBOR.

        The records go to the journal in this order: `opening`, the items up to the sequence `take`, `entries`. Effects
        and timers name the record that asks for them, counted from the first one of the turn. `blobs` has the hashes of
        those that the entries name.

        Raises:
            Fenced: the claim is lost. Nothing was written.
            HeadAdvanced: the journal is longer than this host knows, so its state is old. Nothing was written.
        """
        turn = CommitTurn(
            self.name,
            self.owner,
            self.fence,
            self.head,
            take,
            list(opening),
            list(entries),
            list(effects),
            list(timers),
            list(cancelled_timers),
            list(aside),
            self.policy.lease_seconds,
            self.universe,
            list(blobs),
        )
        try:
            if operations:
                answers = (await self.transport.call(CommitAtomic([turn, *operations]))).answers
                committed: TurnCommitted = answers[0]
            else:
                committed = await self.transport.call(turn)
        except Fenced as error:
            self.is_lost = not isinstance(error, LeaseRequired)  # Which a state document in the same commit may need.
            raise
        self.head = committed.head
        self.attempts = 0
        if take is not None:
            while self.items and self.items[0][0] <= take:
                self.items.popleft()
        if committed.has_more and not self.items:
            await self._read_items()
        return committed

    def send_request(self, to: str, universe: str, event: DomainEvent) -> SendToWorld:
        """The operation that sends an event to a world of another universe, for the commit of a turn."""
        return SendToWorld(
            self.name, self.owner, self.fence, to, universe, event.schema, event.payload, event.key, self.universe
        )

    async def snapshot(self, state: object) -> None:
        """Store the state after all records of the journal; it becomes the baseline if it qualifies.

        While an effect below it is pending it does not, and an earlier one is promoted instead: a world that always
        waits for some effect has a baseline, too. The records below a new baseline are compacted when they fill a
        segment.

        Raises:
            Fenced: the claim is lost. Nothing was written to the journal.
        """
        height = self.head
        request = CommitSnapshot(
            self.name,
            canonical(state),
            height,
            universe=self.universe,
            incarnation=self.incarnation,
            owner=self.owner,
            fence=self.fence,
        )
        earlier = self._snapshot_heights[-1:]
        self._snapshot_heights = [*self._snapshot_heights, height][-2:]
        is_baseline = (await self._call_fenced(request)).is_baseline
        self.head += 2 if is_baseline else 1  # The journal has a record of each.
        if is_baseline:
            self._has_baseline(height)
        elif earlier and await self._promote(earlier[0]):
            self.head += 1
            self._has_baseline(earlier[0])

    async def _promote(self, height: int) -> bool:
        """Make a stored snapshot the baseline; whether it qualifies."""
        request = PromoteSnapshot(self.name, height, self.universe, self.incarnation, self.owner, self.fence)
        try:
            await self._call_fenced(request)
        except (PromotionRefused, BaselineRegressed):
            return False
        return True

    async def _call_fenced(self, request: Request[Answer]) -> Answer:
        try:
            return await self.transport.call(request)
        except Fenced:
            self.is_lost = True
            raise

    def _has_baseline(self, height: int) -> None:
        # A compaction moves whole segments, and leaves the last records below the baseline where they are.
        before, after = (max(each - SEGMENT_MARGIN, 0) // SEGMENT_ENTRIES for each in (self._baseline_height, height))
        if after > before:
            self._request_compaction(self.name, self.incarnation)
        self._baseline_height = height
        self._snapshot_heights = [each for each in self._snapshot_heights if each > height]

    async def _read_items(self) -> None:
        """Read the items that come next: a claim returns only the first ones of a long inbox."""
        request = ReadInbox(self.name, self._last, TURN_ITEMS_MAX, self.universe, self.incarnation)
        self.add((await self.transport.call(request)).items)


def clock_of(transport: AsyncTransport) -> Clock:
    """The clock of an embedded plane; that of this process if the plane is in another one."""
    services = getattr(transport, "services", None)  # Also of a transport around that of an embedded plane.
    return getattr(services, "clock", None) or SystemClock()
