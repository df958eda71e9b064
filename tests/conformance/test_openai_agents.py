"""Sessions of the OpenAI Agents SDK, on every kind of plane: they answer like the SDK's own session."""

import asyncio
import random
from itertools import count
from typing import Any

import pytest
from agents import Agent, RunConfig, Runner, function_tool
from agents.memory import Session, SessionSettings, SQLiteSession
from agents.testing import ScriptedModel, assistant_message, function_call
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fastness
from fastness.errors import InvalidArgument, Unsupported
from fastness.limits import BLOB_GRACE_SECONDS, SESSION_CLEARED_SECONDS
from fastness.openai_agents import FastnessSession
from fastness.testing.clock import ManualClock

CALLS_MAX = 12
LARGE = 100_000  # Bytes: more than a row takes.
_numbers = count()

texts = st.text(max_size=8) | st.just("(large)")
items = st.fixed_dictionaries(
    {"role": st.sampled_from(("user", "assistant")), "content": texts}, optional={"n": st.none() | st.floats(-9, 9)}
)
limits = st.none() | st.integers(-1, 8)
calls = st.one_of(
    st.tuples(st.just("add_items"), st.lists(items, max_size=4)),
    st.tuples(st.just("add_items"), st.just("(many)")),
    st.tuples(st.just("get_items"), limits),
    st.tuples(st.just("pop_item")),
    st.tuples(st.just("clear_session")),
)


def new_id() -> str:
    return f"session {next(_numbers)}"


def item(text: str) -> Any:
    return {"role": "user", "content": text}


def expanded(argument: Any) -> Any:
    """An argument as it is given to both sessions; short forms keep failures readable."""
    if argument == "(many)":
        return [item(str(number)) for number in range(300)]
    if isinstance(argument, list):
        return [{**given, "content": given["content"].replace("(large)", "x" * LARGE)} for given in argument]
    return argument


def test_it_is_a_session_of_the_sdk() -> None:
    with fastness.open("memory:") as plane:
        assert isinstance(FastnessSession(plane, "7"), Session)
    with pytest.raises(InvalidArgument, match="not str"):
        FastnessSession("memory:", "7")  # type: ignore[arg-type]


def test_calls_in_any_order_have_the_answers_of_the_sdks_own_session(framework_plane: Any) -> None:
    @settings(max_examples=15, suppress_health_check=list(HealthCheck))
    @given(st.lists(calls, max_size=CALLS_MAX), limits)
    def check(made: list[tuple[Any, ...]], limit: int | None) -> None:
        framework_plane.run(compare(framework_plane.plane, made, SessionSettings(limit=limit)))

    check()


async def compare(plane: Any, made: list[tuple[Any, ...]], session_settings: SessionSettings) -> None:
    id = new_id()
    theirs = SQLiteSession(id, session_settings=session_settings)
    try:
        for name, *arguments in [*made, ("get_items",)]:
            ours = FastnessSession(plane, id, session_settings=session_settings)
            given = [expanded(argument) for argument in arguments]
            answers = [await getattr(session, name)(*given) for session in (ours, theirs)]
            assert answers[0] == answers[1]
        assert await FastnessSession(plane, id).get_items() == await theirs.get_items(-1)
    finally:
        theirs.close()


def test_items_of_one_call_are_one_commit_however_many_and_large(framework_plane: Any) -> None:
    added = [item("x" * size) for size in [20_000] * 300 + [5_000_000] + [10] * 400]

    async def check() -> None:
        session = FastnessSession(framework_plane.plane, "7")
        await session.add_items(added)
        assert await session.get_items() == added
        assert await session.get_items(401) == added[-401:]
        counted = framework_plane.plane.collection("openai-agents").get("7", ("n",))
        assert (await counted if asyncio.iscoroutine(counted) else counted).version == 1

    framework_plane.run(check())


def test_writers_at_once_lose_nothing_and_keep_the_items_of_a_call_together(framework_plane: Any) -> None:
    planes = [framework_plane.plane, framework_plane.another(), framework_plane.another()]

    async def add(writer: int, plane: Any) -> None:
        session = FastnessSession(plane, "7")
        for call in range(10):
            await session.add_items([item(f"{writer} {call} {number}") for number in range(3)])

    async def check() -> list[str]:
        await asyncio.gather(*(add(writer, plane) for writer, plane in enumerate(planes)))
        items: list[Any] = await FastnessSession(planes[0], "7").get_items()
        return [found["content"] for found in items]

    found = framework_plane.run(check())
    assert sorted(found) == sorted(
        f"{writer} {call} {number}" for writer in range(3) for call in range(10) for number in range(3)
    )
    for start in range(0, len(found), 3):
        together = [text.split() for text in found[start : start + 3]]
        assert [number for _, _, number in together] == ["0", "1", "2"]
        assert len({(writer, call) for writer, call, _ in together}) == 1
    for writer in range(3):
        calls = [int(text.split()[1]) for text in found if text.startswith(f"{writer} ")]
        assert calls == sorted(calls)


def test_pops_at_once_take_each_item_once(framework_plane: Any) -> None:
    planes = [framework_plane.plane, framework_plane.another()]

    async def check() -> list[Any]:
        await FastnessSession(planes[0], "7").add_items([item(str(number)) for number in range(8)])
        pops = [FastnessSession(random.choice(planes), "7").pop_item() for _ in range(10)]
        return list(await asyncio.gather(*pops))

    popped = framework_plane.run(check())
    assert sorted(found["content"] for found in popped if found is not None) == [str(number) for number in range(8)]


@pytest.mark.parametrize(
    ("added", "problem"),
    [
        ([item("a"), {"role": "user", "content": object()}], "as JSON"),
        ("a text", "is a str"),
        ([item("x" * LARGE), None], "NoneType"),
    ],
)
async def test_items_that_are_no_items_are_refused_and_nothing_is_added(added: Any, problem: str) -> None:
    with fastness.open("memory:") as plane:
        session = FastnessSession(plane, "7")
        with pytest.raises(InvalidArgument, match=problem):
            await session.add_items(added)
        assert await session.get_items() == []
        assert plane.collection("openai-agents").scan("7").rows == []


async def test_a_cancelled_caller_continues_after_its_write_has_ended() -> None:
    with fastness.open("memory:") as plane:
        session = FastnessSession(plane, "7")
        adding = asyncio.create_task(session.add_items([item("a")]))
        await asyncio.sleep(0)  # It has begun.
        adding.cancel()
        with pytest.raises(asyncio.CancelledError):
            await adding
        assert await session.get_items() == [item("a")]


async def test_large_items_are_kept_as_long_as_the_session_has_them() -> None:
    clock = ManualClock()
    with fastness.open("memory:", clock=clock) as plane:
        session = FastnessSession(plane, "7")
        await session.add_items([item("x" * LARGE), item("y" * LARGE)])
        await session.pop_item()
        stored = collected_bytes(plane, clock)
        assert LARGE < stored < 2 * LARGE
        assert await session.get_items() == [item("x" * LARGE)]
        await session.clear_session()
        assert collected_bytes(plane, clock) == 0


def collected_bytes(plane: fastness.Plane, clock: ManualClock) -> int:
    """The bytes of all blobs that are left after a collection."""
    for _ in range(3):
        plane.gc()
        clock.advance_ms(int(BLOB_GRACE_SECONDS * 1_000) + 1)
    return plane.gc().kept_bytes


async def test_a_plane_without_an_object_store_keeps_large_items_in_rows(postgres_url: str) -> None:
    with fastness.open(postgres_url) as plane:
        session = FastnessSession(plane, "7")
        await session.add_items([item("x" * LARGE), item("y" * 900_000)])
        with pytest.raises(Unsupported, match="object store"):
            await session.add_items([item("small"), item("z" * 2_000_000)])
        assert await session.get_items() == [item("x" * LARGE), item("y" * 900_000)]


async def test_nothing_is_left_of_a_cleared_session_after_a_day() -> None:
    clock = ManualClock()
    with fastness.open("memory:", clock=clock) as plane:
        rows = plane.collection("openai-agents")
        for session in (FastnessSession(plane, "7"), FastnessSession(plane, "8")):
            await session.add_items([item("a")])
            await session.clear_session()
        await session.add_items([item("b")])  # Is used again.
        clock.advance_ms(SESSION_CLEARED_SECONDS * 1_000)
        assert rows.scan("7").rows == []
        assert await session.get_items() == [item("b")]
        await session.add_items([item("c")])
        assert await session.get_items() == [item("b"), item("c")]


async def test_a_run_reads_what_earlier_runs_have_added() -> None:
    @function_tool
    def weather(city: str) -> str:
        return f"sunny in {city}"

    model = ScriptedModel(
        [
            [function_call("weather", {"city": "Kiel"}, call_id="c1")],
            [assistant_message("Sunny.")],
            [assistant_message("You are welcome.")],
        ]
    )
    agent = Agent(name="helper", model=model, tools=[weather])
    with fastness.open("memory:") as plane:
        for question in ("How is it in Kiel?", "Thanks!"):
            session = FastnessSession(plane, "7")
            await Runner.run(agent, question, session=session, run_config=RunConfig(tracing_disabled=True))
        items = await FastnessSession(plane, "7").get_items()
        kinds = [found.get("type", found.get("role")) for found in items]
    assert kinds == ["user", "function_call", "function_call_output", "message", "user", "message"]
    assert [found.get("output") for found in model.calls[2].input if "output" in found] == ["sunny in Kiel"]
