"""The session service of the Google ADK, on every kind of plane: it answers like the ADK's own service."""

import asyncio
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
from google.adk.errors import StaleSessionError
from google.adk.errors.already_exists_error import AlreadyExistsError
from google.adk.errors.session_not_found_error import SessionNotFoundError
from google.adk.events import Event, EventActions
from google.adk.platform import time as platform_time
from google.adk.sessions import BaseSessionService, InMemorySessionService, Session
from google.adk.sessions.base_session_service import GetSessionConfig
from google.genai import types
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fastness
from fastness import AsyncPlane, Plane
from fastness.adk import FastnessSessionService
from fastness.errors import InvalidArgument

CALLS_MAX = 12
LARGE = 100_000  # Bytes: more than a row takes.
ADA: dict[str, Any] = {"app_name": "shop", "user_id": "ada"}
_numbers = count()

# Mostly the same session, so that calls meet.
places = st.sampled_from([("shop", "ada")] * 5 + [("shop", 'a","b'), ('shøp"', "ada")])
ids = st.sampled_from(["1"] * 5 + [" x/y "])
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-9, 9)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=4,
)
states = st.dictionaries(
    st.sampled_from(("a", "b", "app:a", "app:b", "user:a", "user:b", "temp:a")), values, max_size=4
)
configs = st.builds(
    GetSessionConfig,
    num_recent_events=st.none() | st.integers(0, 3),
    after_timestamp=st.none() | st.integers(0, 30).map(float),
)
texts = st.text(max_size=4) | st.just("(large)")
appends = st.tuples(st.just("append"), places, ids, states, texts, st.sampled_from((False, False, False, True)))
gets = st.tuples(st.just("get"), places, ids, configs)
calls = st.one_of(
    appends,
    gets,
    appends,
    gets,
    st.tuples(st.just("create"), places, ids, st.none() | states),
    st.tuples(st.just("list"), places),
    st.tuples(st.just("list_all"), places),
    st.tuples(st.just("delete"), places, ids),
    st.tuples(st.just("user_state"), places),
)


@pytest.fixture(autouse=True)
def _reset_time() -> Iterator[None]:
    yield
    platform_time.reset_time_provider()


def event(text: str = "hello", *, partial: bool = False, timestamp: float = 1_000.0, **state: Any) -> Event:
    return Event(
        author="user",
        content=types.Content(role="user", parts=[types.Part(text=text)]),
        actions=EventActions(state_delta={key.replace("_", ":"): value for key, value in state.items()}),
        partial=partial,
        timestamp=timestamp,
    )


async def begin(service: BaseSessionService, id: str = "1", **state: Any) -> Session:
    named = {key.replace("_", ":"): value for key, value in state.items()}
    return await service.create_session(**ADA, session_id=id, state=named)


async def read(service: BaseSessionService, id: str = "1", **config: Any) -> Session:
    found = await service.get_session(**ADA, session_id=id, config=GetSessionConfig(**config))
    assert found is not None
    return found


def texts_of(session: Session) -> list[str | None]:
    return [event.content.parts[0].text for event in session.events if event.content and event.content.parts]


# Against the service of the ADK.


def test_calls_in_any_order_have_the_answers_of_the_adks_own_service(framework_plane: Any) -> None:
    @settings(max_examples=25, suppress_health_check=list(HealthCheck))
    @given(st.lists(calls, min_size=4, max_size=CALLS_MAX))
    def check(made: list[tuple[Any, ...]]) -> None:
        framework_plane.run(compare(framework_plane.plane, made))

    check()


async def compare(plane: Plane | AsyncPlane, made: list[tuple[Any, ...]]) -> None:
    ours = FastnessSessionService(plane, collection=f"adk{next(_numbers)}")
    theirs = InMemorySessionService()
    place = ("shop", "ada")
    first = ("create", place, "1", {"a": 1})
    last = [("get", place, "1", None), ("list_all", place), ("list_all", ('shøp"', ""))]
    for number, call in enumerate([first, *made, *last]):
        platform_time.set_time_provider(lambda: float(number))  # noqa: B023
        answers = [await answer(service, f"event {number}", *call) for service in (ours, theirs)]
        assert answers[0] == answers[1], call


async def answer(service: BaseSessionService, event_id: str, name: str, place: tuple[str, str], *arguments: Any) -> Any:
    """What a service answers to a call, in a form that can be compared."""
    named: dict[str, Any] = {"app_name": place[0], "user_id": place[1]}
    try:
        match name, arguments:
            case "create", (id, state):
                return (await service.create_session(**named, state=state, session_id=id)).model_dump()
            case "append", (id, state, text, partial):
                found = await service.get_session(**named, session_id=id) or Session(**named, id=id)
                appended = event(text.replace("(large)", "x" * LARGE), partial=partial)
                appended.id, appended.timestamp = event_id, platform_time.get_time()
                appended.actions.state_delta = state
                returned = await service.append_event(found, appended)
                return found.model_dump(), returned.model_dump()
            case "get", (id, config):
                got = await service.get_session(**named, session_id=id, config=config)
                return None if got is None else got.model_dump()
            case "list", ():
                return (await service.list_sessions(**named)).model_dump()
            case "list_all", ():
                return (await service.list_sessions(app_name=place[0])).model_dump()
            case "delete", (id,):
                return await service.delete_session(**named, session_id=id)
            case "user_state", ():
                return await service.get_user_state(**named)
    except (AlreadyExistsError, SessionNotFoundError) as error:
        return type(error)
    pytest.fail(f"no such call: {name}")


# Writers at once.


def test_the_event_of_a_stale_session_is_refused_and_changes_nothing(framework_plane: Any) -> None:
    services = [FastnessSessionService(plane) for plane in (framework_plane.plane, framework_plane.another())]

    async def check() -> None:
        await begin(services[0])
        copies = [await read(service) for service in services]
        await services[0].append_event(copies[0], event("first", a=1))
        with pytest.raises(StaleSessionError, match="get it again"):
            await services[1].append_event(copies[1], event("second", a=2, user_a=2, app_a=2))
        found = await read(services[1])
        assert (texts_of(found), found.state) == (["first"], {"a": 1})
        await services[1].append_event(found, event("second", a=2))
        assert texts_of(await read(services[0])) == ["first", "second"]

    framework_plane.run(check())


def test_of_appends_at_once_to_copies_one_wins(framework_plane: Any) -> None:
    services = [FastnessSessionService(plane) for plane in (framework_plane.plane, framework_plane.another())]

    async def check() -> None:
        await begin(services[0])
        copies = [(service, await read(service)) for service in services * 2]
        states: list[dict[str, Any]] = [{f"app_{number}": number} for number in range(len(copies))]
        events = [event(str(number), **state) for number, state in enumerate(states)]
        appends = [service.append_event(copy, each) for (service, copy), each in zip(copies, events, strict=True)]
        results = await asyncio.gather(*appends, return_exceptions=True)
        [winner] = [number for number, result in enumerate(results) if isinstance(result, Event)]
        assert sum(isinstance(result, StaleSessionError) for result in results) == 3
        found = await read(services[1])
        assert (texts_of(found), found.state) == ([str(winner)], {f"app:{winner}": winner})

    framework_plane.run(check())


def test_tasks_that_share_a_session_object_append_one_after_the_other(framework_plane: Any) -> None:
    class Observed(FastnessSessionService):
        running = 0

        async def _append(self, session: Session, event: Event) -> Event:
            self.running += 1
            assert self.running == 1
            try:
                return await super()._append(session, event)
            finally:
                self.running -= 1

    async def check() -> None:
        service = Observed(framework_plane.plane)
        session = await begin(service)
        await asyncio.gather(*(service.append_event(session, event(str(number))) for number in range(8)))
        assert sorted(map(str, texts_of(session))) == list("01234567")
        assert texts_of(await read(service)) == texts_of(session)

    framework_plane.run(check())


def test_sessions_at_once_merge_the_states_of_their_user_and_app(framework_plane: Any) -> None:
    services = [FastnessSessionService(plane) for plane in (framework_plane.plane, framework_plane.another())]

    async def use(number: int) -> None:
        service = services[number % 2]
        session = await begin(service, str(number), **{f"user_c{number}": number})
        state: dict[str, Any] = {f"app_{number}": number, f"user_{number}": number}
        await service.append_event(session, event(**state))

    async def check() -> None:
        await asyncio.gather(*map(use, range(8)))
        created = {f"c{number}": number for number in range(8)}
        assert await services[0].get_user_state(**ADA) == {**created, **{str(number): number for number in range(8)}}
        state = (await read(services[1], "3")).state
        assert {key: value for key, value in state.items() if key.startswith("app:")} == {
            f"app:{n}": n for n in range(8)
        }

    framework_plane.run(check())


# Single rules.


@pytest.fixture
def service() -> Iterator[FastnessSessionService]:
    with fastness.open("memory:") as plane:
        yield FastnessSessionService(plane)


async def test_a_session_created_again_under_the_same_id_is_another_session(service: FastnessSessionService) -> None:
    old = await begin(service)
    await service.append_event(old, event("old", a=1))
    await service.delete_session(**ADA, session_id="1")
    with pytest.raises(SessionNotFoundError, match="1"):
        await service.append_event(old, event())
    assert [row.key async for row in service._rows.scan('["shop","ada"]', ())] == []
    new = await begin(service)
    await service.append_event(new, event("new"))
    with pytest.raises(StaleSessionError):
        await service.append_event(old, event())
    found = await read(service)
    assert (texts_of(found), found.state) == (["new"], {})


async def test_the_last_event_is_stored_once_if_it_is_appended_again(service: FastnessSessionService) -> None:
    session = await begin(service)
    before = session.model_copy(deep=True)
    await service.append_event(session, event("a"))
    last = event("b", a=1)
    await service.append_event(session, last)
    behind = await read(service)
    await service.append_event(session, last)
    assert texts_of(session) == texts_of(await read(service)) == ["a", "b"]
    with pytest.raises(StaleSessionError):
        await service.append_event(before, last)
    await service.append_event(behind, event("c"))  # Nothing has changed since it was read.


async def test_an_event_whose_answer_was_lost_is_appended_again_to_the_same_object(
    service: FastnessSessionService, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = await begin(service)
    rows = service._rows
    commit = rows.commit

    async def lose_the_answer(changes: Any) -> None:
        await commit(changes)
        raise fastness.errors.CommitUnknown("lost on purpose")

    with monkeypatch.context() as patched:
        patched.setattr(rows, "commit", lose_the_answer)
        with pytest.raises(fastness.errors.CommitUnknown):
            await service.append_event(session, appended := event("a", a=1))
    assert texts_of(session) == []
    await service.append_event(session, appended)
    assert (texts_of(session), session.state) == (["a"], {"a": 1})
    await service.append_event(session, event("b"))
    assert texts_of(await read(service)) == ["a", "b"]


async def test_a_session_object_of_the_callers_own_is_compared_by_its_last_event(
    service: FastnessSessionService,
) -> None:
    stored = await begin(service)
    own = Session(**ADA, id="1")
    await service.append_event(own, event("a", timestamp=2_000.0))
    await service.append_event(own, event("b", timestamp=2_001.0))
    with pytest.raises(StaleSessionError):
        await service.append_event(stored, event("c"))
    with pytest.raises(StaleSessionError):
        await service.append_event(Session(**ADA, id="1"), event("d"))
    assert texts_of(await read(service)) == texts_of(own) == ["a", "b"]


async def test_temporary_state_is_seen_by_the_invocation_and_not_stored(service: FastnessSessionService) -> None:
    session = await begin(service, temp_a=1, a=1)
    assert session.state == {"a": 1}
    await service.append_event(session, event(temp_b=2, b=2))
    assert session.state == {"a": 1, "b": 2, "temp:b": 2}
    found = await read(service)
    assert found.state == {"a": 1, "b": 2}
    assert found.events[0].actions.state_delta == {"b": 2}


async def test_an_event_is_one_commit(service: FastnessSessionService, monkeypatch: pytest.MonkeyPatch) -> None:
    session = await begin(service)
    rows, commits = service._rows, []
    commit = rows.commit

    async def count_commits(changes: Any) -> None:
        commits.append(changes)
        await commit(changes)

    monkeypatch.setattr(rows, "commit", count_commits)
    await service.append_event(session, event("x" * LARGE, a="x" * LARGE, user_a=1, app_a=1))
    assert len(commits) == 1
    found = await read(service)
    assert (texts_of(found), found.state) == (["x" * LARGE], {"a": "x" * LARGE, "user:a": 1, "app:a": 1})


async def test_values_without_a_form_in_json_are_stored_by_their_description(service: FastnessSessionService) -> None:
    session = await begin(service, a=print)
    await service.append_event(session, event(b=len))
    assert (await read(service)).state == {"a": str(print), "b": str(len)}


async def test_what_cannot_be_stored_is_refused_and_writes_nothing(service: FastnessSessionService) -> None:
    with pytest.raises(InvalidArgument, match="the state cannot be stored"):
        await begin(service, a="\ud800")
    session = await begin(service)
    for refused in (event("\ud800", user_a=1), event(a="\ud800")):
        with pytest.raises(InvalidArgument, match="cannot be stored"):
            await service.append_event(session, refused)
    await service.append_event(session, event("a"))
    assert texts_of(session) == texts_of(await read(service)) == ["a"]


async def test_a_long_session_is_read_in_pages(service: FastnessSessionService) -> None:
    session = await begin(service)
    for number in range(250):
        await service.append_event(session, event(str(number), timestamp=float(number)))
    assert texts_of(await read(service)) == [str(number) for number in range(250)]
    assert texts_of(await read(service, num_recent_events=120)) == [str(number) for number in range(130, 250)]
    assert texts_of(await read(service, after_timestamp=40.0)) == [str(number) for number in range(40, 250)]


async def test_sessions_of_many_users_are_listed(service: FastnessSessionService) -> None:
    for number in range(120):
        await service.create_session(app_name="shop", user_id=f"user {number}", session_id="1", state={"n": number})
    await service.create_session(app_name="shop2", user_id="user", session_id="1")
    listed = (await service.list_sessions(app_name="shop")).sessions
    assert [session.state["n"] for session in listed] == list(range(120))
