"""Generated from handles/runs.py by tools/make_twins.py; change that file instead."""

from typing import Any

import msgspec

from fastness.errors import ResultNotReady, RunCancelled, RunFailed
from fastness.handles.sync.handle import Handle
from fastness.handles.workflow_types import WorkflowLike, encoded_arguments, name_of, result_type_of
from fastness.limits import READ_ENTRIES_MAX, RUN_VALUE_BYTES_MAX, RUN_WAIT_SECONDS_MAX
from fastness.names import checked_name
from fastness.wire import Transport
from fastness.wire.blobs import GetBlob, PutBlob
from fastness.wire.run_timeline import Timeline, TimelineEvent
from fastness.wire.run_values import decode_value, encode_value
from fastness.wire.runs import (
    CANCELLED,
    FAILED,
    NO_ARGUMENTS,
    NOTHING,
    RUN_PREFIX,
    STOPPED,
    CancelRun,
    DeleteRun,
    GetRun,
    ListRuns,
    RunInfo,
    Runs,
    SignalRun,
    StartRun,
)
from fastness.wire.timers import ListTimers, TimerInfo
from fastness.wire.type_checks import check_argument
from fastness.wire.worlds import ReadJournal


class Workflows(Handle):
    """The workflows of a plane: starts their runs, and finds them."""

    def start(self, workflow: WorkflowLike | str, /, *args: Any, id: str | None = None, **kwargs: Any) -> "Run":
        """Start a run of a workflow with these arguments; its handle.

        With the id of a run that was started with the same workflow and arguments before, the handle is that run's, and
        nothing is started. Without an id, the run gets a new one.

        Args:
            workflow: a function decorated with `workflow`, or its name. By name, the arguments are not checked.
            args: the arguments of the workflow, after `run`.
            id: the id of the run: letters, digits and `._@:+=-`.
            kwargs: its keyword arguments.

        Raises:
            RunExists: the id is that of another run.
            InvalidArgument, InvalidValue: the arguments do not fit, or cannot be stored.
        """
        request = StartRun(name_of(workflow), id, encoded_arguments(workflow, args, kwargs), universe=self._universe)
        request = with_stored_arguments(self._transport, self._universe, request)
        started = self._transport.call(request)
        return Run(self, started.id, workflow, is_duplicate=started.is_duplicate)

    def get(self, id: str, workflow: WorkflowLike | str | None = None) -> "Run":
        """The handle of a run; the run itself is not looked up. With its workflow, `result` has the annotated type."""
        return Run(self, id, workflow)

    def describe(self, id: str, *, wait_seconds: float = 0.0) -> RunInfo:
        """A run; with `wait_seconds`, as soon as it has ended, or after that long.

        Raises:
            RunNotFound: there is no run with this id.
        """
        check_argument("wait_seconds", wait_seconds, float)
        left = wait_seconds
        while True:
            wait = min(max(left, 0.0), RUN_WAIT_SECONDS_MAX)
            found = self._transport.call(GetRun(id, wait, self._universe))
            left -= wait
            if found.ended_ms is not None or left <= 0:
                return found

    def result(self, id: str, *, wait_seconds: float = 0.0, workflow: WorkflowLike | str | None = None) -> Any:
        """The result of a run, as soon as it has ended; with its workflow, as the annotated type.

        Raises:
            ResultNotReady: it has not ended within `wait_seconds`.
            RunFailed: it failed; the message has its error.
            RunCancelled: it was cancelled.
            RunNotFound: there is no run with this id.
        """
        found = self.describe(id, wait_seconds=wait_seconds)
        if found.state == STOPPED:
            raise ResultNotReady(
                f"Run {id} of workflow {found.workflow} is stopped by an error, and has no result yet: {found.error}. "
                f'Then plane.world("{RUN_PREFIX}{id}").resume_program() lets it go on'
            )
        if found.ended_ms is None:
            raise ResultNotReady(
                f"Run {id} of workflow {found.workflow} has not ended; give more wait_seconds, or ask again. If it "
                "makes no progress, check that a host has this workflow"
            )
        if found.state == FAILED:
            raise RunFailed(f"Run {id} of workflow {found.workflow} failed: {found.error or 'no error was recorded'}")
        if found.state == CANCELLED:
            raise RunCancelled(f"Run {id} of workflow {found.workflow} was cancelled: {found.error or 'no reason'}")
        data = NOTHING if found.result is None else found.result
        if found.result_blob is not None:
            data = (self._transport.call(GetBlob(found.result_blob, self._universe))).data
        return decode_value(data, result_type_of(workflow), f"The result of run {id}")

    def signal(self, id: str, name: str, value: Any = None) -> None:
        """Send a signal to a run: `run.wait_for(name)` returns the value.

        Raises:
            RunNotFound, RunEnded: there is no such run, or it has ended.
        """
        request = SignalRun(id, name, encode_value(value, f"The value of signal {name}"), self._universe)
        self._transport.call(with_stored_value(self._transport, self._universe, request))

    def cancel(self, id: str, reason: str = "", *, force: bool = False) -> RunInfo:
        """Ask a run to end; its code may clean up before it does. A run that has ended is not changed.

        Args:
            id: of the run.
            reason: its error, once it has ended.
            force: end it at once, without its code. Its children and steps on queues are not cancelled.

        Raises:
            RunNotFound: there is no such run.
        """
        return self._transport.call(CancelRun(id, reason, force, self._universe))

    def query(self, id: str) -> Any:
        """What the run has published with `run.state`; None if nothing."""
        published = (self._transport.call(GetRun(id, universe=self._universe))).published
        return None if published is None else decode_value(published)

    def history(self, id: str) -> list[TimelineEvent]:
        """What happened in a run, in the order of its journal: steps, waits, signals, children and its end."""
        found = self._transport.call(GetRun(id, universe=self._universe))
        events, height = Timeline(), 0
        while True:
            request = ReadJournal(RUN_PREFIX + id, height, READ_ENTRIES_MAX, self._universe, found.incarnation)
            records = (self._transport.call(request)).records
            if not records:
                return events.events
            events.add(records)
            height = records[-1].height + 1

    def timers(self, id: str) -> list[TimerInfo]:
        """The timers that a run waits for: of sleeps, timeouts and retries."""
        check_argument("id", id, str)
        found: list[TimerInfo] = []
        after = ""
        while True:
            page = self._transport.call(ListTimers(RUN_PREFIX + id, after, universe=self._universe))
            found += page.timers
            if page.next is None:
                return found
            after = page.next

    def delete(self, id: str) -> None:
        """Delete a run that has ended, with its history. Deleting it again changes nothing.

        Raises:
            RunNotFound: there was never a run with this id.
            RunNotEnded: it is running; cancel it first.
        """
        self._transport.call(DeleteRun(id, self._universe))

    def list(
        self,
        *,
        state: str | None = None,
        workflow: WorkflowLike | str | None = None,
        after: str = "",
        limit: int = 100,
    ) -> Runs:
        """Runs in the order of their ids, without results; `next` is where the next page starts, if there is one.

        Args:
            state: only those that are running, stopped, completed, failed or cancelled.
            workflow: only runs of this one. A page may then have fewer runs than `limit`, and still have a next one.
            after: start after this id.
            limit: of one page.
        """
        name = None if workflow is None else name_of(workflow)
        return self._transport.call(ListRuns(state, name, after, limit, self._universe))


class Run:
    """One run of a workflow."""

    def __init__(
        self,
        workflows: Workflows,
        id: str,
        workflow: WorkflowLike | str | None = None,
        *,
        is_duplicate: bool = False,
    ) -> None:
        self.id = checked_name("run", id)
        self.is_duplicate = is_duplicate  # `start` found a run that had been started before.
        self._workflows = workflows
        self._workflow = workflow

    def describe(self, *, wait_seconds: float = 0.0) -> RunInfo:
        """Its state, times and error; with `wait_seconds`, as soon as it has ended, or after that long.

        Raises:
            RunNotFound: it does not exist.
        """
        return self._workflows.describe(self.id, wait_seconds=wait_seconds)

    def result(self, *, wait_seconds: float = 0.0) -> Any:
        """Its result, as soon as it has ended, as the type of the workflow's annotation if that is known.

        Raises:
            ResultNotReady: it has not ended within `wait_seconds`.
            RunFailed: it failed; the message has its error.
            RunCancelled: it was cancelled.
            RunNotFound: it does not exist.
        """
        return self._workflows.result(self.id, wait_seconds=wait_seconds, workflow=self._workflow)

    def signal(self, name: str, value: Any = None) -> None:
        """Send it a signal: `run.wait_for(name)` returns the value.

        Raises:
            RunNotFound, RunEnded: it does not exist, or has ended.
        """
        self._workflows.signal(self.id, name, value)

    def cancel(self, reason: str = "", *, force: bool = False) -> RunInfo:
        """Ask it to end; with `force`, end it at once without its code. If it has ended, it is not changed.

        Raises:
            RunNotFound: it does not exist.
        """
        return self._workflows.cancel(self.id, reason, force=force)

    def query(self) -> Any:
        """What it has published with `run.state`; None if nothing."""
        return self._workflows.query(self.id)

    def history(self) -> list[TimelineEvent]:
        """What happened in it: steps, waits, signals, children and its end."""
        return self._workflows.history(self.id)

    def delete(self) -> None:
        """Delete it with its history, if it has ended.

        Raises:
            RunNotFound, RunNotEnded: it does not exist, or is running.
        """
        self._workflows.delete(self.id)

    def __repr__(self) -> str:
        return f"<Run {self.id}>"


def with_stored_arguments(transport: Transport, universe: str, request: StartRun) -> StartRun:
    """The request, with large arguments stored as a blob."""
    if len(request.arguments) <= RUN_VALUE_BYTES_MAX:
        return request
    stored = transport.call(PutBlob(request.arguments, universe, pinned=False))
    return msgspec.structs.replace(request, arguments=NO_ARGUMENTS, arguments_blob=stored.hash)


def with_stored_value(transport: Transport, universe: str, request: SignalRun) -> SignalRun:
    """The request, with a large value stored as a blob."""
    if len(request.value) <= RUN_VALUE_BYTES_MAX:
        return request
    stored = transport.call(PutBlob(request.value, universe, pinned=False))
    return msgspec.structs.replace(request, value=NOTHING, value_blob=stored.hash)
