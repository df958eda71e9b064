"""Child processes that begin with the server already imported.

Importing the server takes two seconds of processor time, and hundreds of tests start one. The test run forks one
process with everything imported, before it has any thread. It accepts requests on a Unix socket, and forks a child for
each of them. Without such a process, as under a plain `pytest`, a child is an ordinary Python process.
"""

import atexit
import ctypes
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Final

from tests.support.fork_protocol import ADDRESS, SIZE, STATUS, ask, read_status

_PR_SET_PDEATHSIG: Final = 1
_PROGRAMS: Final = Path(__file__).with_name("programs")


def run_python(
    arguments: Sequence[str | Path],
    *,
    env: dict[str, str] | None = None,
    cwd: Path | str | None = None,
    check: bool = False,
) -> "subprocess.CompletedProcess[str]":
    """Run `python -W error` with these arguments to its end, without input; returns its output."""
    pipe = subprocess.PIPE
    with start_python(
        arguments, env=env, cwd=cwd, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True
    ) as process:
        output, errors = process.communicate()
    done = subprocess.CompletedProcess(process.args, process.returncode, output, errors)
    if check and done.returncode:
        raise AssertionError(f"{arguments[0]} ended with {done.returncode}: {errors[-5_000:]}")
    return done


def start_python(
    arguments: Sequence[str | Path],
    *,
    env: dict[str, str] | None = None,
    cwd: Path | str | None = None,
    stdin: int | IO[Any] | None = None,
    stdout: int | IO[Any] | None = None,
    stderr: int | IO[Any] | None = None,
    text: bool = False,
) -> "subprocess.Popen[Any]":
    """Start `python -W error` with these arguments: `-c CODE …`, `-m MODULE …`, `- …` or `FILE …`."""
    given = [str(each) for each in arguments]
    kind = _Forked if ADDRESS in os.environ else subprocess.Popen
    command = [sys.executable, "-W", "error", *given]
    return kind(command, env=env, cwd=cwd, stdin=stdin, stdout=stdout, stderr=stderr, text=text)


class _Forked(subprocess.Popen[Any]):
    """A Popen whose process is forked by the fork server: pipes, waits and signals are those of Popen.

    The fork server is its parent and sends the exit status.
    """

    _connection: socket.socket

    def _execute_child(  # type: ignore[no-untyped-def]  # noqa: PLR0917 - as that of Popen.
        self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell,
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, *_,
    ) -> None:  # fmt: skip
        fds = [fd if fd != -1 else own for own, fd in enumerate((p2cread, c2pwrite, errwrite))]
        environment = dict(os.environ if env is None else env)
        arguments = args[3:]  # After `python -W error`.
        self._connection = ask(os.environ[ADDRESS], arguments, environment, os.fspath(cwd or Path.cwd()), fds)
        self.pid = read_status(self._connection)
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]

    def _internal_poll(self, *_: object, **__: object) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self._wait(0)
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        with self._waitpid_lock:  # type: ignore[attr-defined]
            if self.returncode is None:
                self._connection.settimeout(timeout)
                try:
                    self.returncode = read_status(self._connection)
                except (TimeoutError, BlockingIOError):
                    raise subprocess.TimeoutExpired(self.args, timeout or 0) from None
                self._connection.close()
        return int(self.returncode)


def python_command(*arguments: str) -> tuple[str, list[str]]:
    """The program and the arguments that run Python, for a library that starts its child processes itself."""
    if address := os.environ.get(ADDRESS):
        return sys.executable, ["-IS", str(_PROGRAMS / "program.py"), address, "forked", *arguments]
    return sys.executable, ["-W", "error", *arguments]


def program_environment() -> dict[str, str]:
    """The variables with which a shell finds `python` and `fastness`: those of this Python, forked where that pays."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    if ADDRESS not in os.environ:
        return {"PATH": path}
    path = f"{_PROGRAMS}{os.pathsep}{path}"
    return {"PATH": path, ADDRESS: os.environ[ADDRESS], "TESTS_OF_FASTNESS_PYTHON": sys.executable}


def serve_forks(address: Path) -> int:
    """Fork the server, which listens at `address`; return its process ID. It ends with this process."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listening.bind(str(address))
    listening.listen(128)
    if pid := os.fork():
        listening.close()
        return pid
    _end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # A Ctrl-C is for the test run, which ends this process.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        connection, _ = listening.accept()
        if os.fork() == 0:
            listening.close()
            _attend(connection)
        connection.close()


def _attend(connection: socket.socket) -> None:
    """Start the process that a connection asks for, and send its status when it ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _end_with_parent()
    try:
        head, fds, _, _ = socket.recv_fds(connection, SIZE.size, 3)
        message = connection.recv(SIZE.unpack(head)[0], socket.MSG_WAITALL)
        request = json.loads(message)
        if (pid := os.fork()) == 0:
            connection.close()
            _become(request, fds)
        for fd in fds:
            os.close(fd)
        connection.sendall(STATUS.pack(pid))
        ended = os.pidfd_open(pid)
        ready, _, _ = select.select([ended, connection.fileno()], [], [])
        if ended not in ready:  # The one that asked for it has been killed.
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        with suppress(OSError):  # The test has ended.
            connection.sendall(STATUS.pack(os.waitstatus_to_exitcode(status)))
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _become(request: dict[str, Any], fds: list[int]) -> None:
    """Be the process that was asked for."""
    code = 1
    try:
        _end_with_parent()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number, fd in enumerate(fds):
            os.dup2(fd, number)
        os.closerange(3, 1_024)
        buffering = 1 if "PYTHONUNBUFFERED" in request["environment"] else -1
        streams = {
            "stdin": open(0),  # noqa: SIM115 - as long as the process.
            "stdout": open(1, "w", encoding="utf-8", buffering=buffering),  # noqa: SIM115
            "stderr": open(2, "w", encoding="utf-8", buffering=1, errors="backslashreplace"),  # noqa: SIM115
        }
        for name, opened in streams.items():
            setattr(sys, name, opened)
            setattr(sys, f"__{name}__", opened)  # A program that replaces the other one does not close the file.
        os.chdir(request["folder"])
        os.environ.clear()
        os.environ.update(request["environment"])
        time.tzset()
        tempfile.tempdir = None  # The folder of the test run. TMPDIR names it, unless the test has its own.
        sys.orig_argv = [sys.executable, "-W", "error", *request["arguments"]]  # A reload executes it again.
        warnings.resetwarnings()
        warnings.simplefilter("error")
        code = _run(request["arguments"])
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(BaseException):
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with suppress(BaseException):
                stream.flush()
        os._exit(code)


def _run(arguments: list[str]) -> int:
    """Run `-c CODE`, `-m MODULE`, `-` or `FILE` as the main module; return the exit code."""
    for folder in reversed(os.environ.get("PYTHONPATH", "").split(os.pathsep)):
        if folder and folder not in sys.path:
            sys.path.insert(0, folder)
    try:
        if arguments[0] in ("-c", "-"):
            code, name = (arguments.pop(1), "<string>") if arguments[0] == "-c" else (sys.stdin.read(), "<stdin>")
            sys.argv = arguments
            sys.path.insert(0, "")
            main = types.ModuleType("__main__")
            sys.modules["__main__"] = main
            exec(compile(code, name, "exec"), main.__dict__)
        elif arguments[0] == "-m":
            sys.argv = arguments[1:]
            sys.path.insert(0, str(Path.cwd()))
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = arguments
            sys.path.insert(0, str(Path(arguments[0]).parent))
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        print(end.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        traceback.print_exc()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    return 0


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
