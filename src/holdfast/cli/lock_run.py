"""A command that runs while a lease is held, and not for a moment longer.

    renewed ──► the command goes on                       at a third of the ttl, from a thread of its own
    fenced  ──► SIGTERM at once, SIGKILL after the grace  somebody else may have the lease
    silence ──► SIGTERM, SIGKILL before the lease ends    what cannot be renewed is lost, though nobody said so

Silence is measured by this process's own monotonic clock from the moment before a renewal was asked for, so that the
command is gone before the lease passes on, whatever the clocks of the two machines say.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, Final

import click

from holdfast.errors import Backend, Busy, HoldfastError, LeaseExpired

_LOOK_SECONDS: Final = 0.05  # How often the lease is looked at while the command runs.
_SPARE: Final = 10  # A tenth of the lease is left for a kill that comes late on a busy machine.
_RETRY_SECONDS: Final = 1.0  # How soon a renewal that got no answer is tried again, at the latest.
_PASSED_ON: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_BY_TERMINAL: Final = (signal.SIGINT, signal.SIGQUIT)  # A terminal sends these to everybody in front of it.
_CANNOT_RUN: Final = 126
_NO_SUCH_COMMAND: Final = 127
_KILLED: Final = 128  # Shells add the number of the signal.


class Renewal:
    """Keeps a lease alive, and knows until when it is surely held."""

    def __init__(self, renew: Callable[[], Any], ttl_seconds: float) -> None:
        self.ttl_seconds = ttl_seconds
        self.lost: HoldfastError | None = None
        self.trouble: HoldfastError | None = None
        self.held_until = 0.0
        self._renew = renew
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="holdfast-renewal", daemon=True)

    def start(self) -> None:
        """Renew once, which says from when on the lease lasts, and then again and again.

        Raises:
            Fenced: it is lost already.
        """
        self._once()
        self._thread.start()

    def stop(self) -> None:
        self._ending.set()
        if self._thread.is_alive():
            self._thread.join()

    def _once(self) -> None:
        asked = time.monotonic()
        self._renew()
        self.held_until = asked + self.ttl_seconds

    def _run(self) -> None:
        pause = self.ttl_seconds / 3
        while not self._ending.wait(pause):
            try:
                self._once()
                self.trouble, pause = None, self.ttl_seconds / 3
            except (Backend, Busy) as error:
                self.trouble, pause = error, min(self.ttl_seconds / 10, _RETRY_SECONDS)
            except HoldfastError as error:
                self.lost = error
                return


def run(command: Sequence[str], environment: Mapping[str, str], renewal: Renewal, *, grace_seconds: float) -> int:
    """Run a command for as long as the lease is held; its exit code as a shell would say it.

    Raises:
        Fenced: the lease was lost, and the command was stopped.
    """
    renewal.start()
    try:
        # What a script starts gets a group of its own, so that all of it can be stopped. What a person starts stays in
        # front of the terminal, which tells it itself when it is interrupted.
        is_attended = sys.stdin.isatty()
        process = _started(command, environment, is_attended)
        if isinstance(process, int):
            return process
        return _supervised(process, renewal, grace_seconds, is_attended=is_attended)
    finally:
        renewal.stop()


def _started(
    command: Sequence[str], environment: Mapping[str, str], is_attended: bool
) -> "subprocess.Popen[bytes] | int":
    try:
        return subprocess.Popen(command, env=environment, process_group=None if is_attended else 0)
    except FileNotFoundError:
        click.echo(f"holdfast: there is no command {command[0]}", err=True)
        return _NO_SUCH_COMMAND
    except OSError as error:
        click.echo(f"holdfast: {command[0]} cannot be run ({error.strerror})", err=True)
        return _CANNOT_RUN


def _supervised(
    process: "subprocess.Popen[bytes]", renewal: Renewal, grace_seconds: float, *, is_attended: bool
) -> int:
    grace_seconds = min(grace_seconds, renewal.ttl_seconds / 3)
    ended = threading.Event()

    def wait() -> None:
        process.wait()
        ended.set()

    threading.Thread(target=wait, name="holdfast-command", daemon=True).start()
    with _passing_on(process, is_attended):
        while not ended.wait(_LOOK_SECONDS):
            if renewal.lost is not None:
                _stop(process, ended, time.monotonic() + grace_seconds, is_attended)
                raise LeaseExpired(f"The lock is lost, and the command was stopped: {renewal.lost}") from renewal.lost
            if time.monotonic() >= renewal.held_until - grace_seconds:
                _stop(process, ended, renewal.held_until - renewal.ttl_seconds / _SPARE, is_attended)
                why = renewal.trouble or "a renewal got no answer in time"
                raise LeaseExpired(
                    f"The lock could not be kept alive, and the command was stopped: {why}"
                ) from renewal.trouble
    code = process.returncode
    return code if code >= 0 else _KILLED - code


def _stop(process: "subprocess.Popen[bytes]", ended: threading.Event, deadline: float, is_attended: bool) -> None:
    _send(process, signal.SIGTERM, is_attended)
    ended.wait(max(deadline - time.monotonic(), 0.0))
    _send(process, signal.SIGKILL, is_attended)
    ended.wait()


def _send(process: "subprocess.Popen[bytes]", number: int, is_attended: bool) -> None:
    with suppress(ProcessLookupError):
        if is_attended:
            process.send_signal(number)
        else:
            os.killpg(process.pid, number)


@contextmanager
def _passing_on(process: "subprocess.Popen[bytes]", is_attended: bool) -> Iterator[None]:
    """Pass signals on to the command, which decides what they mean."""

    def pass_on(number: int, _frame: FrameType | None) -> None:
        if not (is_attended and number in _BY_TERMINAL):
            _send(process, number, is_attended)

    before = {number: signal.signal(number, pass_on) for number in _PASSED_ON}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
