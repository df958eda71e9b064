"""The tools of MCP over a plane in memory, called by the SDK's client as agents of one fleet."""

import asyncio
import base64
import json
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final
from urllib.parse import quote

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mcp import Client
from mcp.shared.exceptions import MCPError

import fastness
from fastness.handles.queues import MessageOptions
from fastness.limits import MCP_CONTENT_BYTES_MAX, MCP_MAILS_MAX
from fastness.mcp import Caller, durable_tasks, make_server
from fastness.mcp.contents import BYTES, JSON, content_of, shares
from fastness.mcp.exposed_tools import ExposedTool
from fastness.mcp.tools import TOOLS
from fastness.names import checked_key
from fastness.testing.clock import ManualClock
from tests.support.failures import Failures

Answer = dict[str, Any]
BY_NAME: Final = {tool.name: tool for tool in TOOLS}
SETTLING: Final = ("queue_ack", "queue_nack", "queue_extend", "lease_keep", "lease_release")


class Agent:
    """An agent that calls tools, and checks that each answer is what the tool's schema promises."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.called: set[str] = set()

    async def __call__(self, tool: str, **arguments: Any) -> Answer:
        found = await self.client.call_tool(tool, arguments)
        assert not found.is_error, found.content
        answer: Answer | None = found.structured_content
        assert answer is not None
        jsonschema.validate(answer, BY_NAME[tool].listed.output_schema)
        assert json.loads(found.content[0].text) == answer, "clients without structured content read the same"
        self.called.add(tool)
        return answer

    async def refused(self, tool: str, **arguments: Any) -> tuple[str, str]:
        """The code of the error, and the text that the model reads."""
        found = await self.client.call_tool(tool, arguments)
        assert found.is_error, found.structured_content
        assert found.structured_content is not None
        assert found.structured_content["advice"]
        return found.structured_content["code"], found.content[0].text

    async def read_all(self, content: Answer) -> Any:
        """A body, read on as `rest` of each part says: a JSON value, text or bytes."""
        if "encoding" not in content:
            return content["value"]
        data = b""
        while True:
            value = content["value"]
            data += base64.b64decode(value) if content["encoding"] == "base64" else value.encode()
            if "rest" not in content:
                assert len(data) == content["size"]
                return data
            called = re.fullmatch(r"Call (\w+) with (.*)\.", content["rest"])
            assert called is not None, content["rest"]
            arguments = eval(f"dict({called[2]})", {})
            content = next(_contents(await self(called[1], **arguments)))
            assert content["value"], "each part makes progress"


def _contents(answer: Any) -> Iterator[Answer]:
    """The bodies in an answer."""
    if isinstance(answer, dict) and "size" in answer and "value" in answer:
        yield answer
    elif isinstance(answer, dict | list):
        for each in answer.values() if isinstance(answer, dict) else answer:
            yield from _contents(each)


class Fleet:
    """Agents of one plane, each with its own connection."""

    def __init__(self, plane: fastness.AsyncPlane, agents: dict[str, Agent]) -> None:
        self.plane = plane
        self.ada, self.bob = agents["ada"], agents["bob"]


@asynccontextmanager
async def _fleet(clock: ManualClock) -> AsyncIterator[Fleet]:
    async with AsyncExitStack() as stack:
        plane = await stack.enter_async_context(fastness.open_async("memory:", clock=clock))

        async def connected(name: str) -> Agent:
            caller = Caller(plane=plane, agent=name)
            return Agent(await stack.enter_async_context(Client(make_server(lambda context: caller))))

        yield Fleet(plane, {name: await connected(name) for name in ("ada", "bob")})


@pytest.fixture
async def fleet(clock: ManualClock) -> AsyncIterator[Fleet]:
    opened: asyncio.Future[Fleet] = asyncio.get_running_loop().create_future()
    done = asyncio.Event()

    async def hold() -> None:
        async with _fleet(clock) as fleet:
            opened.set_result(fleet)
            await done.wait()

    # A client must be closed by the task that has opened it.
    holding: asyncio.Future[Any] = asyncio.create_task(hold())
    await asyncio.wait([holding, opened], return_when=asyncio.FIRST_COMPLETED)
    if opened.done():
        yield opened.result()
    done.set()
    await holding


# What every tool has.


def test_every_tool_and_every_field_is_described() -> None:
    failures = Failures()
    for tool in TOOLS:
        with failures.of(tool):
            listed = tool.listed
            assert re.fullmatch(r"[a-z_]{3,40}", listed.name)
            assert 40 <= len(listed.description or "") <= 500
            assert listed.output_schema is not None
            for schema in (listed.input_schema, listed.output_schema):
                assert schema["type"] == "object"
                for place, each in [(listed.name, schema), *schema.get("$defs", {}).items()]:
                    for name, field in each.get("properties", {}).items():
                        described = (
                            field.get("description") or schema["$defs"][field["$ref"].rpartition("/")[2]]["description"]
                        )
                        assert len(described) > 10, (place, name)
            for each in (listed.input_schema, *listed.input_schema.get("$defs", {}).values()):
                assert each["additionalProperties"] is False
                assert not {"agent", "owner", "sender", "from", "universe"} & set(each["properties"]), (
                    "the token says who calls"
                )
    failures.check()


@pytest.mark.parametrize("name", SETTLING)
def test_every_settling_tool_requires_a_fence(name: str) -> None:
    schema = BY_NAME[name].listed.input_schema
    settled = schema["$defs"]["LeaseProof"] if "leases" in schema["properties"] else schema
    assert {"lease_id", "fence"} <= set(settled["required"])


def test_annotations_say_what_a_tool_changes() -> None:
    reading = {tool.name for tool in TOOLS if tool.read_only and not tool.name.startswith("task_")}
    assert reading == {
        *("mail_read", "mail_contacts", "queue_list", "queue_status", "queue_result", "dead_letters_search"),
        *("lease_list", "state_get", "entity_get", "world_read", "world_query", "blob_get"),
    }
    destructive = {tool.name for tool in TOOLS if tool.destructive and not tool.name.startswith("task_")}
    assert destructive == {"mail_confirm", "queue_nack", "dead_letters_redrive", "state_set", "entity_set"}
    assert not reading & destructive


# Mail.


async def test_mail_is_read_again_until_it_is_confirmed(fleet: Fleet) -> None:
    sent = await fleet.ada("mail_send", to="bob", body={"ask": "review"}, thread="pr-7", idempotency_key="ask-1")
    again = await fleet.ada("mail_send", to="bob", body={"ask": "review"}, thread="pr-7", idempotency_key="ask-1")
    assert (sent["duplicate"], again["duplicate"]) == (False, True)
    await fleet.ada("mail_send", to="bob", body=base64.b64encode(b"\x00\xff").decode(), is_base64=True)
    first = second = Answer()
    for _ in range(2):
        read = await fleet.bob("mail_read")
        first, second = read["mails"]
        assert (first["sender"], first["thread"], first["body"]["value"]) == ("ada@main", "pr-7", {"ask": "review"})
        assert await fleet.bob.read_all(second["body"]) == b"\x00\xff"
        assert read["waiting"] == 2
    assert (await fleet.ada("mail_read"))["mails"] == [], "an agent reads its own mailbox"
    assert await fleet.ada("mail_confirm", ids=[first["id"]]) == {"confirmed": 0}, "and confirms its own mail"
    assert await fleet.bob("mail_confirm", ids=[first["id"]]) == {"confirmed": 1}
    assert [mail["id"] for mail in (await fleet.bob("mail_read"))["mails"]] == [second["id"]]
    later = await fleet.bob("mail_read", after=second["sequence"])
    assert later["mails"] == []


async def test_contacts_are_the_registered_agents_and_those_with_a_mailbox(fleet: Fleet) -> None:
    await fleet.plane.agents.register("cleo", public_key=fastness.AgentKey.generate().public_key)
    await fleet.ada("mail_send", to="bob", body="hello")
    await fleet.bob("mail_send", to="dora", body="hello")
    first = await fleet.ada("mail_contacts", limit=2, after="ada")
    assert [(each["name"], each["is_registered"], each["has_key"]) for each in first["agents"]] == [
        ("bob", False, False),
        ("cleo", True, True),
    ]
    second = await fleet.ada("mail_contacts", limit=2, after=first["next"])
    assert ([each["name"] for each in second["agents"]], second["next"]) == (["dora"], None)


# Queues.


async def test_queue_put_takes_every_option_of_a_message(fleet: Fleet) -> None:
    put = {"queue": "jobs", "body": "text", "key": "ada", "max_attempts": 2, "attributes": {"city": "Delft"}}
    first = await fleet.ada("queue_put", **put, unique_key="once", ttl_seconds=60)
    again = await fleet.ada("queue_put", **put, unique_key="once", ttl_seconds=60)
    assert (again["id"], again["duplicate"]) == (first["id"], True)
    [message] = (await fleet.bob("queue_receive", queue="jobs"))["messages"]
    assert (message["id"], message["max_attempts"], message["body"]["value"]) == (first["id"], 2, "text")
    options = BY_NAME["queue_put"].listed.input_schema["properties"].keys() - {"queue", "body", "is_base64"}
    assert options == MessageOptions.__annotations__.keys()


async def test_work_goes_from_put_to_result(fleet: Fleet) -> None:
    put = await fleet.ada("queue_put", queue="jobs", body={"n": 1}, idempotency_key="k", keep_result=True)
    assert (await fleet.ada("queue_put", queue="jobs", body={"n": 1}, idempotency_key="k"))["duplicate"]
    assert (await fleet.ada("queue_result", queue="jobs", id=put["id"]))["state"] == "pending"
    [line] = (await fleet.bob("queue_list"))["queues"]
    assert (line["name"], line["ready"]) == ("jobs", 1)
    [message] = (await fleet.bob("queue_receive", queue="jobs", max_messages=3))["messages"]
    assert (message["id"], message["body"]["value"], message["attempts"]) == (put["id"], {"n": 1}, 1)
    lease = {key: message[key] for key in ("id", "lease_id", "fence")}
    seen_by_bob = await fleet.bob("queue_status", queue="jobs", id=put["id"], body_start=0)
    assert {"id": put["id"], **{key: seen_by_bob[key] for key in ("lease_id", "fence")}} == lease
    seen_by_ada = await fleet.ada("queue_status", queue="jobs", id=put["id"])
    assert (seen_by_ada["state"], seen_by_ada["owner"], "fence" in seen_by_ada) == ("leased", "bob", False)
    extended = await fleet.bob("queue_extend", queue="jobs", **lease, lease_seconds=3_600)
    assert extended["expires_at"] > message["expires_at"]
    for _ in range(2):
        assert await fleet.bob("queue_ack", queue="jobs", **lease, result=[1, 2]) == {"settled": "done"}
    outcome = await fleet.ada("queue_result", queue="jobs", id=put["id"])
    assert (outcome["state"], outcome["result"]["value"]) == ("done", [1, 2])
    assert (await fleet.ada("queue_receive", queue="jobs"))["messages"] == []


async def test_a_stale_fence_is_refused_with_what_to_do(fleet: Fleet, clock: ManualClock) -> None:
    await fleet.ada("queue_put", queue="jobs", body="work")
    received = await fleet.ada("queue_receive", queue="jobs", lease_seconds=60)
    [old] = received["messages"]
    assert all(
        word in received["at_expiry"] for word in ("60 s", "jobs", "queue_extend", "dead letter", "higher fence")
    )
    clock.advance_ms(60_000)
    [new] = (await fleet.bob("queue_receive", queue="jobs", wait_seconds=5))["messages"]
    assert (new["id"], new["attempts"]) == (old["id"], 2)
    assert new["fence"] > old["fence"]
    stale = {"queue": "jobs", **{key: old[key] for key in ("id", "lease_id", "fence")}}
    for tool, more in (("queue_ack", {}), ("queue_nack", {"error": "no"}), ("queue_extend", {})):
        code, text = await fleet.ada.refused(tool, **stale, **more)
        assert code == "queue_message_lease_mismatch"
        assert "Stop working on it" in text
        assert "queue_receive" in text
    wrong = stale | {"lease_id": new["lease_id"]}
    assert (await fleet.ada.refused("queue_ack", **wrong))[0] == "queue_message_lease_mismatch", "with the old fence"
    await fleet.bob("queue_ack", queue="jobs", **{key: new[key] for key in ("id", "lease_id", "fence")})


async def test_nothing_extends_the_leases_of_a_tool(fleet: Fleet) -> None:
    await fleet.ada("queue_put", queue="jobs", body=1)
    await fleet.ada("queue_receive", queue="jobs")
    await fleet.ada("lease_acquire", keys=["a"])
    assert fleet.plane._transport.lease_renewer._thread is None, "its thread starts with the first lease to extend"  # type: ignore[attr-defined]


async def test_failed_work_is_returned_and_dead_letters_are_found_and_retried(fleet: Fleet, clock: ManualClock) -> None:
    ids = [(await fleet.ada("queue_put", queue="jobs", body={"order": n}))["id"] for n in range(5)]
    [first] = (await fleet.ada("queue_receive", queue="jobs"))["messages"]
    lease = {key: first[key] for key in ("id", "lease_id", "fence")}
    assert await fleet.ada("queue_nack", queue="jobs", **lease, error="busy", delay_seconds=0) == {
        "settled": "returned"
    }
    for message in (await fleet.ada("queue_receive", queue="jobs", max_messages=10))["messages"]:
        number = message["body"]["value"]["order"]
        assert message["last_error"] == ("busy" if number == 0 else None)
        lease = {key: message[key] for key in ("id", "lease_id", "fence")}
        error = "Timeout of the shop" if number % 2 else "Bad address"
        assert (await fleet.ada("queue_nack", queue="jobs", **lease, error=error, reject=True))["settled"] == "rejected"
    all_of_them = await fleet.bob("dead_letters_search", queue="jobs", limit=2)
    assert (len(all_of_them["letters"]), all_of_them["scanned"], all_of_them["is_complete"]) == (2, 5, True)
    rest = await fleet.bob("dead_letters_search", queue="jobs", after=all_of_them["next"])
    assert ([each["id"] for each in rest["letters"]], rest["next"]) == (ids[2:], None)
    by_error = await fleet.bob("dead_letters_search", queue="jobs", error="timeout")
    assert [each["id"] for each in by_error["letters"]] == [ids[1], ids[3]]
    by_text = await fleet.bob("dead_letters_search", queue="jobs", text='"ORDER":4')
    assert [each["body"]["value"] for each in by_text["letters"]] == [{"order": 4}]
    assert await fleet.bob("dead_letters_redrive", queue="jobs", ids=[ids[1], ids[3]]) == {"redriven": 2}
    again = await fleet.bob("queue_receive", queue="jobs", max_messages=10)
    assert {message["id"] for message in again["messages"]} == {ids[1], ids[3]}
    assert (await fleet.bob.refused("dead_letters_search", queue="jobs", after=ids[1]))[0] == "invalid_argument"
    dead = await fleet.ada("queue_status", queue="jobs", id=ids[0], body_start=0)
    assert (dead["state"], dead["last_error"], dead["body"]["value"]) == ("dead", "Bad address", {"order": 0})


@pytest.mark.parametrize("state", ["ready", "leased", "done", "cancelled"])
async def test_the_task_of_another_agent_cannot_be_read_as_a_message(fleet: Fleet, state: str) -> None:
    tool = ExposedTool("resize", "queue", "resize", "Resizes an image.", {"type": "object"})
    task_id = await durable_tasks.create(Caller(plane=fleet.plane, agent="ada"), tool, {"width": 3})
    queue, id = fleet.plane.queue("resize"), task_id.removeprefix("resize.")
    if state in ("leased", "done"):
        [message] = (await fleet.bob("queue_receive", queue="resize"))["messages"]
        mine = await fleet.bob("queue_status", queue="resize", id=id)
        assert mine["fence"] == message["fence"], "its consumer may read it"
        if state == "done":
            lease = {key: message[key] for key in ("id", "lease_id", "fence")}
            await fleet.bob("queue_ack", queue="resize", **lease, result="secret")
    elif state == "cancelled":
        await queue.cancel(id)
    assert (await fleet.ada("queue_status", queue="resize", id=id))["state"] == state
    if state != "leased":
        assert (await fleet.bob.refused("queue_status", queue="resize", id=id))[0] == "message_not_found"
    assert (await fleet.bob.refused("queue_result", queue="resize", id=id))[0] == "message_not_found"
    await fleet.ada("queue_result", queue="resize", id=id)


async def test_the_run_of_another_agent_cannot_be_reached(fleet: Fleet) -> None:
    tool = ExposedTool("research", "workflow", "research", "Researches.", {"type": "object"})
    task_id = await durable_tasks.create(Caller(plane=fleet.plane, agent="ada"), tool, {"topic": "tides"})
    run_id = task_id.removeprefix("run:")
    missing = run_id.translate(str.maketrans("0123456789", "9876543210"))
    calls: list[tuple[str, Answer]] = [
        ("world_query", {"run_id": run_id}),
        ("world_signal", {"run_id": run_id, "name": "input:size", "value": {"action": "accept"}}),
        ("world_read", {"world": task_id}),
        ("world_append", {"world": task_id, "entries": [1], "expected_head": 0}),
        ("world_append", {"world": task_id, "entries": [1], "expected_head": 0, "create": True}),
    ]
    for name, arguments in calls:
        code, text = await fleet.bob.refused(name, **arguments)
        assert code == "run_not_found"
        other = {
            key: each.replace(run_id, missing) if isinstance(each, str) else each for key, each in arguments.items()
        }
        assert await fleet.bob.refused(name, **other) == (code, text.replace(run_id, missing)), "as if it did not exist"
    assert (await fleet.bob.refused("task_cancel", task_id=task_id))[0] == "not_found"
    with pytest.raises(MCPError):
        await fleet.bob.client.read_resource(f"fastness://main/worlds/{quote(task_id, safe='')}")

    assert (await fleet.ada("world_query", run_id=run_id))["state"] == "running"
    assert (await fleet.ada("world_read", world=task_id))["head"] == 0
    await fleet.ada("world_signal", run_id=run_id, name="input:size", value={"action": "accept"})


# Leases.


async def test_a_reserved_file_is_refused_with_its_owner_and_until_when(fleet: Fleet, clock: ManualClock) -> None:
    files = ["src/app.py", "src/ui/page.tsx"]
    acquired = await fleet.ada("lease_acquire", keys=files, lease_seconds=60)
    leases = acquired["leases"]
    assert [lease["key"] for lease in leases] == files
    assert all(word in acquired["at_expiry"] for word in ("60 s", "any other agent", "lease_keep", "lease_release"))
    code, text = await fleet.bob.refused("lease_acquire", keys=["README.md", "src/app.py"])
    assert code == "lease_held"
    assert all(part in text for part in ("ada holds src/app.py", leases[0]["expires_at"], "another 60 s", "mail_send"))
    listed = (await fleet.bob("lease_list"))["leases"]
    assert [(each["key"], each["owner"], "fence" in each) for each in listed] == [
        (file, "ada", False) for file in files
    ]
    own = (await fleet.ada("lease_list"))["leases"]
    proofs = [{key: each[key] for key in ("key", "lease_id", "fence")} for each in own]
    assert proofs == [{key: each[key] for key in ("key", "lease_id", "fence")} for each in leases]
    kept = await fleet.ada("lease_keep", leases=proofs[:1], lease_seconds=120)
    assert kept["leases"][0]["expires_at"] > leases[0]["expires_at"]
    clock.advance_ms(60_000)
    [taken] = (await fleet.bob("lease_acquire", keys=["src/ui/page.tsx"]))["leases"]
    assert taken["fence"] > leases[1]["fence"]
    code, text = await fleet.ada.refused("lease_keep", leases=proofs)
    assert code == "lease_conflict"
    assert "src/ui/page.tsx was acquired by another owner" in text
    assert "kept: src/app.py" in text
    assert await fleet.ada("lease_release", leases=proofs) == {
        "released": ["src/app.py"],
        "not_held": ["src/ui/page.tsx"],
    }
    await fleet.bob("lease_acquire", keys=files)


async def test_a_refused_reservation_changes_nothing(fleet: Fleet) -> None:
    [mine] = (await fleet.ada("lease_acquire", keys=["b"]))["leases"]
    await fleet.bob("lease_acquire", keys=["c"])
    await fleet.ada.refused("lease_acquire", keys=["a", "b", "c"])
    assert (await fleet.bob("lease_acquire", keys=["a"]))["leases"], "what was acquired before the refusal is free"
    proof = {key: mine[key] for key in ("key", "lease_id", "fence")}
    await fleet.ada("lease_keep", leases=[proof])
    [again] = (await fleet.ada("lease_acquire", keys=["b"]))["leases"]
    assert again["fence"] > mine["fence"]
    assert (await fleet.ada.refused("lease_keep", leases=[proof]))[0] == "fencing_mismatch"


async def test_a_refused_reservation_releases_no_key_that_was_held_before(
    fleet: Fleet, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fleet.ada("lease_acquire", keys=["b"], lease_seconds=600)
    await fleet.ada("lease_acquire", keys=["c"], lease_seconds=60)
    acquire = fastness.AsyncLeaseKey.acquire

    async def acquire_late(lease: Any, *args: Any, **options: Any) -> Any:
        if lease.key == "c" and args[0] == "ada":  # It expires during the call, and another agent acquires it.
            clock.advance_ms(60_000)
            await fleet.bob("lease_acquire", keys=["c"])
        return await acquire(lease, *args, **options)

    monkeypatch.setattr(fastness.AsyncLeaseKey, "acquire", acquire_late)
    code, text = await fleet.ada.refused("lease_acquire", keys=["a", "b", "c"], lease_seconds=600)
    assert code == "lease_held"
    assert "You still hold b, with new fences: see lease_list" in text
    assert [(each["key"], each["owner"]) for each in (await fleet.ada("lease_list"))["leases"]] == [
        ("b", "ada"),
        ("c", "bob"),
    ]


async def test_a_reservation_that_the_client_gives_up_leaves_nothing_behind(fleet: Fleet) -> None:
    async def holds(key: str) -> bool:
        return (await fleet.plane.lease(key).describe()).held

    await fleet.bob("lease_acquire", keys=["b"])
    waiting = asyncio.create_task(fleet.ada("lease_acquire", keys=["a", "b"], wait_seconds=20))
    async with asyncio.timeout(60):
        while not await holds("a"):
            await asyncio.sleep(0)
        waiting.cancel()
        while await holds("a"):
            await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await waiting


@pytest.mark.parametrize(
    ("path", "written"),
    [
        ("/app/[id]/page.tsx", "app/=5Bid=5D/page.tsx"),
        ("./src/../übung 1.py", "src/=C3=BCbung=201.py"),
        ("src\\app.py", "src/app.py"),
        ("a=b c", "a=3Db=20c"),
    ],
)
async def test_a_path_that_is_no_key_is_refused_with_how_to_write_it(fleet: Fleet, path: str, written: str) -> None:
    code, text = await fleet.ada.refused("lease_acquire", keys=[path])
    assert code == "invalid_name"
    assert repr(written) in text
    assert checked_key("lease", written) == written
    assert (await fleet.ada("lease_acquire", keys=[written]))["leases"][0]["key"] == written


# State, entities and worlds.


async def test_a_document_is_written_only_over_what_was_read(fleet: Fleet, clock: ManualClock) -> None:
    assert await fleet.ada("state_get", key="plan/7") == {"exists": False}
    first = await fleet.ada("state_set", key="plan/7", value={"step": 1}, if_absent=True)
    assert (await fleet.bob.refused("state_set", key="plan/7", value={}, if_absent=True))[0] == "cas_mismatch"
    assert (await fleet.bob.refused("state_set", key="plan/7", value={}))[0] == "invalid_argument"
    found = await fleet.bob("state_get", key="plan/7")
    assert (found["document"]["value"], found["etag"], found["version"]) == ({"step": 1}, first["etag"], 1)
    await fleet.bob("state_set", key="plan/7", value={"step": 2}, if_match=found["etag"])
    code, text = await fleet.ada.refused("state_set", key="plan/7", value={}, if_match=first["etag"])
    assert code == "cas_mismatch"
    assert "get it again" in text

    etag = (await fleet.ada("state_get", key="plan/7"))["etag"]
    [lease] = (await fleet.ada("lease_acquire", keys=["plan/7"], lease_seconds=60))["leases"]
    held = {key: lease[key] for key in ("lease_id", "fence")}
    assert (await fleet.bob.refused("state_set", key="plan/7", value=0, if_match=etag))[0] == "lease_required"
    written = await fleet.ada("state_set", key="plan/7", value=3, if_match=etag, lease=held)
    clock.advance_ms(60_000)
    late = {"value": 4, "if_match": written["etag"], "lease": held}
    assert (await fleet.ada.refused("state_set", key="plan/7", **late))[0] == "lease_expired"


async def test_an_entity_is_written_only_at_the_version_that_was_read(fleet: Fleet) -> None:
    assert await fleet.ada("entity_get", kind="order", id="7") == {"exists": False}
    assert await fleet.ada("entity_set", kind="order", id="7", fields={"total": 9}, expected_version=0) == {
        "version": 1
    }
    found = await fleet.bob("entity_get", kind="order", id="7")
    assert (found["fields"]["value"], found["version"]) == ({"total": 9}, 1)
    await fleet.bob("entity_set", kind="order", id="7", fields={"paid": True}, expected_version=1)
    code, text = await fleet.ada.refused("entity_set", kind="order", id="7", fields={}, expected_version=1)
    assert code == "invalid_argument", "an entity has at least one field"
    code, text = await fleet.ada.refused("entity_set", kind="order", id="7", fields={"x": 1}, expected_version=1)
    assert code == "version_conflict"
    assert "has version 2, not 1" in text
    assert (await fleet.ada("entity_get", kind="order", id="7"))["fields"]["value"] == {"paid": True}


async def test_a_journal_is_appended_to_at_the_head_that_was_read(fleet: Fleet) -> None:
    assert (await fleet.ada.refused("world_read", world="log"))[0] == "world_not_found"
    assert (await fleet.ada.refused("world_append", world="log", entries=[1], expected_head=0))[0] == "world_not_found"
    appended = await fleet.ada("world_append", world="log", entries=[{"n": 1}, "two"], expected_head=0, create=True)
    assert (appended["height"], appended["head"]) == (0, 2)
    code, text = await fleet.bob.refused("world_append", world="log", entries=[0], expected_head=0, create=True)
    assert code == "head_advanced"
    assert "The journal's head is 2, not 0" in text
    read = await fleet.bob("world_read", world="log", start=1)
    assert ([entry["value"]["value"] for entry in read["entries"]], read["head"]) == (["two"], 2)
    await fleet.bob("world_append", world="log", entries=[None], expected_head=read["head"])


async def test_values_that_json_lacks_are_shown_as_text(fleet: Fleet) -> None:
    world = fleet.plane.world("log")
    await world.create()
    await world.append([{1: b"\xff", "n": float("nan"), "big": 2**80, "list": (1, 2)}], expected_head=0)
    [entry] = (await fleet.ada("world_read", world="log"))["entries"]
    assert entry["value"]["value"] == {"1": "/w==", "n": "nan", "big": str(2**80), "list": [1, 2]}


async def test_a_run_is_queried_and_signalled(fleet: Fleet) -> None:
    app = fastness.HostApp()

    @app.workflow(name="approval")
    async def approval(run: fastness.WorkflowRun, what: str) -> str:
        run.state({"waits_for": "approval"})
        answer = await run.wait_for("approve")
        return f"{what}: {answer}"

    run = await fleet.plane.workflows.start("approval", "order 7", id="r7")
    async with fastness.AsyncHost(fleet.plane, app):
        assert (await fleet.ada("world_query", run_id=run.id))["state"] == "running"
        assert await fleet.ada("world_signal", run_id=run.id, name="approve", value="yes") == {"accepted": True}
        done = await fleet.ada("world_query", run_id=run.id, wait_seconds=20)
    assert (done["state"], done["result"]["value"]) == ("completed", "order 7: yes")
    assert done["published"]["value"] == {"waits_for": "approval"}
    assert (await fleet.ada.refused("world_signal", run_id=run.id, name="approve"))[0] == "run_ended"
    assert (await fleet.ada.refused("world_query", run_id="none"))[0] == "run_not_found"


# Bodies.


TEXT: Final = "Grüße, 世界! 🚀 " * 10_000
BINARY: Final = bytes(range(256)) * 300


async def test_a_blob_is_read_in_parts(fleet: Fleet) -> None:
    text = await fleet.ada("blob_put", content=TEXT)
    assert (await fleet.ada.read_all((await fleet.bob("blob_get", hash=text["hash"]))["content"])) == (TEXT.encode())
    binary = await fleet.ada("blob_put", content=base64.b64encode(BINARY).decode(), is_base64=True)
    assert binary["size"] == len(BINARY)
    part = (await fleet.bob("blob_get", hash=binary["hash"], start=100, length=1_000))["content"]
    assert (part["encoding"], part["is_truncated"]) == ("base64", True)
    assert await fleet.ada.read_all((await fleet.bob("blob_get", hash=binary["hash"]))["content"]) == BINARY
    assert (await fleet.bob.refused("blob_get", hash="0" * 64))[0] == "blob_not_found"
    code, text_of_error = await fleet.bob.refused("blob_put", content="not base64!", is_base64=True)
    assert code == "invalid_argument"
    assert "leave is_base64 out" in text_of_error
    assert (await fleet.bob.refused("blob_put", content="x" * 1_048_577))[0] == "payload_too_large"


@pytest.mark.parametrize("size", [15_000, 60_000, 1_100_000], ids=["inline", "blob", "streamed"])
async def test_a_large_message_is_cut_and_its_rest_can_be_read(fleet: Fleet, size: int) -> None:
    body = {"text": ("Grüße " * size)[:size]}
    await fleet.plane.queue("jobs").put_many([body] * 5)
    received = await fleet.ada("queue_receive", queue="jobs", max_messages=5)
    assert len(json.dumps(received, ensure_ascii=False).encode()) < MCP_CONTENT_BYTES_MAX * 1.3
    message = received["messages"][3]
    assert message["body"]["is_truncated"]
    assert json.loads(await fleet.ada.read_all(message["body"])) == body
    lease = {key: message[key] for key in ("id", "lease_id", "fence")}
    await fleet.ada("queue_nack", queue="jobs", **lease, error="e" * 4_000, reject=True)
    letters = await fleet.ada("dead_letters_search", queue="jobs")
    [letter] = letters["letters"]
    assert len(letter["last_error"]) < 1_000
    found = await fleet.ada.read_all(letter["body"])
    assert (json.loads(found) if isinstance(found, bytes) else found) == body


async def test_large_mails_values_entries_and_results_are_cut_and_can_be_read_on(fleet: Fleet) -> None:
    large = {"text": TEXT[:30_000]}
    bob = fleet.plane.mailbox("bob")
    for _ in range(MCP_MAILS_MAX):
        await bob.send("ada", large)
    mails = await fleet.ada("mail_read", limit=MCP_MAILS_MAX)
    assert len(json.dumps(mails, ensure_ascii=False).encode()) < MCP_CONTENT_BYTES_MAX * 1.5
    assert json.loads(await fleet.ada.read_all(mails["mails"][-1]["body"])) == large

    larger = {"text": TEXT[:90_000]}
    await fleet.ada("state_set", key="s", value=larger, if_absent=True)
    document = (await fleet.ada("state_get", key="s"))["document"]
    assert json.loads(await fleet.ada.read_all(document)) == larger
    await fleet.ada("entity_set", kind="k", id="i", fields=larger, expected_version=0)
    fields = (await fleet.ada("entity_get", kind="k", id="i"))["fields"]
    assert json.loads(await fleet.ada.read_all(fields)) == larger
    for head in range(3):
        await fleet.ada("world_append", world="w", entries=[larger], expected_head=head, create=True)
    entries = (await fleet.ada("world_read", world="w"))["entries"]
    assert json.loads(await fleet.ada.read_all(entries[1]["value"])) == larger

    put = await fleet.ada("queue_put", queue="q", body=1)
    [message] = (await fleet.ada("queue_receive", queue="q"))["messages"]
    lease = {key: message[key] for key in ("id", "lease_id", "fence")}
    result = base64.b64encode(BINARY).decode()
    await fleet.ada("queue_ack", queue="q", **lease, result=result, is_base64=True)
    outcome = await fleet.ada("queue_result", queue="q", id=put["id"])
    assert await fleet.ada.read_all(outcome["result"]) == BINARY


@pytest.mark.parametrize("value", ["\ud800", ["\udfff"]])
async def test_text_that_utf_8_lacks_is_refused_everywhere(fleet: Fleet, value: Any) -> None:
    for tool, more in (
        ("queue_put", {"queue": "jobs", "body": value}),
        ("queue_ack", {"queue": "jobs", "id": "1", "lease_id": "1", "fence": value}),
        ("state_set", {"key": "s", "value": value, "if_absent": True}),
        ("world_append", {"world": "w", "entries": [value], "expected_head": 0, "create": True}),
    ):
        code, text = await fleet.ada.refused(tool, **more)
        assert code == "invalid_argument"
        assert "surrogate" in text


@given(st.lists(st.integers(0, 200_000), max_size=60), st.integers(0, 1_000))
def test_small_bodies_are_shown_whole_and_large_ones_share_the_rest(sizes: list[int], start: int) -> None:
    found, left = shares(sizes, start), [max(size - start, 0) for size in sizes]
    assert sum(found) <= MCP_CONTENT_BYTES_MAX
    assert all(share <= size for share, size in zip(found, left, strict=True))
    cut = [share for share, size in zip(found, left, strict=True) if share < size]
    assert all(share <= min(cut) for share, size in zip(found, left, strict=True) if share == size) if cut else True
    if cut:
        assert max(cut) - min(cut) <= len(sizes)
        assert sum(found) > MCP_CONTENT_BYTES_MAX - len(sizes)


@given(st.one_of(st.binary(max_size=300), st.text(max_size=100).map(str.encode)), st.integers(4, 40))
def test_the_parts_of_a_body_are_the_body(data: bytes, limit: int) -> None:
    read, start = b"", 0
    while True:
        part = content_of(data, BYTES, rest=str, start=start, limit=limit)
        assert part.size == len(data)
        read += base64.b64decode(part.value) if part.encoding == "base64" else part.value.encode()
        if part.rest is None:
            break
        assert int(part.rest) > start, "each part makes progress"
        start = int(part.rest)
    assert read == data


@pytest.mark.parametrize("data", [b"{", b"\xff", b"[" * 5_000 + b"]" * 5_000, b"[" * 500 + b"]" * 500, b'"\\ud800"'])
def test_what_is_called_json_and_is_none_is_shown_as_what_it_is(data: bytes) -> None:
    shown = content_of(data, JSON, rest=str)
    assert shown.encoding != "json"
    assert shown.value == (base64.b64encode(data).decode() if data == b"\xff" else data.decode())
