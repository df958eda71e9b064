"""The files that `queue get` writes: the payload of a leased message, and its workflow state.

    $XDG_STATE_HOME/fastness/messages/QUEUE/ID-FENCE.payload     ~/.local/state by default
    $XDG_STATE_HOME/fastness/messages/QUEUE/ID-FENCE.state.json

Only their user can read them. `queue ack` and `queue reject` remove the files of a message. After `queue nack` they
stay, because the next delivery may be elsewhere and the file may show why the message failed. Files that are older than
`PAYLOAD_FILE_SECONDS` are removed by the next `queue get`.
"""

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from fastness.limits import PAYLOAD_FILE_SECONDS
from fastness.names import checked_name, folder_at


def folder() -> Path:
    """The folder of all files."""
    return folder_at(os.environ.get("XDG_STATE_HOME") or "~/.local/state") / "fastness" / "messages"


def create(queue: str, id: str, fence: int, ending: str) -> tuple[BinaryIO, Path]:
    """A new file for a delivery, which only its user can read. Replaces one that an interrupted command left.

    Raises:
        OSError: it cannot be created.
    """
    of_queue = folder() / checked_name("queue", queue)
    of_queue.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder().chmod(0o700)
    _remove_old(folder())
    path = of_queue / f"{id}-{fence}.{ending}"
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    return os.fdopen(descriptor, "wb"), path


def remove(queue: str, id: str) -> None:
    """Remove the files of all deliveries of a message. One that cannot be removed now is removed when it is old."""
    with suppress(OSError):
        for path in (folder() / checked_name("queue", queue)).iterdir():
            if path.name.startswith(f"{id}-"):
                path.unlink(missing_ok=True)


def _remove_old(files: Path) -> None:
    oldest = time.time() - PAYLOAD_FILE_SECONDS
    for path in files.glob("*/*"):
        with suppress(OSError):
            if path.lstat().st_mtime < oldest:
                path.unlink()
