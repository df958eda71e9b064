"""Executes requests on the key space. Every entry point goes through this package."""

from holdfast.plane.audited import command_caller
from holdfast.plane.leases import fenced
from holdfast.plane.open import Options, open_plane, open_plane_async

__all__ = ["Options", "command_caller", "fenced", "open_plane", "open_plane_async"]
