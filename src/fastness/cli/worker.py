"""`fastness worker`: runs the tasks of a Python module."""

import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import click
import msgspec

from fastness.cli import connect
from fastness.cli.commands import LeafCommand, given_options
from fastness.cli.completion import Names, queues
from fastness.cli.durations import SECONDS
from fastness.cli.modules import load_module
from fastness.errors import InvalidArgument
from fastness.limits import WORKER_CONCURRENCY_MAX
from fastness.tasks.app import DEFAULT_APP, TaskApp

_PATIENCE_SECONDS: Final = 30.0  # A worker outlives a restart of its server.


@click.command(
    cls=LeafCommand,
    examples=[
        "fastness worker shop.tasks:app --concurrency 8",
        "fastness worker shop.tasks --queue emails --queue reports",
        "kill -HUP PID     # finish the running calls, then start again with the changed code",
    ],
)
@click.argument("module", metavar="MODULE[:APP]")
@click.option(
    "--concurrency",
    type=click.IntRange(1, WORKER_CONCURRENCY_MAX),
    default=8,
    show_default=True,
    help="How many calls of each queue run at a time.",
)
@click.option(
    "--queue", "names", type=Names(queues), multiple=True, help="Run the tasks of this queue only. Repeatable."
)
@click.option(
    "--drain-seconds",
    type=SECONDS,
    default=10.0,
    help="How long a worker that stops waits for running calls.  [default: 10]",
)
@click.option(
    "--delay-on-close",
    "delay_on_close_seconds",
    type=SECONDS,
    help="How long calls wait that a worker returns unfinished when it stops.  [default: 0]",
)
def worker(
    *,
    module: str,
    concurrency: int,
    names: tuple[str, ...],
    drain_seconds: float,
    delay_on_close_seconds: float | None,
) -> None:
    """APP is the name of a TaskApp in MODULE. Leave it out to run the tasks that are declared with `@fastness.task`.

    MODULE is imported from the current folder or PYTHONPATH. The plane is the one of --url; otherwise the one that the
    app names.

    SIGTERM and SIGINT finish the running calls and exit with code 0; a second one ends the worker at once. SIGHUP
    finishes them and starts the worker again, with the changed code.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    reload = False

    with _loaded(module) as app:
        tasks = app.worker(
            concurrency=concurrency,
            queues=names or None,
            drain_seconds=drain_seconds,
            delay_on_close_seconds=delay_on_close_seconds,
        )

        def stop_to_reload(*_: object) -> None:
            nonlocal reload
            reload = True
            tasks.request_stop()

        signal.signal(signal.SIGHUP, stop_to_reload)
        click.echo(f"Running the tasks of {', '.join(tasks.queues)} with concurrency {concurrency}")
        tasks.run()
    if reload and tasks.stopped_by is None:
        sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


@contextmanager
def _loaded(name: str) -> Iterator[TaskApp]:
    """The app to run, with its plane."""
    if "url" in given_options():  # Checked before the module runs: a mistyped URL has no other effect.
        with connect.open_plane(_target()) as plane:
            app = _find_app(name)
            app.use(plane)
            yield app
        return
    app = _find_app(name)
    if not app.has_target:
        with connect.open_plane(_target()) as plane:
            app.use(plane)
            yield app
        return
    with app:
        yield app


def _target() -> connect.Target:
    target = connect.current_target()
    if "patience" in given_options():
        return target
    return msgspec.structs.replace(target, patience_seconds=_PATIENCE_SECONDS)


def _find_app(name: str) -> TaskApp:
    """The app of `module:name`, or of a module whose tasks belong to the default app.

    Raises:
        InvalidArgument: the module cannot be imported, or has no such app.
    """
    module_name, _, attribute = name.partition(":")
    module = load_module(module_name)
    apps = [key for key, value in vars(module).items() if isinstance(value, TaskApp)]
    found = getattr(module, attribute, None) if attribute else DEFAULT_APP
    if not isinstance(found, TaskApp):
        known = f"it has {', '.join(apps)}" if apps else "leave it out for tasks of fastness.task"
        raise InvalidArgument(f"{attribute} of module {module_name} is not a TaskApp; {known}")
    if not attribute and not DEFAULT_APP.tasks and apps:
        raise InvalidArgument(f"The tasks of module {module_name} belong to an app; write {module_name}:{apps[0]}")
    return found
