"""`python` and `fastness` for the commands of a page: the fork server of the test run starts them.

A signal is passed on. If this process is killed, the fork server kills the one that it has started. `python FILE` is
started as ever.
"""

import os
import signal
import sys

HERE = os.path.dirname(os.path.realpath(__file__))
sys.path.insert(0, os.path.dirname(HERE))

from fork_protocol import ADDRESS, ask, read_status  # noqa: E402


def main() -> None:
    name, given = os.path.basename(sys.argv[1]), sys.argv[2:]
    os.environ["PATH"] = os.environ["PATH"].replace(f"{HERE}{os.pathsep}", "")
    address = os.environ.pop(ADDRESS)
    del os.environ["TESTS_OF_FASTNESS_PYTHON"]
    if name == "fastness":
        arguments = ["-m", "fastness.cli", *given]
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
