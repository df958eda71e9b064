"""Apps: the programs, workflows and adapters that a host runs."""

import inspect
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any, Concatenate, Final, ParamSpec, Protocol, TypeVar, overload

from fastness.errors import InvalidArgument
from fastness.hosts.adapters import Adapter, AdapterFunction
from fastness.hosts.program_runner import ProgramRunner
from fastness.hosts.programs import Handle, Program
from fastness.hosts.runners import RunnerFactory
from fastness.hosts.workflows.run import WorkflowRun
from fastness.hosts.workflows.runner import workflow_runner
from fastness.hosts.workflows.workflow import Workflow

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class WorkflowDecorator(Protocol):
    """What `workflow(name=…)` returns."""

    def __call__(
        self, function: Callable[Concatenate[WorkflowRun, Parameters], Coroutine[Any, Any, Result]], /
    ) -> Workflow[Parameters, Result]: ...


class HostApp:
    """Programs, workflows and adapters by their names.

    A host runs the worlds of its programs, the runs of its workflows, and the effects of its adapters.
    """

    def __init__(self) -> None:
        self._programs: dict[str, Program] = {}
        self._adapters: dict[str, Adapter] = {}
        self._workflows: dict[str, Workflow[..., Any]] = {}
        self._runners: dict[str, RunnerFactory] = {}

    @property
    def programs(self) -> Mapping[str, Program]:
        """The programs by their names."""
        return self._programs

    @property
    def adapters(self) -> Mapping[str, Adapter]:
        """The adapters by the kinds of effects that they carry out."""
        return self._adapters

    @property
    def workflows(self) -> Mapping[str, Workflow[..., Any]]:
        """The workflows by their names."""
        return self._workflows

    @property
    def runners(self) -> Mapping[str, RunnerFactory]:
        """What makes the runner of a claimed world, by the name of its program."""
        return self._runners

    @overload
    def program(self, handle: Handle, /) -> Program: ...

    @overload
    def program(self, name: str | None = None, /) -> Callable[[Handle], Program]: ...

    def program(self, given: Handle | str | None = None, /) -> Any:
        """Make a function a program of an app: `@app.program`, `@app.program("name")`, or `@fastness.program`.

        The function is called with (state, event, context) for every item of its world's inbox, in order, and returns
        the next state. It must be pure: its result depends on its arguments only. What else it wants done, it tells
        `context`. The name is that of the function by default. Worlds are created with it, so it stays when the code
        changes. `@fastness.program` is of the default app.

        Raises:
            InvalidArgument: it is not a plain function, or another program has the name.
        """

        def make(handle: Handle) -> Program:
            name = given if isinstance(given, str) else getattr(handle, "__name__", "")
            found = Program(name, handle)
            _check_new("program", name, self._programs, handle, lambda known: known.handle)
            self._programs[name] = found
            self.add_runner(name, partial(ProgramRunner, found))
            return found

        return make if given is None or isinstance(given, str) else make(given)

    def adapter(self, kind: str, /) -> Callable[[AdapterFunction], AdapterFunction]:
        """Make a function the adapter of a kind of effects: `@app.adapter("charge_card")`, or `@fastness.adapter(…)`.

        It is called with an `EffectCall`, and returns the payload of the receipt: bytes, or anything that JSON has. A
        plain function runs on a thread, a coroutine function on the event loop of the host. An effect whose adapter
        raises is tried again; `Reject` ends it, and `RetryLater` says when to try again. `@fastness.adapter` is of
        the default app.

        Raises:
            InvalidArgument: it is not a function, or another adapter has the kind.
        """
        if not isinstance(kind, str):
            raise InvalidArgument('An adapter needs a kind of effects; write @app.adapter("charge_card")')

        def make(function: AdapterFunction) -> AdapterFunction:
            adapter = Adapter(kind, function)
            _check_new("adapter", kind, self._adapters, function, lambda known: known.function)
            self._adapters[kind] = adapter
            return function

        return make

    @overload
    def workflow(
        self, function: Callable[Concatenate[WorkflowRun, Parameters], Coroutine[Any, Any, Result]], /
    ) -> Workflow[Parameters, Result]: ...

    @overload
    def workflow(self, function: None = None, /, *, name: str | None = None) -> WorkflowDecorator: ...

    def workflow(self, function: Callable[..., Any] | None = None, /, *, name: str | None = None) -> Any:
        """Make an async function a workflow: `@app.workflow`, `@app.workflow(name="name")`, or `@fastness.workflow`.

        Its first argument is a `WorkflowRun`. Everything that it does to the outside goes through it, and is recorded,
        so that a run continues where it was after a crash, on this host or another one. The name is that of the
        function by default. Runs are started with it, so it stays when the code changes. `@fastness.workflow` is of
        the default app.

        Raises:
            InvalidArgument: it is not an async function, or another workflow has the name.
        """

        def make(function: Callable[..., Any]) -> Workflow[..., Any]:
            found: Workflow[..., Any] = Workflow(function, name=name)
            _check_new("workflow", found.name, self._workflows, function, lambda known: known.function)
            self._workflows[found.name] = found
            self.add_runner(found.program, workflow_runner(found))
            return found

        return make if function is None else make(function)

    def add_runner(self, program: str, factory: RunnerFactory) -> None:
        """Run the worlds of a program by runners that this factory makes."""
        self._runners[program] = factory


def _check_new(
    what: str, name: str, known: Mapping[str, Any], function: object, function_of: Callable[[Any], object]
) -> None:
    """Refuse a second function for a name; the same one of a module that was loaded again replaces the first."""
    other = known.get(name)
    if other is not None and _place(function_of(other)) != _place(function):
        raise InvalidArgument(f"Two functions are the {what} {name}; give one of them another name")


def _place(function: object) -> tuple[str, str]:
    unwrapped = inspect.unwrap(function) if callable(function) else function
    return getattr(unwrapped, "__module__", ""), getattr(unwrapped, "__qualname__", "")


DEFAULT_HOST_APP: Final = HostApp()  # Of programs, workflows and adapters that name none.
program, workflow, adapter = DEFAULT_HOST_APP.program, DEFAULT_HOST_APP.workflow, DEFAULT_HOST_APP.adapter
