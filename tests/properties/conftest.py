"""Runs Hypothesis state machines: the `run_machine` fixture and the marker `examples`."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from tests.support.depth import depth_of

EXAMPLES_MIN = 4
STORED = {"tmp_path", "open_postgres", "postgres_url"}  # The fixtures of tests that need more than memory.


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test marked `examples(count)` with that many examples, and with 100 times as many in nightly runs.

    A run without the full depth has a share of them.
    """
    marker = metafunc.definition.get_closest_marker("examples")
    if marker is not None:
        (count,) = marker.args
        depth = depth_of(metafunc.config)
        share = depth.stored_examples if STORED & set(metafunc.fixturenames) else depth.examples
        some = pytest.param(max(min(count, EXAMPLES_MIN), round(count * share)), id="suite")
        nightly = pytest.param(100 * count, id="nightly", marks=pytest.mark.nightly)
        metafunc.parametrize("examples", [some, nightly])


@pytest.fixture
def run_machine(examples: int) -> Callable[..., None]:
    """Runs a state machine class with these class attributes."""

    def run(machine: type[RuleBasedStateMachine], *, steps: int, **attributes: Any) -> None:
        configured = type(machine.__name__, (machine,), attributes)
        bounds = settings(max_examples=examples, stateful_step_count=steps, suppress_health_check=list(HealthCheck))
        run_state_machine_as_test(configured, settings=bounds)

    return run
