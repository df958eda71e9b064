"""The context that the chapters share."""

import msgspec

from holdfast.demo.output import Output
from holdfast.demo.processes import Processes, Server
from holdfast.handles.sync.plane import Plane


class DemoContext(msgspec.Struct):
    """The output, processes, server and plane of a run, and the ids that later chapters need from earlier ones."""

    output: Output
    processes: Processes
    server: Server
    plane: Plane  # Reconnects when the server is restarted.
    orphaned_id: str = ""  # The message whose worker was killed.
    unreadable_id: str = ""  # The message that became a dead letter.
