"""Runs a program in a claimed world: restores its state once, then folds and commits turn by turn."""

import logging
from typing import Any

import msgspec

from fastness.errors import Backend, Busy, Closed, FastnessError, HeadAdvanced
from fastness.hosts.failures import text_of
from fastness.hosts.hosted_world import HostedWorld
from fastness.hosts.programs import Program, event_of, ingress_of, opened, opening
from fastness.hosts.turns import Turn
from fastness.limits import BATCH_BYTES_MAX, BATCH_ENTRIES_MAX
from fastness.wire.canonical import canonical
from fastness.wire.inboxes import InboxItem

_log = logging.getLogger("fastness.host")
_encode = msgspec.msgpack.Encoder().encode
_RECORD_BYTES = 64  # What the record of an item may be longer than the item itself.


class ProgramRunner:
    """Runs one claimed world of a program.

    A turn takes all items that came, at most one batch. If that fails, the state is restored, and the items are taken
    one by one: those before the item that fails are committed. The error of that item leaves `run_turn`, and the host
    has the world claimed again after a back-off; after the last attempt the item is set aside.
    """

    is_active = False
    waits = True  # Any item may come.

    def __init__(self, program: Program, world: HostedWorld) -> None:
        self._program = program
        self._reducer = program.reducer
        self._world = world
        self._state: Any = None
        self._is_restored = False

    async def run_turn(self) -> None:
        """Handle the items that came."""
        world = self._world
        batch = self._next_batch()
        if not batch:
            return
        await self._restore()
        error = await self._try(batch)
        if error is not None:
            await self._commit_one_by_one(batch, error)
        if world.wants_snapshot:
            await self._take_snapshot()

    async def drain(self) -> None:
        """Nothing runs between turns."""

    async def close(self) -> None:
        """Nothing runs between turns."""

    def _next_batch(self) -> list[tuple[int, InboxItem]]:
        """The items of the next turn: with the entry that opens it, they fit one batch of the journal."""
        batch: list[tuple[int, InboxItem]] = []
        size = _RECORD_BYTES
        for sequence, item in self._world.items:
            size += len(_encode(item)) + _RECORD_BYTES
            if batch and (size > BATCH_BYTES_MAX or len(batch) == BATCH_ENTRIES_MAX - 1):
                break
            batch.append((sequence, item))
        return batch

    async def _try(self, batch: list[tuple[int, InboxItem]]) -> Exception | None:
        """Commit items; the error if they cannot be handled. An error of the claim or the plane is raised."""
        try:
            await self._commit(batch)
        except Exception as error:
            if not is_of_items(self._world, error):
                raise
            return error
        return None

    async def _commit(self, batch: list[tuple[int, InboxItem]]) -> None:
        """Fold items and commit them, up to the one with which the turn is full."""
        world = self._world
        turn = Turn(world)
        now_ms = max(world.now_ms(), 0 if self._state is None else self._state["now"])  # It never goes back.
        state = opened(self._state, now_ms)
        self._is_restored = False  # A program may change its state in place; after an error it is not usable.
        last = batch[0][0]
        for record, (sequence, item) in enumerate(batch, 1):
            height = world.head + record
            event = event_of(height, ingress_of(sequence, item, await world.payload(item)))
            state, emitted = self._reducer.fold(state, event)
            turn.add(record, height, emitted)
            last = sequence
            if turn.is_full:
                break
        canonical(state)  # Raises if it cannot be stored.
        await world.commit(
            take=last,
            opening=[opening(now_ms)],
            effects=turn.effects,
            timers=turn.timers,
            cancelled_timers=turn.cancelled_timers,
            operations=await turn.operations(),
        )
        self._state, self._is_restored = state, True

    async def _commit_one_by_one(self, batch: list[tuple[int, InboxItem]], error: Exception) -> None:
        """Commit the items of a batch that failed, each by itself, up to the one that fails.

        The error of that one is raised; after the last attempt it is set aside.
        """
        policy = self._world.policy
        for each in batch:
            if len(batch) > 1:
                await self._restore()
                found = await self._try([each])
                if found is None:
                    continue
                error = found
            is_last = self._world.attempts + 1 >= policy.max_attempts
            if not is_last or policy.on_error == "stop" or isinstance(error, Busy):  # Which passes.
                raise error
            await self._set_aside(each[0], error)

    async def _set_aside(self, sequence: int, error: Exception) -> None:
        _log.error("world %s: item %d is set aside: %s", self._world.name, sequence, error, exc_info=error)
        await self._world.commit(take=sequence, aside=[(sequence, text_of(error))])

    async def _restore(self) -> None:
        if not self._is_restored:
            restored = await self._world.restore(self._reducer)
            self._state, self._is_restored = restored.state, True

    async def _take_snapshot(self) -> None:
        """Store the state, so that the next restore is short. A failure is logged: the journal has everything."""
        try:
            await self._restore()  # After an item was set aside.
            await self._world.snapshot(self._state)
        except FastnessError as error:
            _log.warning("world %s: the snapshot failed: %s", self._world.name, error)


def is_of_items(world: HostedWorld, error: Exception) -> bool:
    """Whether a turn has failed because of what its items led to, not because of the claim or the plane."""
    return not (world.is_lost or isinstance(error, HeadAdvanced | Backend | Closed))
