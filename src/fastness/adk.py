"""Session service of the Google Agent Development Kit: sessions, their events and state, in a collection of a plane.

    runner = Runner(app_name="shop", agent=agent, session_service=FastnessSessionService(plane))

The rows of the collection "adk" are in two kinds of partitions, whose names are JSON lists:

    ["app"]             ("a",)                    state of the app
    ["app", "user"]     ("u",)                    state of the user
                        ("s", session)            when the session was updated, and how many events it has
                        ("d", session)            its state
                        ("e", session, number)    an event

An event and what it changes are one commit. It puts the row ("s", session) under the version that was read, which
refuses the event of a stale session, and the states of user and app under theirs, which merges concurrent changes.
"""

import asyncio
import json
from contextlib import aclosing
from functools import partial
from typing import Any, Final, NamedTuple
from weakref import WeakValueDictionary

import msgspec

from fastness import AsyncPlane, DeleteRow, DeleteRows, Plane, PutRow, Row
from fastness.errors import InvalidArgument
from fastness.extras import how_to_install
from fastness.plane_access import Change, Key, decoded, json_object
from fastness.session_rows import SessionRows, write

try:
    from google.adk.errors import StaleSessionError
    from google.adk.errors.already_exists_error import AlreadyExistsError
    from google.adk.errors.session_not_found_error import SessionNotFoundError
    from google.adk.events import Event
    from google.adk.platform import time as platform_time
    from google.adk.platform import uuid as platform_uuid
    from google.adk.sessions import BaseSessionService, Session, State
    from google.adk.sessions.base_session_service import GetSessionConfig, ListSessionsResponse
    from pydantic import PrivateAttr
    from pydantic_core import from_json, to_json
except ImportError as error:
    message = f"The Google Agent Development Kit is not installed; {how_to_install('adk')}"
    raise ImportError(message) from error

_USER: Final = ("u",)
_APP: Final = ("a",)


class _Head(msgspec.Struct, frozen=True):
    """The row ("s", session)."""

    created_id: str  # A deleted session whose id is used again is another session.
    updated: float
    events: int = 0
    last_event_id: str | None = None


_decode_head: Final = partial(decoded, "A stored session", msgspec.json.Decoder(_Head).decode)
_decode_event: Final = partial(decoded, "A stored event", Event.model_validate_json)
_decode_state: Final = partial(decoded, "A stored state", json_object)


class _Revision(NamedTuple):
    """The state of storage that a session object agrees with."""

    created_id: str
    version: int


class StoredSession(Session):
    """A session that the service has read or created."""

    _revision: _Revision | None = PrivateAttr(default=None)


class _Delta(NamedTuple):
    """What changes in the states of a session, its user and its app. The keys have no prefix."""

    session: dict[str, Any]
    user: dict[str, Any]
    app: dict[str, Any]


class FastnessSessionService(BaseSessionService):
    """Keeps sessions of the Google ADK in a plane: a Plane or an AsyncPlane, embedded or remote.

    Services with the same plane share their sessions, also in other processes. If two of them append to one session,
    the one whose session object is older gets StaleSessionError and has to read the session again.
    """

    def __init__(self, plane: Plane | AsyncPlane, *, collection: str = "adk") -> None:
        self._rows = SessionRows(plane, collection)
        self._locks: WeakValueDictionary[tuple[object, ...], asyncio.Lock] = WeakValueDictionary()

    async def create_session(
        self, *, app_name: str, user_id: str, state: dict[str, Any] | None = None, session_id: str | None = None
    ) -> Session:
        """Create a session. Keys of `state` that start with `app:` or `user:` change the state of the app or user.

        Raises:
            AlreadyExistsError: the user has a session with this id.
        """
        id = (session_id or "").strip() or platform_uuid.new_uuid()
        app, partition = _partition(app_name), _partition(app_name, user_id)
        delta = _split(state or {})
        head = _Head(platform_uuid.new_uuid(), platform_time.get_time())

        async def create() -> Session:
            found, user_row = await self._rows.get_many(partition, [("s", id), _USER])
            [app_row] = await self._rows.get_many(app, [_APP])
            if found is not None:
                raise AlreadyExistsError(f"Session with id {id} already exists.")
            user_state, app_state = await self._state(user_row), await self._state(app_row)
            changes = [
                PutRow(partition, ("s", id), msgspec.json.encode(head), if_version=0),
                *await self._merge(partition, ("d", id), None, delta.session),
                *await self._merge(partition, _USER, user_row, delta.user),
                *await self._merge(app, _APP, app_row, delta.app),
            ]
            await self._rows.commit(changes)
            visible = _joined(_Delta(delta.session, user_state | delta.user, app_state | delta.app))
            return _session(head, 1, visible, app_name=app_name, user_id=user_id, id=id)

        return await write(create)

    async def get_session(
        self, *, app_name: str, user_id: str, session_id: str, config: GetSessionConfig | None = None
    ) -> Session | None:
        """The session with its events, or None. With `after_timestamp`, the events since the last older one."""
        id, partition = session_id.strip(), _partition(app_name, user_id)
        row, state_row, user_row = await self._rows.get_many(partition, [("s", id), ("d", id), _USER])
        if row is None:
            return None
        [app_row] = await self._rows.get_many(_partition(app_name), [_APP])
        state = _Delta(await self._state(state_row), await self._state(user_row), await self._state(app_row))
        head = _decode_head(row.value)
        session = _session(head, row.version, _joined(state), app_name=app_name, user_id=user_id, id=id)
        session.events = await self._events(partition, id, head.events, config or GetSessionConfig())
        return session

    async def list_sessions(self, *, app_name: str, user_id: str | None = None) -> ListSessionsResponse:
        """The sessions of a user, or of all users, without their events; the one that was updated last is the last."""
        if user_id is not None:
            users = [user_id]
        else:
            found = await self._rows.partitions(_partition(app_name).removesuffix("]") + ",")
            users = [json.loads(partition)[1] for partition in found]
        [app_row] = await self._rows.get_many(_partition(app_name), [_APP])
        app = await self._state(app_row)
        sessions = [session for user in users for session in await self._sessions(app_name, user, app)]
        sessions.sort(key=lambda session: (session.last_update_time, session.user_id, session.id))
        return ListSessionsResponse(sessions=sessions)

    async def delete_session(self, *, app_name: str, user_id: str, session_id: str) -> None:
        """Delete a session with its events and its state. The states of its user and its app stay."""
        id, partition = session_id.strip(), _partition(app_name, user_id)
        state_and_events: list[Change] = [DeleteRow(partition, ("d", id)), DeleteRows(partition, ("e", id))]

        async def delete() -> None:
            await self._rows.commit([DeleteRow(partition, ("s", id)), *state_and_events])

        await write(delete)

    async def get_user_state(self, *, app_name: str, user_id: str) -> dict[str, Any]:
        """The state of a user, with keys that have no prefix."""
        [row] = await self._rows.get_many(_partition(app_name, user_id), [_USER])
        return await self._state(row)

    async def append_event(self, session: Session, event: Event) -> Event:
        """Store an event and the state that it changes, in one commit.

        A partial event is returned as it is. The event that was stored last is not stored again.

        Raises:
            StaleSessionError: the session was changed after this object was read. Read it again.
            SessionNotFoundError: the session does not exist.
        """
        if event.partial:
            return event
        # Tasks that share a session object append one after the other: each needs the revision that the last one left.
        # A lock belongs to one event loop.
        key = (asyncio.get_running_loop(), session.app_name, session.user_id, session.id)
        lock = self._locks.setdefault(key, asyncio.Lock())

        async def append() -> Event:
            return await self._append(session, event)

        async with lock:
            return await write(append)

    async def _append(self, session: Session, event: Event) -> Event:
        id, partition = session.id, _partition(session.app_name, session.user_id)
        row, state_row, user_row = await self._rows.get_many(partition, [("s", id), ("d", id), _USER])
        if row is None:
            raise SessionNotFoundError(f"Session {id} not found.")
        head = _decode_head(row.value)
        if await self._is_last(partition, id, head, event):
            if _is_current(session, head, row.version):
                return event
            if _is_current(session, head, row.version - 1):  # Its commit succeeded, and the answer was lost.
                return self._appended(session, event, head, row.version)
        if not _is_current(session, head, row.version):
            raise StaleSessionError(f"Session {id} was changed after it was read; get it again.")

        self._apply_temp_state(session, event)
        event = self._trim_temp_delta_state(event)
        delta = _split(event.actions.state_delta)
        [value] = await self._rows.store([_event_json(event)])
        head = _Head(head.created_id, event.timestamp, head.events + 1, event.id)
        changes = [
            PutRow(partition, ("s", id), msgspec.json.encode(head), if_version=row.version),
            PutRow(partition, ("e", id, head.events), value),
            *await self._merge(partition, ("d", id), state_row, delta.session),
            *await self._merge(partition, _USER, user_row, delta.user),
        ]
        if delta.app:
            app = _partition(session.app_name)
            [app_row] = await self._rows.get_many(app, [_APP])
            changes += await self._merge(app, _APP, app_row, delta.app)
        await self._rows.commit(changes)
        return self._appended(session, event, head, row.version + 1)

    def _appended(self, session: Session, event: Event, head: _Head, version: int) -> Event:
        """Give a session object the event that was stored."""
        session.last_update_time = head.updated
        if isinstance(session, StoredSession):
            session._revision = _Revision(head.created_id, version)
        return self._commit_event_to_session(session, event)

    async def _is_last(self, partition: str, id: str, head: _Head, event: Event) -> bool:
        if head.last_event_id != event.id:
            return False
        [row] = await self._rows.get_many(partition, [("e", id, head.events)])
        return row is not None and _decode_event(await self._rows.load(row)) == event

    async def _events(self, partition: str, id: str, count: int, config: GetSessionConfig) -> list[Event]:
        """The latest of the first `count` events. Later ones were stored after the session was read."""
        events: list[Event] = []
        scan = self._rows.scan(
            partition, ("e", id), before=("e", id, count + 1), limit=config.num_recent_events, reverse=True
        )
        async with aclosing(scan) as rows:
            async for row in rows:
                event = _decode_event(await self._rows.load(row))
                if config.after_timestamp is not None and event.timestamp < config.after_timestamp:
                    break
                events.append(event)
        return events[::-1]

    async def _sessions(self, app_name: str, user_id: str, app: dict[str, Any]) -> list[Session]:
        """The sessions of a user, without events."""
        partition = _partition(app_name, user_id)
        user = await self.get_user_state(app_name=app_name, user_id=user_id)
        states = {row.key[1]: await self._state(row) async for row in self._rows.scan(partition, ("d",))}
        sessions: list[Session] = []
        async for row in self._rows.scan(partition, ("s",)):
            id, head = str(row.key[1]), _decode_head(row.value)
            state = _joined(_Delta(states.get(id, {}), user, app))
            sessions.append(_session(head, row.version, state, app_name=app_name, user_id=user_id, id=id))
        return sessions

    async def _state(self, row: Row | None) -> dict[str, Any]:
        state: dict[str, Any] = {} if row is None else _decode_state(await self._rows.load(row))
        return state

    async def _merge(self, partition: str, key: Key, row: Row | None, delta: dict[str, Any]) -> list[Change]:
        """The change of a stored state by `delta`, on condition that it is still the one of `row`."""
        if not delta:
            return []
        [value] = await self._rows.store([to_json(await self._state(row) | delta)])
        return [PutRow(partition, key, value, if_version=0 if row is None else row.version)]


def _partition(*names: str) -> str:
    return json.dumps(names, ensure_ascii=False, separators=(",", ":"))


def _split(state: dict[str, Any]) -> _Delta:
    """The parts of a state by the prefixes of its keys, without temporary ones, as values of JSON.

    What has no form in JSON is replaced by its description, as the other session services do.
    """
    delta = _Delta({}, {}, {})
    try:
        encoded = to_json(state, serialize_unknown=True)
    except ValueError as error:  # Text with half of a surrogate pair.
        raise InvalidArgument(f"the state cannot be stored as JSON ({error}); convert its values first") from error
    for key, value in from_json(encoded).items():
        if key.startswith(State.APP_PREFIX):
            delta.app[key.removeprefix(State.APP_PREFIX)] = value
        elif key.startswith(State.USER_PREFIX):
            delta.user[key.removeprefix(State.USER_PREFIX)] = value
        elif not key.startswith(State.TEMP_PREFIX):
            delta.session[key] = value
    return delta


def _event_json(event: Event) -> bytes:
    try:
        return event.model_dump_json(exclude_none=True).encode()
    except ValueError as error:
        raise InvalidArgument(f"the event cannot be stored as JSON ({error}); convert its values first") from error


def _joined(state: _Delta) -> dict[str, Any]:
    app = {State.APP_PREFIX + key: value for key, value in state.app.items()}
    user = {State.USER_PREFIX + key: value for key, value in state.user.items()}
    return {**state.session, **app, **user}


def _session(
    head: _Head, version: int, state: dict[str, Any], *, app_name: str, user_id: str, id: str
) -> StoredSession:
    session = StoredSession(app_name=app_name, user_id=user_id, id=id, state=state, last_update_time=head.updated)
    session._revision = _Revision(head.created_id, version)
    return session


def _is_current(session: Session, head: _Head, version: int) -> bool:
    """Whether a session object has everything up to this version."""
    if isinstance(session, StoredSession) and session._revision is not None:
        return session._revision == (head.created_id, version)
    # An object that the service has not made has no revision.
    last_event_id = session.events[-1].id if session.events else None
    return session.last_update_time >= head.updated or last_event_id == head.last_event_id
