"""Crashes at every boundary: what was done stays done once.

    def scenario(test):
        run = test.plane.workflows.start(order, {"item": "book"}, id="o-1")
        test.run_until_idle()
        run.signal("approval", True)
        return test.run_to_end(run)

    crash_everywhere(app, scenario)

The scenario runs once without a crash, which counts the boundaries of the host (`processes`). Then it runs twice for
each of them:

    kill     the host ends there. What is committed stays, its claims end when the clock is moved, another host goes on
    stall    it is only delayed there, until its claims have ended and another host is at work; then it goes on

After each run, states and results are those of the first one, everything that was sent arrived once, every effect has
one receipt, every timer fired once, no two steps have had one id, and the journals give the states again, byte for
byte. A step or adapter whose result was not recorded is called again, once for each crash at most. That is reported,
because it is what its code has to expect.
"""

import inspect
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeAlias, Unpack, cast

import cbor2

from fastness.handles.sync.plane import Plane
from fastness.hosts.apps import DEFAULT_HOST_APP, HostApp
from fastness.hosts.threads import HostOptions
from fastness.testing.hosts.contents import Contents, Normalize, differences, read_contents, unchanged
from fastness.testing.hosts.host_test import AsyncHostTest, HostTest
from fastness.testing.hosts.processes import Action, HostProcess, ObservedCall

SyncScenario: TypeAlias = Callable[[HostTest], Any]
AsyncScenario: TypeAlias = Callable[[AsyncHostTest], Coroutine[Any, Any, Any]]
Scenario: TypeAlias = SyncScenario | AsyncScenario

_SNAPSHOT_EVERY: Final = 8  # Records: so that many snapshots are compared with the journal.
_SHOWN_MAX: Final = 10  # Differences of one run.


class CrashFailure(AssertionError):
    """A crash at a boundary changed what happened."""


class CrashReport:
    """What `crash_everywhere` has found. All runs ended as the one without a crash."""

    def __init__(self, boundaries: list[str], result: Any) -> None:
        self.boundaries = boundaries  # Their names, in the order of the run without a crash.
        self.result = result  # What the scenario has returned.
        self.runs = 1
        self.repeated: Counter[str] = Counter()  # How often a step or adapter was called again, over all runs.

    def __str__(self) -> str:
        lines = [f"{len(self.boundaries)} boundaries, {self.runs} runs, all with the same outcome"]
        lines += [f"called again, because its result was not recorded: {each}" for each in sorted(self.repeated)]
        return "\n".join(lines)


def crash_everywhere(
    app: HostApp | None,
    scenario: Scenario,
    *,
    normalize: Normalize | None = None,
    stalls: bool = True,
    open_url: Callable[[], str] | None = None,
    **options: Unpack[HostOptions],
) -> CrashReport:
    """Run a scenario with a crash at each boundary of the host, and check that nothing is done twice, or lost.

    Args:
        app: the programs, workflows and adapters; None for the default app.
        scenario: is called with a new `HostTest` for each run. It may be a coroutine function, which is called with an
            `AsyncHostTest`. Its result is compared, too.
        normalize: is called with each state, result and payload before they are compared, to leave out what depends on
            the time: after a crash the clock is later.
        stalls: also run the scenario with a host that is delayed at each boundary.
        open_url: returns the URL of an empty plane for each run; they are in memory by default.
        options: those of the host, as `AsyncHost` describes them.

    Raises:
        CrashFailure: a run ended in another way. The message names the boundary, and what differs.
    """
    app = app or DEFAULT_HOST_APP
    change = normalize or unchanged
    options = {"snapshot_every": _SNAPSHOT_EVERY, **options}
    url = open_url or _in_memory
    first = _Interruption(None, "kill")
    expected, result = _play(app, scenario, first, normalize=change, url=url(), options=options)
    if faults := [*expected.faults, *first.faults]:
        raise CrashFailure("Without a crash:\n  " + "\n  ".join(faults))
    report = CrashReport(first.names, result)
    actions: tuple[Action, ...] = ("kill", "stall") if stalls else ("kill",)
    for number in range(len(first.names)):
        for action in actions:
            interruption = _Interruption(number, action)
            where = f"With a host that is {_done(action)} at boundary {number + 1} of {len(first.names)}, "
            try:
                with _without_warnings():
                    actual, got = _play(app, scenario, interruption, normalize=change, url=url(), options=options)
            except Exception as error:
                raise CrashFailure(f"{where}{interruption.name}, the scenario raised {error!r}") from error
            report.runs += 1
            found = [*interruption.faults, *differences(expected, actual)]
            if change(got) != change(result):
                found.append(f"the scenario returned {got!r}, and {result!r} without a crash")
            if found:
                raise CrashFailure(f"{where}{interruption.name}:\n  " + "\n  ".join(found[:_SHOWN_MAX]))
            report.repeated.update(interruption.repeated)
    return report


def _play(
    app: HostApp,
    scenario: Scenario,
    interruption: "_Interruption",
    *,
    normalize: Normalize,
    url: str,
    options: HostOptions,
) -> tuple[Contents, Any]:
    """Run the scenario once; what the plane holds then, and what the scenario has returned."""
    with HostTest(app, url=url, boundary=interruption, calls=interruption, **options) as test:
        interruption.plane = test.plane
        if inspect.iscoroutinefunction(scenario):
            result = test.call_async(cast("AsyncScenario", scenario))
        else:
            result = cast("SyncScenario", scenario)(test)
        interruption.end()
        return read_contents(test.plane, app, normalize), result


class _Interruption:
    """Interrupts the host once, at the boundary with a number, and follows what it calls."""

    plane: Plane  # Of the run.

    def __init__(self, number: int | None, action: Action) -> None:
        self.names: list[str] = []
        self.faults: list[str] = []
        self.repeated: Counter[str] = Counter()
        self._number = number
        self._action = action
        self._has_happened = False
        self._is_over = False
        self._begun: Counter[ObservedCall] = Counter()
        self._failed: Counter[ObservedCall] = Counter()
        self._repeated: set[ObservedCall] = set()
        self._may_repeat: set[ObservedCall] | None = None  # What was not recorded when the host was interrupted.
        self._named: dict[tuple[str, str], ObservedCall] = {}  # The call that each id was given to.

    @property
    def name(self) -> str:
        """The name of the boundary."""
        return self.names[self._number] if self._number is not None and self._number < len(self.names) else "none"

    def reach(self, process: HostProcess, name: str) -> Action | None:
        """Count the boundary, and interrupt the process if it is the one."""
        del process
        if self._is_over:
            return None
        self.names.append(name)
        if len(self.names) - 1 != self._number:
            return None
        self._has_happened = True
        return self._action

    def note_stale(self, process: HostProcess, name: str) -> None:
        """A host whose claim was lost has written."""
        self.faults.append(f"{process.host.owner} has committed {name} with an old fence, after another host's claim")

    def begin(self, call: ObservedCall) -> None:
        """Count a call, and check that it may happen."""
        if self._has_happened and self._may_repeat is None:  # The first one since then, so no result was recorded yet.
            self._may_repeat = {each for each in self._begun if self._is_open(each)}
        if (first := self._named.setdefault((call.world, call.id), call)) != call:
            self.faults.append(
                f"{first} and {call} have the same id {call.id}: its idempotency key lets only one happen"
            )
        self._begun[call] += 1
        allowed = self._failed[call] + 1
        if self._may_repeat is not None and (call in self._may_repeat or self._action == "stall"):
            allowed += 1
            if self._begun[call] > 1 and call not in self._repeated:
                self._repeated.add(call)
                self.repeated[str(call)] += 1
        if self._begun[call] > allowed:
            self.faults.append(f"{call} was called again after its result was recorded")

    def _is_open(self, call: ObservedCall) -> bool:
        """Whether the last attempt of a step or an effect has no outcome that is recorded."""
        if call.kind == "step":
            return self._begun[call] > _recorded_attempts(self.plane, call)
        return any(
            each.intent_hash.hex() == call.id and (each.error is None or self._begun[call] > self._failed[call])
            for each in self.plane.effects.list(world=call.world).effects
        )

    def fail(self, call: ObservedCall) -> None:
        """A call has failed, so that it may be tried again."""
        self._failed[call] += 1

    def end(self) -> None:
        """The scenario is over."""
        self._is_over = True
        if self._number is not None and not self._has_happened:
            self.faults.append(
                f"the scenario has only {len(self.names)} boundaries this time; it must do the same each time"
            )


def _recorded_attempts(plane: Plane, call: ObservedCall) -> int:
    """How many attempts of a step have an outcome in the journal."""
    generation, height, found = 0, 0, 0
    while records := plane.world(call.world).read(height):
        for record in records:
            value = cbor2.loads(record.value) if record.kind == "entry" else None
            match value:
                case ["continue", *_]:
                    generation += 1
                case ["step" | "failed" | "retry", _, number, *_] if f"{generation}.{number}" == call.id:
                    found += 1
        height = records[-1].height + 1
    return found


@contextmanager
def _without_warnings() -> Iterator[None]:
    """A host that was interrupted logs that it has lost its worlds, which is expected."""
    logger = logging.getLogger("fastness.host")
    logger.addFilter(_is_error)
    try:
        yield
    finally:
        logger.removeFilter(_is_error)


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


def _done(action: Action) -> str:
    return {"kill": "killed", "stall": "delayed"}[action]


def _in_memory() -> str:
    return "memory:"
