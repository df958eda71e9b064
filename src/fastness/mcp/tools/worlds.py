"""Tools over worlds, and over runs of workflows, which are worlds too."""

from typing import Annotated, Any, Final

import cbor2
from msgspec import Meta

from fastness.errors import RunNotFound, WorldExists, WorldNotFound
from fastness.limits import MCP_CONTENT_BYTES_MAX, MCP_ENTRIES_MAX, NAME_BYTES_MAX, RUN_ID_BYTES_MAX
from fastness.mcp.caller import Caller
from fastness.mcp.contents import JSON, OFFSET_MAX, Content, Rest, content_of, content_of_value, encoded_value, shares
from fastness.mcp.task_marks import TASK_WORLD, is_task_of_another, mark_of_run
from fastness.mcp.tool import Tool, ToolInput, ToolOutput, utc
from fastness.mcp.tools.fields import BodyStart, WaitSeconds

WorldName = Annotated[str, Meta(description="The name of the world.", min_length=1, max_length=NAME_BYTES_MAX)]
RunId = Annotated[str, Meta(description="The id of the run.", min_length=1, max_length=RUN_ID_BYTES_MAX)]

_RUN_CONTENT_BYTES: Final = MCP_CONTENT_BYTES_MAX // 2  # Of the result, and of what was published.


class WorldRead(ToolInput, frozen=True):
    world: WorldName
    start: Annotated[int, Meta(description="The height of the first entry to read.", ge=0, le=OFFSET_MAX)] = 0
    limit: Annotated[int, Meta(description="How many entries at most.", ge=1, le=MCP_ENTRIES_MAX)] = MCP_ENTRIES_MAX
    body_start: BodyStart = 0


class WorldEntry(ToolOutput, frozen=True):
    height: Annotated[int, Meta(description="Its position in the journal; 0 is the first.")]
    kind: Annotated[str, Meta(description="What wrote it: `entry` is an append, others are of the plane or a host.")]
    value: Content


class WorldEntries(ToolOutput, frozen=True):
    entries: Annotated[list[WorldEntry], Meta(description="In the order of the journal.")]
    head: Annotated[int, Meta(description="The height of the next entry; give it to world_append as expected_head.")]
    state: Annotated[str, Meta(description="active, paused or archived; only an active world can be appended to.")]


async def _read(caller: Caller, given: WorldRead) -> WorldEntries:
    await _check_world(caller, given.world)
    world = caller.plane.world(given.world)
    described = await world.describe()
    records = await world.read(given.start, limit=given.limit)
    values = [encoded_value(cbor2.loads(record.value)) for record in records]
    limits = shares([len(value) for value in values], given.body_start)
    entries = []
    for record, data, limit in zip(records, values, limits, strict=True):
        rest = _rest_of_entry(given.world, record.height)
        value = content_of(data, JSON, rest=rest, start=given.body_start, limit=limit)
        entries.append(WorldEntry(height=record.height, kind=record.kind, value=value))
    head = max(described.head, records[-1].height + 1 if records else 0)
    return WorldEntries(entries=entries, head=head, state=described.state)


def _rest_of_entry(world: str, height: int) -> Rest:
    return lambda end: f"Call world_read with world={world!r}, start={height}, limit=1, body_start={end}."


class WorldAppend(ToolInput, frozen=True):
    world: WorldName
    entries: Annotated[
        list[Any],
        Meta(description="JSON values, appended together or not at all.", min_length=1, max_length=MCP_ENTRIES_MAX),
    ]
    expected_head: Annotated[
        int,
        Meta(description="The `head` of world_read: append only if it is still the head.", ge=0, le=OFFSET_MAX),
    ]
    create: Annotated[bool, Meta(description="Create the world if it does not exist; its head is 0 then.")] = False


class WorldAppended(ToolOutput, frozen=True):
    height: Annotated[int, Meta(description="Of the first of your entries.")]
    head: Annotated[int, Meta(description="After your entries; for the next world_append.")]


async def _append(caller: Caller, given: WorldAppend) -> WorldAppended:
    await _check_world(caller, given.world)
    world = caller.plane.world(given.world)
    try:
        height = await world.append(given.entries, expected_head=given.expected_head)
    except WorldNotFound:
        if not given.create or given.expected_head:
            raise
        world = caller.plane.world(given.world)
        try:
            await world.create()
        except WorldExists:  # Another caller has created it meanwhile; the append says whether it has entries.
            world = caller.plane.world(given.world)
        height = await world.append(given.entries, expected_head=0)
    return WorldAppended(height=height, head=height + len(given.entries))


class WorldSignal(ToolInput, frozen=True):
    run_id: RunId
    name: Annotated[
        str, Meta(description="The signal that the run waits for.", min_length=1, max_length=NAME_BYTES_MAX)
    ]
    value: Annotated[Any, Meta(description="What the run gets: any JSON value.")] = None


class Signalled(ToolOutput, frozen=True):
    accepted: Annotated[bool, Meta(description="True: the signal is stored, and the run will get it.")]


async def _signal(caller: Caller, given: WorldSignal) -> Signalled:
    await _check_run(caller, given.run_id)
    await caller.plane.workflows.signal(given.run_id, given.name, given.value)
    return Signalled(accepted=True)


async def _check_world(caller: Caller, name: str) -> None:
    """Check that a world is not that of a run that is the task of another agent.

    Raises:
        RunNotFound: it is, or there is no such run.
    """
    if name.startswith(TASK_WORLD):
        await _check_run(caller, name.removeprefix("run:"))


async def _check_run(caller: Caller, id: str) -> None:
    """Check that a run is not the task of another agent.

    Raises:
        RunNotFound: it is, or there is no such task; the error is the same.
    """
    mark = mark_of_run(id)
    if mark is None:
        return
    # The caller's own plane may not allow to describe runs.
    found = await caller.own_rows.workflows.describe(id)
    if is_task_of_another(mark, caller.universe, caller.agent, found.workflow):
        raise RunNotFound(f"There is no run {id} in {caller.universe}; start it first")


class WorldQuery(ToolInput, frozen=True):
    run_id: RunId
    wait_seconds: Annotated[WaitSeconds, Meta(description="How long to wait for the end of the run.")] = 0.0
    body_start: BodyStart = 0


class RunStatus(ToolOutput, frozen=True, omit_defaults=True):
    workflow: Annotated[str, Meta(description="The workflow that the run is of.")]
    state: Annotated[str, Meta(description="running, stopped, completed, failed or cancelled.")]
    started_at: Annotated[str, Meta(description="When it was started, in UTC.")]
    ended_at: Annotated[str | None, Meta(description="When it ended, in UTC.")] = None
    published: Annotated[Content | None, Meta(description="What the run says about its progress.")] = None
    result: Annotated[Content | None, Meta(description="If it has completed.")] = None
    error: Annotated[str | None, Meta(description="If it has failed, or was cancelled or stopped.")] = None


async def _query(caller: Caller, given: WorldQuery) -> RunStatus:
    workflows = caller.plane.workflows
    await _check_run(caller, given.run_id)
    found = await workflows.describe(given.run_id)
    if given.wait_seconds and found.ended_ms is None:
        found = await workflows.describe(given.run_id, wait_seconds=given.wait_seconds)

    def shown(value: Any) -> Content:
        return content_of_value(
            value,
            rest=lambda end: f"Call world_query with run_id={given.run_id!r}, body_start={end}.",
            start=given.body_start,
            limit=_RUN_CONTENT_BYTES,
        )

    return RunStatus.of(
        found,
        ended_at=None if found.ended_ms is None else utc(found.ended_ms),
        published=None if found.published is None else shown(cbor2.loads(found.published)),
        result=shown(await workflows.result(given.run_id)) if found.state == "completed" else None,
    )


TOOLS: Final[tuple[Tool[Any, Any], ...]] = (
    Tool(
        name="world_read",
        title="Read a journal",
        description=(
            "Read entries of a world's journal: an ordered history that is only appended to. `head` of the answer is "
            "what world_append needs."
        ),
        input=WorldRead,
        output=WorldEntries,
        call=_read,
        verbs=("world:read", "world:describe"),
        read_only=True,
    ),
    Tool(
        name="world_append",
        title="Append to a journal",
        description=(
            "Append entries to a world's journal, if its head is still where you expect it. If it is refused, another "
            "writer was first: call world_read from your expected_head on, and decide anew. With create the world is "
            "created if it is new."
        ),
        input=WorldAppend,
        output=WorldAppended,
        call=_append,
        verbs=("world:append",),
    ),
    Tool(
        name="world_signal",
        title="Signal a run",
        description=(
            "Send a named signal with a value to a running workflow, such as an approval that it waits for. The signal "
            "is kept until the run takes it. world_query shows what the run does then."
        ),
        input=WorldSignal,
        output=Signalled,
        call=_signal,
        verbs=("run:signal",),
    ),
    Tool(
        name="world_query",
        title="Query a run",
        description=(
            "What a run of a workflow does: its state, what it has published about its progress, and its result or "
            "error. With wait_seconds the call waits for its end."
        ),
        input=WorldQuery,
        output=RunStatus,
        call=_query,
        verbs=("run:get",),
        read_only=True,
    ),
)
