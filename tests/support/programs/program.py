"""A command that the fork server starts: `program.py ADDRESS forked ARGUMENT ...`, the arguments being those of Python.

In the place of `forked` may be `python` or `fastness`, as the commands of a page call them: `python FILE` is then
started as ever. A signal is passed on. If this process is killed, the fork server kills the one that it has started.
"""

import os
import signal
import sys

HERE = os.path.dirname(os.path.realpath(__file__))
sys.path.insert(0, os.path.dirname(HERE))

from fork_protocol import ADDRESS, ask, read_status  # type: ignore[import-not-found]  # noqa: E402


def main() -> None:
    address, name, given = sys.argv[1], os.path.basename(sys.argv[2]), sys.argv[3:]
    os.environ["PATH"] = os.environ["PATH"].replace(f"{HERE}{os.pathsep}", "")
    for variable in (ADDRESS, "TESTS_OF_FASTNESS_PYTHON"):
        os.environ.pop(variable, None)
    if name == "fastness":
        arguments = ["-m", "fastness.cli", *given]
    elif name == "forked":
        arguments = given
    else:
        arguments = given[2:] if given[:2] == ["-W", "error"] else given
        if arguments[:1] not in (["-c"], ["-"]):
            os.execvp(name, [name, *given])
    connection = ask(address, arguments, dict(os.environ), os.getcwd(), [0, 1, 2])
    pid = read_status(connection)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda sent, _: os.kill(pid, sent))
    code = read_status(connection)
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


main()
