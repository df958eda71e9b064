"""`fastness host`: runs the programs, workflows and adapters of a Python module."""

import logging
import os
import signal
import sys
from typing import Final, Literal

import click
import msgspec

from fastness.cli import connect
from fastness.cli.commands import LeafCommand, given_options
from fastness.cli.durations import SECONDS
from fastness.cli.modules import load_module
from fastness.errors import InvalidArgument
from fastness.hosts.apps import DEFAULT_HOST_APP, HostApp
from fastness.hosts.threads import Host
from fastness.limits import EFFECT_ATTEMPTS_MAX, HOST_CONCURRENCY_MAX

_PATIENCE_SECONDS: Final = 30.0  # A host outlives a restart of its server.


@click.command(
    cls=LeafCommand,
    examples=[
        "fastness host shop.agents",
        "fastness host shop.agents:app --concurrency 16",
        "kill -HUP PID     # finish the running turns, then start again with the changed code",
    ],
)
@click.argument("module", metavar="MODULE[:APP]")
@click.option(
    "--concurrency",
    type=click.IntRange(1, HOST_CONCURRENCY_MAX),
    default=64,
    show_default=True,
    help="How many turns run at a time.",
)
@click.option(
    "--effect-concurrency",
    type=click.IntRange(1, HOST_CONCURRENCY_MAX),
    default=16,
    show_default=True,
    help="How many adapters run at a time.",
)
@click.option("--program", "names", multiple=True, help="Run the worlds of this program only. Repeatable.")
@click.option(
    "--lease-seconds",
    type=SECONDS,
    default=10.0,
    help="After how long the worlds of a host that died continue on another one.  [default: 10]",
)
@click.option(
    "--on-error",
    type=click.Choice(["set_aside", "stop"]),
    default="set_aside",
    show_default=True,
    help="What becomes of an item that a program fails to handle: it is set aside, or its world is stopped.",
)
@click.option(
    "--max-attempts",
    type=click.IntRange(1, EFFECT_ATTEMPTS_MAX),
    default=5,
    show_default=True,
    help="After how many attempts.",
)
@click.option(
    "--drain-seconds",
    type=SECONDS,
    default=10.0,
    help="How long a host that stops waits for running turns and adapters.  [default: 10]",
)
def host(
    *,
    module: str,
    concurrency: int,
    effect_concurrency: int,
    names: tuple[str, ...],
    lease_seconds: float,
    on_error: Literal["set_aside", "stop"],
    max_attempts: int,
    drain_seconds: float,
) -> None:
    """APP is the name of a HostApp in MODULE. Leave it out to run what is declared with `@fastness.program` and
    `@fastness.workflow`.

    MODULE is imported from the current folder or PYTHONPATH. Its programs and workflows run in this process, and its
    adapters carry out their effects. Several hosts share the worlds of a plane.

    SIGTERM and SIGINT finish what runs, give all worlds back, and exit with code 0; a second one ends the host at once.
    SIGHUP finishes what runs and starts the host again, with the changed code.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    reload = False
    with connect.open_plane(_target()) as plane:
        app = _find_app(module)
        running = Host(
            plane,
            app,
            programs=list(names) or None,
            concurrency=concurrency,
            effect_concurrency=effect_concurrency,
            lease_seconds=lease_seconds,
            on_error=on_error,
            max_attempts=max_attempts,
            drain_seconds=drain_seconds,
        )

        def stop_to_reload(*_: object) -> None:
            nonlocal reload
            reload = True
            running.request_stop()

        signal.signal(signal.SIGHUP, stop_to_reload)
        running.run(on_start=lambda: click.echo(f"Running {', '.join((*running.programs, *app.adapters))}"))
    if reload and running.stopped_by is None:
        sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _target() -> connect.Target:
    target = connect.current_target()
    if "patience" in given_options():
        return target
    return msgspec.structs.replace(target, patience_seconds=_PATIENCE_SECONDS)


def _find_app(name: str) -> HostApp:
    """The app of `module:name`, or of a module whose programs belong to the default app.

    Raises:
        InvalidArgument: the module cannot be imported, or has no such app.
    """
    module_name, _, attribute = name.partition(":")
    module = load_module(module_name)
    apps = [key for key, value in vars(module).items() if isinstance(value, HostApp)]
    found = getattr(module, attribute, None) if attribute else DEFAULT_HOST_APP
    if not isinstance(found, HostApp):
        known = f"it has {', '.join(apps)}" if apps else "leave it out for programs of fastness.program"
        raise InvalidArgument(f"{attribute} of module {module_name} is not a HostApp; {known}")
    if not attribute and not DEFAULT_HOST_APP.runners and not DEFAULT_HOST_APP.adapters and apps:
        raise InvalidArgument(f"The programs of module {module_name} belong to an app; write {module_name}:{apps[0]}")
    return found
