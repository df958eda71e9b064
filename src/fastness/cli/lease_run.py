"""Runs a command while a lease is held, and stops it before the lease expires.

    renewed   ──► the command continues                      renewed every third of the ttl, by a thread
    fenced    ──► SIGTERM at once, SIGKILL after the grace   another owner may hold the lease
    no answer ──► SIGTERM, SIGKILL before the lease expires  a lease that cannot be renewed counts as lost

The time without an answer is measured by this process's monotonic clock, from before a renewal is requested. So the
command has ended before another owner can acquire the lease, even if the clocks of the two machines differ.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any, Final, Self

import click

from fastness.errors import Backend, Busy, FastnessError, LeaseExpired

_CHECK_SECONDS: Final = 0.05  # How often the lease is checked while the command runs.
_KILL_MARGIN_DIVISOR: Final = 10  # SIGKILL comes a tenth of the ttl before expiry, for a busy machine.
_RETRY_SECONDS: Final = 1.0  # The longest pause before a renewal without an answer is retried.
_FORWARDED: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_BY_TERMINAL: Final = (signal.SIGINT, signal.SIGQUIT)  # A terminal sends these to its whole foreground process group.
_CANNOT_RUN: Final = 126
_COMMAND_NOT_FOUND: Final = 127
_SIGNAL_EXIT_BASE: Final = 128  # Shells add the number of the signal.


class LeaseRenewer:
    """Renews a lease from a thread, and knows until when it is certainly held."""

    def __init__(self, renew: Callable[[], Any], ttl_seconds: float) -> None:
        self.ttl_seconds = ttl_seconds
        self.lost: FastnessError | None = None
        self.last_error: FastnessError | None = None
        self.held_until = 0.0
        self._renew = renew
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fastness-renewer", daemon=True)

    def start(self) -> None:
        """Renew once, to know when the lease started, and then regularly.

        Raises:
            Fenced: the lease is already lost.
        """
        self._renew_once()
        self._thread.start()

    def stop(self) -> None:
        self._ending.set()
        if self._thread.is_alive():
            self._thread.join()

    def _renew_once(self) -> None:
        requested_at = time.monotonic()
        self._renew()
        self.held_until = requested_at + self.ttl_seconds

    def _run(self) -> None:
        pause = self.ttl_seconds / 3
        while not self._ending.wait(pause):
            try:
                self._renew_once()
                self.last_error, pause = None, self.ttl_seconds / 3
            except (Backend, Busy) as error:
                self.last_error, pause = error, min(self.ttl_seconds / 10, _RETRY_SECONDS)
            except FastnessError as error:
                self.lost = error
                return


def run(command: Sequence[str], environment: Mapping[str, str], renewer: LeaseRenewer, *, grace_seconds: float) -> int:
    """Run a command while the lease is held. Returns its exit code, as a shell would.

    Raises:
        Fenced: the lease was lost, and the command was stopped.
    """
    renewer.start()
    try:
        # Started from a script, the command gets its own process group, so its children are stopped with it. Started
        # from a terminal, it stays in the foreground group, which receives the terminal's signals itself.
        has_terminal = sys.stdin.isatty()
        with _SignalForwarder(has_terminal=has_terminal) as forwarder:
            process = _start(command, environment, has_terminal)
            if isinstance(process, int):
                return process
            forwarder.attach(process)
            return _supervise(process, renewer, grace_seconds, has_terminal=has_terminal)
    finally:
        renewer.stop()


def _start(
    command: Sequence[str], environment: Mapping[str, str], has_terminal: bool
) -> "subprocess.Popen[bytes] | int":
    try:
        return subprocess.Popen(command, env=environment, process_group=None if has_terminal else 0)
    except FileNotFoundError:
        click.echo(f"fastness: command not found: {command[0]}", err=True)
        return _COMMAND_NOT_FOUND
    except OSError as error:
        click.echo(f"fastness: cannot run {command[0]} ({error.strerror})", err=True)
        return _CANNOT_RUN


def _supervise(
    process: "subprocess.Popen[bytes]", renewer: LeaseRenewer, grace_seconds: float, *, has_terminal: bool
) -> int:
    grace_seconds = min(grace_seconds, renewer.ttl_seconds / 3)
    ended = threading.Event()

    def wait() -> None:
        process.wait()
        ended.set()

    threading.Thread(target=wait, name="fastness-command", daemon=True).start()
    while not ended.wait(_CHECK_SECONDS):
        if renewer.lost is not None:
            _stop(process, ended, time.monotonic() + grace_seconds, has_terminal)
            raise LeaseExpired(f"The lease was lost and the command was stopped: {renewer.lost}") from renewer.lost
        if time.monotonic() >= renewer.held_until - grace_seconds:
            _stop(process, ended, renewer.held_until - renewer.ttl_seconds / _KILL_MARGIN_DIVISOR, has_terminal)
            why = renewer.last_error or "a renewal received no answer in time"
            raise LeaseExpired(
                f"The lease could not be renewed and the command was stopped: {why}"
            ) from renewer.last_error
    code = process.returncode
    return code if code >= 0 else _SIGNAL_EXIT_BASE - code


def _stop(process: "subprocess.Popen[bytes]", ended: threading.Event, deadline: float, has_terminal: bool) -> None:
    _send(process, signal.SIGTERM, has_terminal)
    ended.wait(max(deadline - time.monotonic(), 0.0))
    _send(process, signal.SIGKILL, has_terminal)
    ended.wait()


def _send(process: "subprocess.Popen[bytes]", number: int, has_terminal: bool) -> None:
    with suppress(ProcessLookupError):
        if has_terminal:
            process.send_signal(number)
        else:
            os.killpg(process.pid, number)


class _SignalForwarder:
    """Forwards signals to the command. Those that arrive before it has started are sent to it then."""

    def __init__(self, *, has_terminal: bool) -> None:
        self._has_terminal = has_terminal
        self._process: subprocess.Popen[bytes] | None = None
        self._early: list[int] = []

    def attach(self, process: "subprocess.Popen[bytes]") -> None:
        """Forward to this process from now on."""
        self._process = process
        for number in self._early:
            _send(process, number, self._has_terminal)

    def _forward(self, number: int, _frame: FrameType | None) -> None:
        if self._has_terminal and number in _BY_TERMINAL:
            return
        if self._process is None:
            self._early.append(number)
        else:
            _send(self._process, number, self._has_terminal)

    def __enter__(self) -> Self:
        self._previous = {number: signal.signal(number, self._forward) for number in _FORWARDED}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
