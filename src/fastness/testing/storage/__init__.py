"""A storage simulator below the database: what a power loss may leave of the files that a real process wrote.

    program ──► recorder.c (LD_PRELOAD) ──► trace ──► Disk: what is synced, what is not ──► images ──► open each

`recorder.c` records every write, sync, rename, link and removal below a folder. `images.py` builds folders from such a
trace as a power loss may leave them: of what was not synced, each write and each name is kept, dropped, torn or zeroed.
The recorder also makes chosen calls of the program fail.
"""

from fastness.testing.storage.images import Disk, Image, Loss, build_image, write_image
from fastness.testing.storage.traces import CompilerMissing, Event, Kind, Recorder, build_recorder, read_trace

__all__ = [
    "CompilerMissing",
    "Disk",
    "Event",
    "Image",
    "Kind",
    "Loss",
    "Recorder",
    "build_image",
    "build_recorder",
    "read_trace",
    "write_image",
]
