"""Spark finds the data source `holdfast` by the name of this module."""

try:
    from holdfast.pipeline.source import HoldfastSource as DefaultSource
except ModuleNotFoundError as error:
    # Holdfast is installed without `holdfast[spark]`. Spark imports this to look for sources, and must find others.
    if (error.name or "").startswith("holdfast"):
        raise
else:
    __all__ = ["DefaultSource"]
