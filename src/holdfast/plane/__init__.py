"""Where speech meets memory: requests are executed on the key space, here and nowhere else."""

from holdfast.plane.leases import fenced
from holdfast.plane.open import Options, open_plane, open_plane_async

__all__ = ["Options", "fenced", "open_plane", "open_plane_async"]
