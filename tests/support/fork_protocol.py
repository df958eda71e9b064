"""What a process says to the fork server of the test run. It imports little: `programs/python` uses it, too."""

import json
import socket
import struct

ADDRESS = "TESTS_OF_FASTNESS_FORK_SERVER"  # The variable with the path of the fork server's socket.
SIZE = struct.Struct("!I")
STATUS = struct.Struct("!i")


def ask(address: str, arguments: list[str], environment: dict[str, str], folder: str, fds: list[int]) -> socket.socket:
    """Ask for a Python process. On the connection come its process ID and, when it has ended, its exit code."""
    request = {"arguments": arguments, "environment": environment, "folder": folder}
    message = json.dumps(request).encode()
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(address)
    socket.send_fds(connection, [SIZE.pack(len(message))], fds)
    connection.sendall(message)
    return connection


def read_status(connection: socket.socket) -> int:
    """The process ID, or the exit code: a negative one is that of a signal."""
    received = connection.recv(STATUS.size, socket.MSG_WAITALL)
    assert len(received) == STATUS.size, "the fork server has ended"
    return int(STATUS.unpack(received)[0])
