"""Runs of workflows. A run is a world whose program is the workflow; its record says how far it is.

The world of the run `r-17` is `run:r-17`, and the program of the workflow `research` is `workflow:research`.
"""

from typing import Annotated, Any, Final

import cbor2
import msgspec
from msgspec import Meta

from fastness import limits
from fastness.errors import InvalidValue
from fastness.names import UNIVERSE
from fastness.wire.canonical import check_canonical
from fastness.wire.fields import (
    Hash,
    Name,
    RunId,
    RunIdAfter,
    WaitSeconds,
    one_of,
    short_name,
    short_text,
)
from fastness.wire.requests import Committed, Operation, Request, Route

RUN_PREFIX: Final = "run:"  # Of the names of worlds.
WORKFLOW_PREFIX: Final = "workflow:"  # Of the names of programs.
WorkflowName = Annotated[str, short_name("name of a workflow", limits.NAME_BYTES_MAX - len(WORKFLOW_PREFIX))]
START: Final = "run.start"  # The schema of the item that starts a run: a payload of canonical CBOR [args, kwargs].
SIGNAL: Final = "run.signal"  # Of a signal: `key` is its name, and the payload its value as canonical CBOR.
CHILD: Final = "run.child"  # Of the end of a child: `key` is its id, and the payload CBOR of a map (`ChildEnd`).
CANCEL: Final = "run.cancel"  # The command of a control item that cancels a run; the payload is the reason as text.

RUNNING: Final = "running"
STOPPED: Final = (
    "stopped"  # By an error of its turns, as when its code was changed: hosts leave it until it is resumed.
)
COMPLETED: Final = "completed"
FAILED: Final = "failed"
CANCELLED: Final = "cancelled"
STATES: Final = (RUNNING, STOPPED, COMPLETED, FAILED, CANCELLED)


NO_ARGUMENTS: Final = b"\x82\x80\xa0"  # Canonical CBOR of [[], {}].
NOTHING: Final = b"\xf6"  # Canonical CBOR of null.


class RunInfo(msgspec.Struct, frozen=True):
    """A run. Its result and what it has published are canonical CBOR; a large result is in a blob.

    A list of runs leaves out results and what was published.
    """

    id: str
    workflow: str
    state: str  # running, stopped, completed, failed or cancelled
    started_ms: int
    ended_ms: int | None = None
    result: bytes | None = None
    error: str | None = None  # Of a failed, cancelled or stopped run.
    error_code: str | None = None
    published: bytes | None = None
    parent: str | None = None
    is_duplicate: bool = False  # It had been started before.
    result_blob: str | None = None
    is_cancelling: bool = False  # It was asked to end.
    incarnation: int = 1  # Of its world.


class ChildEnd(msgspec.Struct, frozen=True):
    """How a child has ended: the payload of the item that its parent gets, as a map in canonical CBOR."""

    state: str
    result: Any = None  # The value itself; None if it is in a blob.
    result_blob: str | None = None
    error: str | None = None
    error_code: str | None = None


class Runs(msgspec.Struct, frozen=True):
    """Runs in the order of their ids; `next` is where the next page starts."""

    runs: list[RunInfo]
    next: str | None = None


class StartRun(Request[RunInfo], frozen=True, tag="runs.start"):
    """Start a run, once: with the id of a run of the same workflow and arguments, the answer describes that run."""

    operation = Operation(
        stores=True,
        atomic=True,
        http=(
            Route("POST", "/v1/runs", "Start a run of a workflow.", status=201),
            Route("PUT", "/v1/runs/{id}", "Start a run of a workflow with this id.", status=201),
        ),
    )

    workflow: WorkflowName
    id: RunId | None = None
    arguments: bytes = NO_ARGUMENTS  # Canonical CBOR [args, kwargs].
    parent: RunId | None = None  # The run that is told how this one ended.
    universe: Name = UNIVERSE
    arguments_blob: Hash | None = None  # The hash of a blob with the arguments, instead of `arguments`.

    def check(self) -> None:
        check_canonical(self.arguments)
        match cbor2.loads(self.arguments):
            case [list(), dict() as kwargs] if all(isinstance(name, str) for name in kwargs):
                return
        raise InvalidValue("arguments is not a list of a list and a map with text keys; send [args, kwargs]")


class GetRun(Request[RunInfo], frozen=True, tag="runs.get"):
    """A run; with `wait_seconds`, the answer waits until it has ended, or that long."""

    operation = Operation(reads=True, http=(Route("GET", "/v1/runs/{id}", "Describe a run."),))

    id: RunId
    wait_seconds: WaitSeconds = 0.0
    universe: Name = UNIVERSE


class ListRuns(Request[Runs], frozen=True, tag="runs.list"):
    operation = Operation(reads=True, http=(Route("GET", "/v1/runs", "List runs, all or those in a state."),))

    state: Annotated[Annotated[str, one_of(*STATES)] | None, Meta(description="Only runs in this state.")] = None
    workflow: Annotated[str | None, Meta(description="Only runs of this workflow.")] = None
    after: RunIdAfter = ""
    limit: Annotated[int, Meta(ge=1, le=limits.RUNS_LISTED_MAX)] = 100
    universe: Name = UNIVERSE


class SignalRun(Request[Committed], frozen=True, tag="runs.signal"):
    operation = Operation(
        stores=True,
        atomic=True,
        http=(Route("POST", "/v1/runs/{id}/signals/{name}", "Send a signal to a run.", status=201),),
    )

    id: RunId
    name: Name
    value: bytes = NOTHING  # Canonical CBOR.
    universe: Name = UNIVERSE
    value_blob: Hash | None = None  # The hash of a blob with the value, instead of `value`.

    def check(self) -> None:
        check_canonical(self.value)


class CancelRun(Request[RunInfo], frozen=True, tag="runs.cancel"):
    """Ask a run to end. Its code may clean up before it does; a run that has ended is not changed.

    With `force` it ends at once, without its code: for a run that no host can end.
    """

    operation = Operation(
        audited=True,
        atomic=True,
        http=(Route("POST", "/v1/runs/{id}/cancel", "Cancel a run."),),
    )

    id: RunId
    reason: Annotated[
        str,
        short_text(limits.RUN_REASON_BYTES_MAX, least=0),
        Meta(description="Why; the error of the run, once it has ended."),
    ] = ""
    force: Annotated[bool, Meta(description="End the run at once, without its clean-up: if no host can run it.")] = (
        False
    )
    universe: Name = UNIVERSE


class UpdateRun(Request[RunInfo], frozen=True, tag="runs.update"):
    """Record how far a run is. A host sends it with the turn that led to it, under the fence of its claim.

    A run that ends tells its parent: an item in the parent's inbox, in the same commit.
    """

    operation = Operation(stores=True, atomic=True)

    id: RunId
    fence: int
    state: Annotated[str, one_of(RUNNING, COMPLETED, FAILED, CANCELLED)] = RUNNING
    result: bytes | None = None
    error: str | None = None
    error_code: str | None = None
    published: bytes | None = None  # None leaves what was published before.
    result_blob: Hash | None = None  # The hash of a blob with the result, instead of `result`.
    universe: Name = UNIVERSE

    def check(self) -> None:
        for value in (self.result, self.published):
            if value is not None:
                check_canonical(value)


class DeleteRun(Request[Committed], frozen=True, tag="runs.delete"):
    """Delete a run that has ended, with its history."""

    operation = Operation(
        audited=True,
        repeatable="a deleted run stays deleted",
        http=(Route("DELETE", "/v1/runs/{id}", "Delete a run that has ended."),),
    )

    id: RunId
    universe: Name = UNIVERSE
