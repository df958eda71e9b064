"""Registers the data source `holdfast`: Spark finds it by this module's name."""

try:
    from holdfast.pipeline.source import HoldfastSource as DefaultSource
except ModuleNotFoundError as error:
    # Holdfast is installed without `holdfast[spark]`. Spark imports this module while it looks for any source.
    if (error.name or "").startswith("holdfast"):
        raise
else:
    __all__ = ["DefaultSource"]
