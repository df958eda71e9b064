"""Queues and their messages."""

from holdfast.errors.families import Busy, NotFound
from holdfast.errors.leases import Fenced


class QueueMessageLeaseMismatch(Fenced):
    """The lease that came with an ack, nack or extend is not the message's: it ended, and somebody else may have it."""

    code = "queue_message_lease_mismatch"


class MessageNotFound(NotFound):
    """The queue has no message of that id: it was acknowledged, or its time to live was over."""

    code = "message_not_found"


class ShutdownDraining(Busy):
    """The server is about to stop and begins nothing new; another one, or the same in a moment, will."""

    code = "shutdown_draining"


class QueueBusy(Busy):
    """As many consumers wait as the plane lets wait."""

    code = "queue_busy"
