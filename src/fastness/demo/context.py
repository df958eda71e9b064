"""The context that the chapters share."""

import msgspec

from fastness.demo.output import Output
from fastness.demo.processes import Processes, Server
from fastness.handles.sync.plane import Plane


class DemoContext(msgspec.Struct):
    """The output, processes, server and plane of a run, and the ids that later chapters need from earlier ones."""

    output: Output
    processes: Processes
    server: Server
    plane: Plane  # Reconnects when the server is restarted.
    orphaned_id: str = ""  # The message whose worker was killed.
    unreadable_id: str = ""  # The message that became a dead letter.
