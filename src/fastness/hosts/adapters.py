"""Adapters: functions that carry out effects, and the pool that runs them.

claim ──► run the adapter, renewing the lease ──► returns ──► complete: its result is a receipt in the world's inbox
                                              └─► raises  ──► fail: tried again after a back-off, or dead
"""

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from typing import Any, Final

import msgspec

from fastness.errors import FastnessError, Fenced, InvalidArgument, NotFound
from fastness.handles.effects import AsyncEffectClaim, AsyncEffects
from fastness.handles.queues import payload_of
from fastness.handles.task_control import Reject, RetryLater
from fastness.handles.workers.consumers import is_final
from fastness.hosts.failures import claim_for_ever, text_of
from fastness.limits import EFFECT_CLAIMS_MAX
from fastness.wire import AsyncTransport
from fastness.wire.json_values import decode_json

_log = logging.getLogger("fastness.host")
_RENEWALS_PER_LEASE: Final = 3

AdapterFunction = Callable[["EffectCall"], Any] | Callable[["EffectCall"], Awaitable[Any]]


class EffectCall(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt to carry out an effect, as an adapter is given it."""

    kind: str
    payload: bytes  # The parameters.
    idempotency_key: str  # The same in all attempts of the effect, and different for every other effect.
    world: str
    universe: str
    attempt: int  # 1 for the first one.
    max_attempts: int

    def json(self) -> Any:
        """The parameters, from JSON.

        Raises:
            InvalidValue: they are not JSON, or nested too deep.
        """
        return decode_json(self.payload)


class Adapter:
    """The function that carries out the effects of a kind."""

    def __init__(self, kind: str, function: AdapterFunction) -> None:
        if not callable(function):
            raise InvalidArgument(f"The adapter of {kind} must be a function, not {type(function).__name__}")
        self.kind = kind
        self.function = function
        self.is_async = inspect.iscoroutinefunction(function)


class AdapterPool:
    """Claims the effects of some adapters, and carries them out until it is stopped."""

    def __init__(
        self,
        transport: AsyncTransport,
        universe: str,
        owner: str,
        adapters: Mapping[str, Adapter],
        *,
        concurrency: int,
        lease_seconds: float,
    ) -> None:
        self.completed = 0
        self.failed = 0
        self._effects = AsyncEffects(transport, universe)
        self._universe = universe
        self._owner = owner
        self._adapters = dict(adapters)
        self._concurrency = concurrency
        self._lease_seconds = lease_seconds
        self._running: dict[asyncio.Task[None], AsyncEffectClaim] = {}
        self._has_room = asyncio.Event()
        self._threads = ThreadPoolExecutor(concurrency, thread_name_prefix="fastness-adapter")

    async def run(self) -> None:
        """Carry out effects until it is cancelled.

        Raises:
            FastnessError: effects cannot be claimed, and a retry cannot succeed.
        """
        if not self._adapters:
            return
        renewing = asyncio.create_task(self._renew())
        try:
            await claim_for_ever("effects", self.claim)
        finally:
            renewing.cancel()

    async def claim(self, *, wait_seconds: float = 0.0) -> int:
        """Claim effects for which there is room, and start to carry them out; how many."""
        while (room := self._concurrency - len(self._running)) <= 0:
            self._has_room.clear()
            await self._has_room.wait()
        if not self._adapters:
            return 0
        claimed = await self._effects.claim(
            list(self._adapters),
            owner=self._owner,
            limit=min(room, EFFECT_CLAIMS_MAX),
            lease_seconds=self._lease_seconds,
            wait_seconds=wait_seconds,
        )
        for effect in claimed:
            task = asyncio.create_task(self._carry_out(effect))
            self._running[task] = effect
            task.add_done_callback(self._finished)
        return len(claimed)

    async def finish(self, drain_seconds: float | None = None) -> None:
        """Wait for running adapters, at most `drain_seconds`; the leases of the rest end by themselves."""
        if self._running:
            _, late = await asyncio.wait(list(self._running), timeout=drain_seconds)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late)

    def close(self) -> None:
        """Let its threads end when they have finished."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._running.pop(task, None)
        self._has_room.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("unexpected error of an adapter's task", exc_info=error)

    async def _carry_out(self, effect: AsyncEffectClaim) -> None:
        try:
            payload = await self._call(effect)
        except Exception as error:
            self.failed += 1
            trace = None if isinstance(error, Reject | RetryLater) else error  # Those are decisions of the adapter.
            _log.warning("effect %s of world %s failed: %s", effect.kind, effect.world, error, exc_info=trace)
            await self._fail(effect, error)
            return
        try:
            await effect.complete(payload, adapter_id=self._owner)
        except (Fenced, NotFound) as error:
            _log.warning("effect %s of world %s was done, but is lost: %s", effect.kind, effect.world, error)
        except FastnessError as error:
            if is_final(error):
                await self._fail(effect, error)
            else:  # Its lease ends, and it is done again with the same idempotency key.
                _log.warning("effect %s of world %s was done, not completed: %s", effect.kind, effect.world, error)
        else:
            self.completed += 1

    async def _call(self, effect: AsyncEffectClaim) -> bytes:
        """The result of the adapter, as bytes."""
        adapter = self._adapters[effect.kind]
        call = EffectCall(
            kind=effect.kind,
            payload=effect.params,
            idempotency_key=effect.idempotency_key,
            world=effect.world,
            universe=self._universe,
            attempt=effect.attempt,
            max_attempts=effect.info.max_attempts,
        )
        if adapter.is_async:
            result = await adapter.function(call)
        else:
            loop = asyncio.get_running_loop()
            result = await loop.run_in_executor(self._threads, copy_context().run, adapter.function, call)
        return payload_of(result)[0]

    async def _fail(self, effect: AsyncEffectClaim, error: Exception) -> None:
        text = str(error) if isinstance(error, Reject | RetryLater) else text_of(error)
        delay_seconds = error.seconds if isinstance(error, RetryLater) else None
        with suppress(FastnessError):  # It is lost, or its lease ends.
            await effect.fail(text, delay_seconds=delay_seconds, final=isinstance(error, Reject))

    async def _renew(self) -> None:
        """Extend the leases of running effects; an adapter whose effect is lost is cancelled."""
        while True:
            await asyncio.sleep(self._lease_seconds / _RENEWALS_PER_LEASE)
            await asyncio.gather(*(self._extend(task, effect) for task, effect in list(self._running.items())))

    async def _extend(self, task: asyncio.Task[None], effect: AsyncEffectClaim) -> None:
        try:
            await effect.extend()
        except (Fenced, NotFound):
            _log.warning("effect %s of world %s is lost: its lease has ended", effect.kind, effect.world)
            task.cancel()
        except FastnessError as error:
            _log.warning("the lease of effect %s of world %s is not extended: %s", effect.kind, effect.world, error)
