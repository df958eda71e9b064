"""Moved to holdfast.keeping."""

from holdfast.keeping import Keeper, Keeping

__all__ = ["Keeper", "Keeping"]
