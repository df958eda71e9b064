"""Exceptions by which a task decides what becomes of its message."""


class RetryLater(Exception):
    """Raise it in a task: the attempt has failed, and the next one starts after `seconds`, not after the back-off."""

    def __init__(self, seconds: float, reason: str = "") -> None:
        super().__init__(reason or f"retry in {seconds:g} s")
        self.seconds = seconds


class Reject(Exception):
    """Raise it in a task: another attempt cannot succeed, so its message becomes a dead letter with this reason."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)


class TaskDeferred(Exception):
    """Raise it in a task whose message was returned to its queue: the attempt has ended, and has not failed."""
