"""Who sent a request: the agent, its plane, and what its token allows.

The identity comes from the transport: the token of an HTTP request, or the context that `fastness mcp` was started in.
No tool has an argument that names the caller.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from fastness import AsyncPlane
from fastness.names import checked_agent

Report = Callable[[float, float | None, str | None], Awaitable[None]]


def allow_all(name: str) -> bool:
    """What a caller may do, or use, if the transport does not know: the plane decides on each call."""
    del name
    return True


async def _report_nothing(progress: float, total: float | None, message: str | None) -> None:
    del progress, total, message


@dataclass(frozen=True, kw_only=True)
class Caller:
    """The sender of one request.

    Attributes:
        plane: the plane, in the caller's universe. Its calls are authorized as the caller's.
        agent: the caller's name: the owner of its mailbox, leases and tasks.
        is_allowed: whether the caller may use a verb, as in `queue:put`; hides tools, and authorizes nothing.
        may_use_queue: whether the caller's token is for a queue of this name; hides tools, as `is_allowed` does.
        records: the plane for rows of the MCP server itself, such as exposed tools and questions of tasks. A server
            gives its own, so that an agent's token needs no access to them; without one it is `plane`.
        report: sends progress of the running request. The server sets it.
    """

    plane: AsyncPlane
    agent: str
    is_allowed: Callable[[str], bool] = allow_all
    may_use_queue: Callable[[str], bool] = allow_all
    records: AsyncPlane | None = None
    report: Report = _report_nothing

    def __post_init__(self) -> None:
        checked_agent(self.agent, self.plane.universe)

    @property
    def universe(self) -> str:
        """The universe that the caller works in."""
        return self.plane.universe

    @property
    def own_rows(self) -> AsyncPlane:
        """The plane that has the rows of the MCP server itself."""
        return self.records or self.plane

    async def report_progress(self, progress: float, total: float | None = None, message: str | None = None) -> None:
        """Tell the client how far the request is. Does nothing if the client did not ask for progress."""
        await self.report(progress, total, message)
