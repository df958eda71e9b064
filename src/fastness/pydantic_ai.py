"""Durable execution of Pydantic AI agents: a killed host repeats no model request and no tool call that has ended.

    agent = Agent("openai:gpt-5", name="helper", capabilities=[FastnessDurability()])
    ask = agent_workflow(agent)                    # a workflow: (run, prompt) -> output

`run_agent` runs an agent as one step of a workflow. The operations of the agent (requests to models, calls of tools,
and what toolsets say about themselves) are entries of a journal, the world `agent:<id of the step>`:

    ["open", fence, attempt, time in ms]           a host begins, or begins again
    ["done", name of the operation, JSON]          an operation has ended, with this result
    ["blob", name of the operation, hash]          the same, with its JSON in a blob

An attempt begins by reading the journal and appending `open`. An operation that is recorded gets its result from the
journal, any other one is run and then recorded. Two rules make that safe:

- Operations run one at a time, so their order is that of the code. If the name of an operation is not the recorded one,
  the code was changed, and the run is stopped with `WorkflowChanged`.
- Every entry is appended at the head that this host knows. `open` of a host that took the run over moves the head, so
  the earlier host gets `HeadAdvanced` and stops. It cannot open the journal again: its fence is lower.

An operation that was running when its host died is run again: at least once, as every step.
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from contextvars import ContextVar
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar, Final, Self, TypeVar

from fastness.extras import how_to_install

try:
    from pydantic_ai.agent import AbstractAgent
    from pydantic_ai.durable_exec import (
        JSON_CODEC,
        BaseDurabilityCapability,
        DurabilityEngineSpec,
        DurableOperationId,
        EventStreamHandlerId,
        JournalCallableOperationBackend,
        ModelRequestId,
        RoleBasedOperationConfig,
        conversation_id_from_run_id,
    )
    from pydantic_ai.models import Model
    from pydantic_ai.toolsets import AbstractToolset, DynamicToolset, ExternalToolset, FunctionToolset, WrapperToolset
    from pydantic_core import PydanticSerializationError, to_jsonable_python
except ImportError as error:
    raise ImportError(f"Pydantic AI is not installed; {how_to_install('pydantic-ai')}") from error

import cbor2
import msgspec

import fastness
from fastness import HostApp, Retry, StepContext, Workflow, WorkflowRun
from fastness.errors import (
    Backend,
    Busy,
    HeadAdvanced,
    InvalidArgument,
    PayloadTooLarge,
    WorkflowChanged,
    WorkflowMisuse,
    WorldExists,
)
from fastness.limits import (
    AGENT_OPERATIONS_MAX,
    AGENT_OUTPUT_BYTES_MAX,
    AGENT_RECORD_BYTES_MAX,
)
from fastness.plane_access import decoded

__all__ = ["JOURNAL_PREFIX", "FastnessDurability", "agent_workflow", "run_agent"]

JOURNAL_PREFIX: Final = "agent:"  # Of the worlds that are journals of agents; the id of the step follows.

Deps = TypeVar("Deps")

_OPEN: Final = "open"
_DONE: Final = "done"
_BLOB: Final = "blob"
_PAGE: Final = 256  # Records of a journal that are read at a time: at most 16 MiB.
_OPENING_ATTEMPTS_MAX: Final = 100  # Each fails because another attempt has written first.
_RETRY: Final = Retry(5, on=(Backend, Busy))  # The plane could not be reached; errors of the agent end the run.

_Json = Any  # What JSON has.


class FastnessDurability(BaseDurabilityCapability[Any]):
    """Makes runs of an agent durable: `Agent(…, name="helper", capabilities=[FastnessDurability()])`.

    The agent needs a name, which is recorded and must stay. Outside of `run_agent` and `agent_workflow` the capability
    does nothing. Within them:

    - tools are called one at a time;
    - toolsets that run tools are given to the constructor of the agent, each with an `id`; those that are added later,
      and classes of toolsets of one's own, are refused;
    - a run that streams its model's responses to an event handler is refused.
    """

    engine_spec: ClassVar[DurabilityEngineSpec] = DurabilityEngineSpec(
        engine_name="Fastness",
        durable_unit_noun="operation",
        durable_container_noun="workflow",
        codec=JSON_CODEC,
        serialization_failure=lambda error: InvalidArgument(
            f"The result of an operation cannot be recorded ({error}); return what JSON has, or a Pydantic model"
        ),
        wrapped_toolset_kinds=frozenset({"function", "mcp", "dynamic"}),
        toolset_lifecycles={"function": "enter-always", "mcp": "enter-in-durable-unit", "dynamic": "enter-never"},
        unsupported_runtime_toolset_kinds=frozenset({"function", "mcp", "dynamic"}),
        sequential_tools_in_durable_context=True,
    )

    def __init__(self, *, models: dict[str, Model] | None = None, name: str | None = None) -> None:
        """The capability for one agent.

        Args:
            models: other models that a run may switch to, by the names that are recorded.
            name: what operations are recorded under, instead of the name of the agent.
        """
        super().__init__(models=models, name=name)

    @property
    def in_durable_context(self) -> bool:
        """Whether an agent runs here whose operations are recorded."""
        return _current.get() is not None

    def get_default_run_id(self) -> str | None:
        """The same id in every attempt."""
        journal = _current.get()
        return None if journal is None else journal.next_run_id()

    def get_default_conversation_id(self, run_id: str) -> str | None:
        """The same id in every attempt."""
        return conversation_id_from_run_id(run_id) if self.in_durable_context else None

    async def get_run_start_time(self, run_id: str) -> datetime | None:
        """When the first attempt began: the timeout of a run counts from there."""
        del run_id
        journal = _current.get()
        return None if journal is None else datetime.fromtimestamp(journal.started_ms / 1_000, UTC)

    def get_durable_operation_backend(self) -> "_JournalBackend":
        """What runs and records the operations of the agent."""
        return _JournalBackend(
            agent_name=self.name, config=RoleBasedOperationConfig(model=None, event=None, capability=None, tool=None)
        )


def agent_workflow(
    agent: AbstractAgent[Deps, Any],
    *,
    name: str | None = None,
    deps: Callable[[], Deps] | None = None,
    retry: Retry = _RETRY,
    timeout: float | timedelta | None = None,
    app: HostApp | None = None,
) -> Workflow[[str], Any]:
    """A workflow that runs an agent with a prompt, and returns its output: `plane.workflows.start(workflow, prompt)`.

    Args:
        agent: with a `FastnessDurability` among its capabilities.
        name: of the workflow; that of the agent by default. Runs are started with it, so it stays.
        deps: makes the dependencies of the agent, in each attempt.
        retry: which errors of the agent are tried again; by default those of the plane. Recorded operations are not
            repeated.
        timeout: how long an attempt may take.
        app: the app of the workflow; by default the one of `fastness.workflow`.

    Raises:
        InvalidArgument: the agent has no `FastnessDurability`, or a toolset that cannot be recorded; or another
            workflow has the name.
    """
    durability = _durability_of(agent)

    async def ask(run: WorkflowRun, prompt: str) -> Any:
        return await run_agent(run, agent, prompt, deps=deps, retry=retry, timeout=timeout)

    ask.__qualname__ = f"agent_workflow.{durability.name}"  # Two agents with one name of a workflow are refused.
    make = fastness.workflow if app is None else app.workflow
    return make(name=name or durability.name)(ask)


async def run_agent(
    run: WorkflowRun,
    agent: AbstractAgent[Deps, Any],
    prompt: str,
    *,
    deps: Callable[[], Deps] | None = None,
    retry: Retry = _RETRY,
    timeout: float | timedelta | None = None,
) -> Any:
    """The output of an agent, run as a step of a workflow; call it in the code of the workflow.

    The output is what JSON has: a Pydantic model is a map, and `Answer.model_validate(output)` makes it a model again.

    Args:
        run: the run of the workflow.
        agent: with a `FastnessDurability` among its capabilities.
        prompt: what the agent is asked.
        deps: makes the dependencies of the agent, in each attempt.
        retry: which errors of the agent are tried again; by default those of the plane. Recorded operations are not
            repeated.
        timeout: how long an attempt may take.

    Raises:
        StepFailed: the agent has failed in the last attempt, or its output has more than 4 MiB.
        InvalidArgument: the agent has no `FastnessDurability`, or a toolset that cannot be recorded.
    """
    durability = _durability_of(agent)
    return await run.step(
        _run_recorded, agent, prompt, deps, name=f"agent {durability.name}", retry=retry, timeout=timeout
    )


async def _run_recorded(agent: AbstractAgent[Any, Any], prompt: str, deps: Callable[[], Any] | None) -> Any:
    """Run an agent in this step, with the operations that its journal has; its output."""
    step = fastness.current_step()
    journal = await _Journal(step).open()
    token = _current.set(journal)
    try:
        result = await agent.run(prompt, deps=None if deps is None else deps())
    finally:
        _current.reset(token)
    journal.check_finished()
    try:
        output = to_jsonable_python(result.output)
    except PydanticSerializationError as error:
        raise InvalidArgument(
            f"The output of agent {agent.name} cannot be recorded ({error}); give it an output_type that JSON has"
        ) from None
    if (size := len(cbor2.dumps(output, canonical=True))) > AGENT_OUTPUT_BYTES_MAX:
        raise PayloadTooLarge(
            f"The output of agent {agent.name} has {size} bytes and may have {AGENT_OUTPUT_BYTES_MAX}; store a "
            "blob in a tool, and let the agent return its hash"
        )
    return output


def _durability_of(agent: AbstractAgent[Any, Any]) -> FastnessDurability:
    found = FastnessDurability.from_agent(agent)
    if found is None:
        raise InvalidArgument(
            f"Agent {agent.name} has no FastnessDurability; write Agent(…, capabilities=[FastnessDurability()])"
        )
    for toolset in agent.toolsets:
        toolset.apply(lambda leaf: _check_recorded(agent, leaf))
    return found


def _check_recorded(agent: AbstractAgent[Any, Any], toolset: AbstractToolset[Any]) -> None:
    """Refuse a toolset whose calls Pydantic AI does not make operations of: a restart would repeat them."""
    is_recorded = isinstance(toolset, (FunctionToolset, DynamicToolset, ExternalToolset, WrapperToolset))
    if not is_recorded and type(toolset).__module__ != "pydantic_ai.mcp":
        raise InvalidArgument(
            f"Calls of toolset {type(toolset).__name__} of agent {agent.name} cannot be recorded; give its tools to a "
            'FunctionToolset(…, id="name")'
        )


class _Journal:
    """The recorded operations of one step, and the position of this attempt among them."""

    def __init__(self, step: StepContext) -> None:
        self.started_ms = 0  # Of the first attempt.
        self._step = step
        self._plane = step.async_plane
        self._world = self._plane.world(JOURNAL_PREFIX + step.id)
        self._recorded: list[tuple[str, str, str]] = []  # Kind, name, and JSON or hash.
        self._position = 0  # Among the recorded ones.
        self._head = 0
        self._runs = 0  # Of agents, also of those without a name of their own.
        self._lock = asyncio.Lock()  # One operation at a time.

    async def open(self) -> Self:
        """Read what is recorded, and make this attempt the only one that can write.

        Raises:
            HeadAdvanced: a later attempt, maybe of another host, has opened it.
        """
        with suppress(WorldExists):
            await self._world.create()
        ours = (self._step.fence, self._step.attempt)
        for _ in range(_OPENING_ATTEMPTS_MAX):
            entries = await self._read()
            opened = [entry for entry in entries if entry[0] == _OPEN]
            if any((fence, attempt) > ours for _, fence, attempt, _ in opened):
                raise HeadAdvanced(0, len(entries))
            now_ms = time.time_ns() // 1_000_000
            try:
                await self._world.append([[_OPEN, *ours, now_ms]], expected_head=len(entries))
            except HeadAdvanced:
                continue
            self.started_ms = opened[0][3] if opened else now_ms
            self._recorded = [(kind, name, value) for kind, name, value, *_ in entries if kind != _OPEN]
            self._head = len(entries) + 1
            return self
        raise Busy(f"The journal {self._world.name} has too many writers; try again later")

    def next_run_id(self) -> str:
        """An id for a run of an agent, the same in every attempt."""
        self._runs += 1
        return self._step.id if self._runs == 1 else f"{self._step.id}.{self._runs}"

    async def run(self, name: str, body: Callable[[], Awaitable[_Json]]) -> _Json:
        """The result of an operation: the recorded one, or that of `body`, which is then recorded.

        Raises:
            WorkflowChanged: another operation is recorded here.
            HeadAdvanced: another attempt has taken over.
        """
        async with self._lock:
            if self._position < len(self._recorded):
                return await self._replay(name)
            if self._position >= AGENT_OPERATIONS_MAX:
                raise WorkflowMisuse(
                    f"Run {self._step.run_id} has {AGENT_OPERATIONS_MAX} operations of {self._step.name}, which "
                    "is the limit; give the agent usage limits, or several smaller tasks"
                )
            token = _current.set(None)  # An agent that a tool runs is a part of this operation.
            try:
                result = await body()
            finally:
                _current.reset(token)
            await self._append(name, json.dumps(result))
            self._position += 1
            return result

    def check_finished(self) -> None:
        """Check that the agent has done everything that is recorded.

        Raises:
            WorkflowChanged: it has ended earlier.
        """
        if self._position < len(self._recorded):
            raise self._changed(self._recorded[self._position][1], "the agent ends there")

    async def _replay(self, name: str) -> _Json:
        kind, recorded, value = self._recorded[self._position]
        if recorded != name:
            raise self._changed(recorded, f"the agent does {name} there")
        self._recorded[self._position] = (kind, recorded, "")  # It is not needed again.
        self._position += 1
        data = await self._plane.blobs.get(value) if kind == _BLOB else value.encode()
        return decoded("The result of a recorded operation", json.loads, data)

    async def _append(self, name: str, result: str) -> None:
        entry = [_DONE, name, result]
        if len(result) + len(name) > AGENT_RECORD_BYTES_MAX:
            entry = [_BLOB, name, await self._plane.blobs.put(result.encode(), pinned=False)]
        await self._world.append([entry], expected_head=self._head)
        self._head += 1

    async def _read(self) -> list[tuple[Any, ...]]:
        found: list[tuple[Any, ...]] = []
        while page := await self._world.read(len(found), limit=_PAGE):
            found += [decoded("A recorded operation", _entry, record.value) for record in page]
        return found

    def _changed(self, recorded: str, what: str) -> WorkflowChanged:
        run = self._step.run_id
        return WorkflowChanged(
            f"Run {run} has recorded {recorded} as operation {self._position} of {self._step.name}, and {what}. Deploy "
            "the agent as it was (give a changed one another name, for new runs), then resume the run: "
            f"fastness world resume-program run:{run}"
        )


def _entry(data: bytes) -> tuple[Any, ...]:
    found = cbor2.loads(data)
    is_opening = isinstance(found, list) and found[:1] == [_OPEN]
    return msgspec.convert(found, tuple[str, int, int, int] if is_opening else tuple[str, str, str])


_current: ContextVar[_Journal | None] = ContextVar("fastness_agent_journal", default=None)


class _JournalBackend(JournalCallableOperationBackend[None]):
    """Runs the operations of an agent, and records them in the journal of the current step."""

    async def execute(
        self,
        *,
        operation_id: DurableOperationId,
        name: str,
        body: Callable[[], Awaitable[object]],
        cache_key: tuple[object, ...],
        config: None,
    ) -> object:
        """The result of one operation."""
        del cache_key, config
        journal = _current.get()
        if journal is None:
            return await body()
        if isinstance(operation_id, EventStreamHandlerId) or (
            isinstance(operation_id, ModelRequestId) and operation_id.streaming
        ):
            raise InvalidArgument(
                "A durable run does not stream: a response is recorded when it is complete. Remove the event stream "
                "handler of the agent, or run the agent outside of a workflow"
            )
        return await journal.run(name, body)
