"""Subscriptions: notifications about resources and lists that have changed.

    2025-11-25   resources/subscribe, for the session; list changes once the client has read the list
    2026-07-28   subscriptions/listen, a request whose answer is the stream of notifications

A client that reads slowly gets one notification for many changes: what has changed is kept as a set, not as a queue.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from contextvars import Context
from functools import partial
from typing import Any, Final

import mcp_types
from mcp.server.context import CallNext, HandlerResult
from mcp.server.lowlevel import NotificationOptions
from mcp.shared.subscriptions import (
    SUBSCRIPTION_ID_META_KEY,
    ResourcesListChanged,
    ResourceUpdated,
    ServerEvent,
    ToolsListChanged,
    event_to_notification,
)
from mcp_types.version import MODERN_PROTOCOL_VERSIONS

from fastness.errors import Busy, FastnessError, InvalidArgument, QueueNotFound
from fastness.limits import (
    MCP_CHECK_SECONDS,
    MCP_POLL_SECONDS,
    MCP_STREAMS_MAX,
    MCP_STREAMS_PER_AGENT_MAX,
    MCP_SUBSCRIPTIONS_MAX,
)
from fastness.mcp import resources
from fastness.mcp.caller import Caller
from fastness.mcp.changes import Changes, PollHint, Target
from fastness.mcp.dispatch import FastnessServer, RequestContext
from fastness.mcp.task_protocols import check_tasks_declared

_log = logging.getLogger("fastness.mcp")

_SESSION_HEADER: Final = "mcp-session-id"
_LISTS: Final[dict[str, ServerEvent]] = {
    "tools/list": ToolsListChanged(),
    "resources/list": ResourcesListChanged(),
}


class Subscriptions:
    """The subscriptions of all clients of one server."""

    def __init__(self, changes: Changes, *, is_open: Callable[[str], bool] | None = None) -> None:
        """`is_open` says whether a session still exists, by its id. By default there is one session, which
        exists as long as the process."""
        self._changes = changes
        self._is_open = is_open or _is_open
        self._sessions: dict[str, _Subscriber] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._streams: set[_Subscriber] = set()
        self._is_closed = False
        self._caller_of: Callable[[RequestContext], Caller]

    def install(self, server: FastnessServer) -> None:
        """Add subscriptions to a server."""
        server.handle("resources/subscribe", mcp_types.SubscribeRequestParams, self._subscribe)
        server.handle("resources/unsubscribe", mcp_types.UnsubscribeRequestParams, self._unsubscribe)
        server.handle("subscriptions/listen", mcp_types.SubscriptionsListenRequestParams, self._listen)
        self._caller_of = server.caller_of
        server.middleware.append(self._watch_lists)
        server.notifications = NotificationOptions(resources_changed=True, tools_changed=True)

    @property
    def streams(self) -> int:
        """The number of open streams of notifications, of revision 2026-07-28."""
        return len(self._streams)

    @property
    def sessions(self) -> int:
        """The number of sessions that have subscriptions."""
        return len(self._sessions)

    def end_session(self, id: str) -> None:
        """Forget the subscriptions of a session that has ended."""
        task = self._tasks.pop(id, None)
        if task is not None:
            task.cancel()
        subscriber = self._sessions.pop(id, None)
        if subscriber is not None:
            subscriber.close()

    def check_callers(self) -> None:
        """End the streams of callers that are not allowed any more, after tokens were revoked."""
        for subscriber in self._streams:
            subscriber.wake()

    def close(self) -> None:
        """End all streams with their last message, and forget all subscriptions."""
        self._is_closed = True
        self.check_callers()
        for id in list(self._sessions):
            self.end_session(id)

    # 2026-07-28.

    async def _listen(
        self, context: RequestContext, caller: Caller, params: mcp_types.SubscriptionsListenRequestParams
    ) -> mcp_types.SubscriptionsListenResult:
        id = context.request_id
        if id is None:
            raise InvalidArgument("subscriptions/listen needs a request id")
        self._check_streams(caller)
        if ((context.params or {}).get("notifications") or {}).get("taskIds"):
            check_tasks_declared(context)  # Tasks are polled: none is among what is acknowledged.
        asked = params.notifications
        honored = mcp_types.SubscriptionFilter(
            tools_list_changed=asked.tools_list_changed or None,
            prompts_list_changed=asked.prompts_list_changed or None,  # They never change.
            resources_list_changed=asked.resources_list_changed or None,
            resource_subscriptions=list(dict.fromkeys(asked.resource_subscriptions or ())) or None,
        )
        events: list[ServerEvent] = [ResourceUpdated(uri) for uri in honored.resource_subscriptions or ()]
        events += [ToolsListChanged()] if honored.tools_list_changed else []
        events += [ResourcesListChanged()] if honored.resources_list_changed else []
        meta: dict[str, Any] = {SUBSCRIPTION_ID_META_KEY: id}
        subscriber = _Subscriber(caller)
        self._streams.add(subscriber)
        try:
            await self._add(subscriber, caller, events)
            acknowledged = mcp_types.SubscriptionsAcknowledgedNotificationParams(notifications=honored, _meta=meta)
            await context.session.send_notification(
                mcp_types.SubscriptionsAcknowledgedNotification(params=acknowledged), related_request_id=id
            )
            while True:
                # First, so that an event before the acknowledgement was sent is not lost.
                for event in subscriber.take():
                    await context.session.send_notification(event_to_notification(event, meta), related_request_id=id)
                await subscriber.wait()
                if self._is_closed or not subscriber.is_allowed:
                    break
        finally:
            self._streams.discard(subscriber)
            subscriber.close()
        return mcp_types.SubscriptionsListenResult(_meta=meta)

    def _check_streams(self, caller: Caller) -> None:
        mine = sum(each.caller.agent == caller.agent for each in self._streams)
        if len(self._streams) >= MCP_STREAMS_MAX or mine >= MCP_STREAMS_PER_AGENT_MAX:
            raise Busy(
                f"The limit of {MCP_STREAMS_MAX} streams of notifications, or {MCP_STREAMS_PER_AGENT_MAX} per agent, "
                "is reached; close one, or retry later"
            )

    # 2025-11-25.

    async def _subscribe(
        self, context: RequestContext, caller: Caller, params: mcp_types.SubscribeRequestParams
    ) -> mcp_types.EmptyResult:
        await self._add(self._session(context, caller), caller, [ResourceUpdated(params.uri)])
        return mcp_types.EmptyResult()

    async def _unsubscribe(
        self, context: RequestContext, caller: Caller, params: mcp_types.UnsubscribeRequestParams
    ) -> mcp_types.EmptyResult:
        del caller
        subscriber = self._sessions.get(_session_of(context))
        if subscriber is not None:
            subscriber.remove(ResourceUpdated(params.uri))
        return mcp_types.EmptyResult()

    async def _watch_lists(self, ctx: RequestContext, call_next: CallNext) -> HandlerResult:
        """Middleware: a session that has read a list is notified of its changes."""
        result = await call_next(ctx)
        event = _LISTS.get(ctx.method)
        if event is not None and ctx.protocol_version not in MODERN_PROTOCOL_VERSIONS and not self._is_closed:
            caller = self._caller_of(ctx)
            with suppress(FastnessError):  # The list is the answer, with or without notifications.
                await self._add(self._session(ctx, caller), caller, [event])
        return result

    def _session(self, context: RequestContext, caller: Caller) -> "_Subscriber":
        id = _session_of(context)
        subscriber = self._sessions.get(id)
        if subscriber is None:
            subscriber = self._sessions[id] = _Subscriber(caller)
            deliver = self._deliver(id, subscriber, context)
            # Not in the context of this request, which ends earlier.
            self._tasks[id] = asyncio.get_running_loop().create_task(deliver, context=Context())
        return subscriber

    async def _deliver(self, id: str, subscriber: "_Subscriber", context: RequestContext) -> None:
        """Send the notifications of a session, on the stream that its client has opened with GET."""
        session = context.session  # Without a related request, it sends to the session.
        try:
            while self._is_open(id) and subscriber.is_allowed:
                for event in subscriber.take():
                    await session.send_notification(event_to_notification(event, {}))
                await subscriber.wait()
        except Exception:
            _log.exception("unexpected error while a session was notified")
        finally:
            if self._sessions.get(id) is subscriber:
                self._tasks.pop(id, None)
                self.end_session(id)

    async def _add(self, subscriber: "_Subscriber", caller: Caller, events: Iterable[ServerEvent]) -> None:
        """Watch what the events are about.

        Raises:
            NotFound: a resource does not exist, or the caller may not know of it.
            NotAllowed: the caller may not read it.
            Busy: the client has too many subscriptions.
        """
        new = [event for event in events if event not in subscriber.events]
        if len(subscriber.events) + len(new) > MCP_SUBSCRIPTIONS_MAX:
            raise Busy(f"A client has at most {MCP_SUBSCRIPTIONS_MAX} subscriptions; end one")
        for event in new:
            if isinstance(event, ResourceUpdated):
                with suppress(QueueNotFound):  # Its first message creates it, which is a change.
                    await resources.read(caller, event.uri)  # A caller that may read it may know that it changed.
            # Before the first wait: two requests for the same event are one subscription.
            stops = subscriber.events[event] = []
            try:
                for target in _targets_of(caller, event):
                    stop = await self._changes.watch(caller.own_rows, target, partial(subscriber.notice, event))
                    stops.append(stop)
            except BaseException:
                subscriber.remove(event)
                raise
            if subscriber.events.get(event) is not stops:  # It was ended meanwhile.
                for stop in stops:
                    stop()


class _Subscriber:
    """A session or stream: what it watches, and what has changed since its client was last notified."""

    def __init__(self, caller: Caller) -> None:
        self.caller = caller
        self.events: dict[ServerEvent, list[Callable[[], None]]] = {}  # With the functions that end the watches.
        self._changed: dict[ServerEvent, None] = {}
        self._woken = asyncio.Event()

    @property
    def is_allowed(self) -> bool:
        """Whether the caller's token is still valid."""
        try:
            self.caller.is_allowed("queue:get")
        except FastnessError:
            return False
        return True

    def notice(self, event: ServerEvent) -> None:
        """Record a change."""
        self._changed[event] = None
        self._woken.set()

    def take(self) -> list[ServerEvent]:
        """What has changed since the last call, each once."""
        taken, self._changed = list(self._changed), {}
        return taken

    async def wait(self) -> None:
        """Wait for a change, or for the time to check whether the caller still exists."""
        try:
            async with asyncio.timeout(MCP_CHECK_SECONDS):
                await self._woken.wait()
        except TimeoutError:
            return
        self._woken.clear()

    def wake(self) -> None:
        """End a `wait` without a change."""
        self._woken.set()

    def remove(self, event: ServerEvent) -> None:
        """End the watch of one event."""
        for stop in self.events.pop(event, ()):
            stop()
        self._changed.pop(event, None)

    def close(self) -> None:
        """End all watches."""
        for event in list(self.events):
            self.remove(event)


def polling_subscriptions() -> Subscriptions:
    """Subscriptions over a plane that may be in another process: what clients watch is read every few seconds."""
    return Subscriptions(Changes(PollHint, seconds=MCP_POLL_SECONDS))


def _targets_of(caller: Caller, event: ServerEvent) -> list[Target]:
    """What an event is about; several for the list of resources."""
    universe = caller.universe
    if isinstance(event, ToolsListChanged):
        return [Target(universe, "tools")]
    if isinstance(event, ResourceUpdated):
        uri = resources.checked_uri(caller, event.uri)
        return [Target(universe, uri.kind, caller.agent if uri.kind == "mail" else uri.name)]
    verbs = {
        "queue:survey": Target(universe, "queues"),
        "world:survey": Target(universe, "worlds"),
        "mail:read": Target(universe, "mail", caller.agent),
        "collection:scan": Target(universe, "reports"),
    }
    return [target for verb, target in verbs.items() if caller.is_allowed(verb)]


def _session_of(context: RequestContext) -> str:
    request: Any = context.request
    return "" if request is None else request.headers.get(_SESSION_HEADER, "")


def _is_open(session: str) -> bool:
    del session
    return True
