"""Executes requests on the key space. Every entry point goes through this package."""

from fastness.plane.audited import command_caller
from fastness.plane.leases import fenced
from fastness.plane.open import Options, open_plane, open_plane_async

__all__ = ["Options", "command_caller", "fenced", "open_plane", "open_plane_async"]
