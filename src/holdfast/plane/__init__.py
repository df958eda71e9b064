"""Where speech meets memory: requests are executed on the key space, here and nowhere else."""

from holdfast.plane.open import open_plane, open_plane_async

__all__ = ["open_plane", "open_plane_async"]
