"""A command that starts Python from the fork server, for libraries that start their child processes themselves.

The command is a small program that asks for the process, gives it its own standard streams, and waits for its end.
"""

import os
import signal
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.support.forked import ADDRESS, start_python


def python_command(*arguments: str) -> tuple[str, list[str]]:
    """The program and the arguments that run `python -W error` with these arguments."""
    if address := os.environ.get(ADDRESS):
        return sys.executable, ["-I", __file__, address, *arguments]
    return sys.executable, ["-W", "error", *arguments]


def main() -> int:
    environment = dict(os.environ)
    os.environ[ADDRESS] = sys.argv[1]
    process = start_python(sys.argv[2:], env=environment)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda sent, _: process.send_signal(sent))
    return process.wait()


if __name__ == "__main__":
    sys.exit(main())
