"""`fastness mcp`: serves agents over standard input and output with the Model Context Protocol."""

import asyncio
import logging
import sys
from contextlib import AsyncExitStack
from functools import partial

import click
import msgspec

from fastness.cli import completion, connect, mcp_expose
from fastness.cli.commands import CommandGroup, given_options
from fastness.errors import InvalidArgument, Unsupported
from fastness.names import UNIVERSE
from fastness.stop_signals import stop_on_signals
from fastness.wire.permissions import EVERYTHING, covers, covers_queue
from fastness.wire.tokens import TokenInfo

_AGENT = "local"  # The agent of a plane that knows no tokens.
_PATIENCE_SECONDS = 30.0  # An agent's session outlives a restart of its server.


class _McpGroup(CommandGroup):
    """Without a command, it serves. Its examples are of that."""

    examples = ("fastness mcp --context work", "fastness mcp --url dir:./data --agent ada")

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return click.Group.parse_args(self, ctx, args)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Examples"):
            for example in self.examples:
                formatter.write(f"  {example}\n")
        super().format_epilog(ctx, formatter)


@click.group(cls=_McpGroup, invoke_without_command=True, completions={"name": completion.queues})
@click.option("--agent", metavar="NAME", help="The agent's name, on a plane without tokens.  [default: local]")
@click.pass_context
def mcp(ctx: click.Context, *, agent: str | None) -> None:
    """The Model Context Protocol (MCP) is spoken over standard input and output.

    Configure it as a command in an MCP client: the client starts the process and talks to it. On a server with tokens
    the agent's name is the name of its token. Logs go to standard error. It stops when the client closes its end, and
    on SIGTERM.

    A data directory (dir:PATH) stays locked while this runs; use a server if several agents share a plane.
    """
    if ctx.invoked_subcommand is None:
        serve(agent)


for _command in (mcp_expose.expose, mcp_expose.list_, mcp_expose.conceal):
    mcp.add_command(_command)


def serve(agent: str | None) -> None:
    """Serve until the client closes its end, or a signal."""
    try:
        import fastness.mcp  # noqa: F401
    except ImportError as error:
        raise Unsupported(str(error)) from error
    logging.basicConfig(
        level=logging.WARNING, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    asyncio.run(_serve(_target(), agent))


async def _serve(target: connect.Target, agent: str | None) -> None:
    import anyio

    from fastness.mcp import Caller, make_server
    from fastness.mcp.stdio import serve_stdio
    from fastness.mcp.subscriptions import polling_subscriptions

    async with AsyncExitStack() as stack:
        plane = await stack.enter_async_context(connect.open_plane_async(target))
        token = await plane.tokens.self()
        universe = _universe_of(target, token)
        if universe != target.universe:
            other = msgspec.structs.replace(target, universe=universe)
            plane = await stack.enter_async_context(connect.open_plane_async(other))
        if target.is_exclusive:
            click.echo(f"{target.url} is locked until this process ends; agents share a server instead", err=True)
        if token is None:
            caller = Caller(plane=plane, agent=agent or _AGENT)
        elif agent in (None, token.name):
            caller = Caller(
                plane=plane,
                agent=token.name,
                is_allowed=partial(covers, token.verbs),
                may_use_queue=partial(covers_queue, token.queues),
            )
        else:
            raise InvalidArgument(f"The token is of the agent {token.name}, not of {agent}; leave --agent out")
        server = make_server(lambda context: caller, features=[polling_subscriptions().install])  # noqa: ARG005
        loop = asyncio.get_running_loop()
        with anyio.CancelScope() as scope, stop_on_signals(lambda _: loop.call_soon_threadsafe(scope.cancel)):
            await serve_stdio(server)


def _universe_of(target: connect.Target, token: TokenInfo | None) -> str:
    """The universe of the context; that of a token which has only one, if the context names none."""
    if token is not None and target.universe == UNIVERSE and len(token.universes) == 1:
        return target.universe if token.universes == [EVERYTHING] else token.universes[0]
    return target.universe


def _target() -> connect.Target:
    target = connect.current_target()
    if "patience" in given_options():
        return target
    return msgspec.structs.replace(target, patience_seconds=_PATIENCE_SECONDS)
