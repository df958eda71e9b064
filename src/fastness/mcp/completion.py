"""Completion of the names in prompts and resource templates: queues, worlds, agents, reports, and own mail threads."""

import string
from collections.abc import Awaitable, Callable
from typing import Final

import mcp_types

from fastness.errors import NotAllowed
from fastness.limits import MCP_COMPLETIONS_MAX, NAME_BYTES_MAX
from fastness.mcp.caller import Caller
from fastness.mcp.dispatch import FastnessServer, RequestContext
from fastness.mcp.resources import named_reports, own_mails
from fastness.mcp.task_marks import TASK_WORLD
from fastness.names import REPORTS

_CHARACTERS: Final = "".join(sorted(f"{string.ascii_letters}{string.digits}._@:+=-"))  # Of names.
_READ_MAX: Final = MCP_COMPLETIONS_MAX + 1  # One more than is shown tells whether there are others.


async def _queues(caller: Caller, after: str) -> list[str]:
    return await caller.plane.queues(after=after, limit=_READ_MAX)


async def _worlds(caller: Caller, after: str) -> list[str]:
    found = await caller.plane.worlds(after=after, limit=_READ_MAX)
    return [name for name in found if not name.startswith(TASK_WORLD)]  # Tasks have ids of their own.


async def _agents(caller: Caller, after: str) -> list[str]:
    return [agent.name for agent in await caller.plane.agents.known(after=after, limit=_READ_MAX)]


async def _reports(caller: Caller, after: str) -> list[str]:
    start = (after,) if after else None
    page = await caller.plane.collection(REPORTS).scan(REPORTS, after=start, limit=_READ_MAX)
    return list(named_reports(page.rows))


async def _threads(caller: Caller, typed: str) -> list[str]:
    found = sorted({mail.correlation_id for mail in await own_mails(caller)})
    return [name for name in found if name.startswith(typed)]


_BY_ARGUMENT: Final[dict[str, Callable[[Caller, str], Awaitable[list[str]]]]] = {
    "queue": _queues,
    "world": _worlds,
    "to": _agents,
    "report": _reports,
}


def add_completion(server: FastnessServer) -> None:
    """Complete the arguments of prompts and resource templates."""
    server.handle("completion/complete", mcp_types.CompleteRequestParams, _complete)


async def _complete(
    context: RequestContext, caller: Caller, params: mcp_types.CompleteRequestParams
) -> mcp_types.CompleteResult:
    del context
    try:
        found = await _found(caller, params.argument.name, params.argument.value)
    except NotAllowed:  # A client completes while its user types: nothing is an answer, an error is not.
        found = []
    shown = found[:MCP_COMPLETIONS_MAX]
    return mcp_types.CompleteResult(
        completion=mcp_types.Completion(values=shown, has_more=len(found) > MCP_COMPLETIONS_MAX)
    )


async def _found(caller: Caller, argument: str, typed: str) -> list[str]:
    """Names that begin with what was typed, in order; at most one more than is shown."""
    if argument == "thread":
        return await _threads(caller, typed)
    find = _BY_ARGUMENT.get(argument)
    if find is None or len(typed) > NAME_BYTES_MAX or not all(each in _CHARACTERS for each in typed):
        return []
    return [name for name in await find(caller, _before(typed)) if name.startswith(typed)]


def _before(prefix: str) -> str:
    """The last possible name before those that begin with `prefix`."""
    if not prefix:
        return ""
    start, place = prefix[:-1], _CHARACTERS.index(prefix[-1])
    if not place:  # There is no name between `start` and the prefix.
        return start
    return f"{start}{_CHARACTERS[place - 1]}".ljust(NAME_BYTES_MAX, _CHARACTERS[-1])
