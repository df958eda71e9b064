"""Runners: what a host calls when a claimed world has work."""

from collections.abc import Callable
from typing import Protocol

from fastness.hosts.hosted_world import HostedWorld


class Runner(Protocol):
    """Runs one claimed world, from its claim until the claim is lost or given back.

    A host calls its methods one at a time, and many runners at once on one event loop. What a runner does between turns
    commits by itself, or asks for a turn (`request_turn` of its world).
    """

    @property
    def is_active(self) -> bool:
        """Whether something runs between turns, such as steps of a workflow: the host then renews its claim.

        An inactive world is given back when it has had no items for half of its claim.
        """
        ...

    @property
    def waits(self) -> bool:
        """Whether an inactive world waits for more than its own timers, such as a signal to a workflow."""
        ...

    async def run_turn(self) -> None:
        """Handle the items that arrived, at most one batch, and commit. The first call follows the claim.

        The host calls it again at once while items are left.

        Raises:
            Fenced: the claim is lost. The host closes the runner and drops the world.
            WorkflowChanged: the turn cannot succeed with this code. Another host may have other code, so it is tried
                again; after the last attempt the world is stopped, whatever `on_error` is, until it is resumed.
            Exception: the turn failed. The host closes the runner, records the error, and gives the world back: it is
                claimed again after a back-off.
        """
        ...

    async def drain(self) -> None:
        """Finish and commit what runs between turns, and begin nothing more: the host stops. It may be cancelled."""
        ...

    async def close(self) -> None:
        """Stop without a commit: the claim is lost, or is about to be given back."""
        ...


RunnerFactory = Callable[[HostedWorld], Runner]
