"""Registers the data source `fastness`: Spark finds it by this module's name."""

try:
    from fastness.pipeline.source import FastnessSource as DefaultSource
except ModuleNotFoundError as error:
    # Fastness is installed without `fastness[spark]`. Spark imports this module while it looks for any source.
    if (error.name or "").startswith("fastness"):
        raise
else:
    __all__ = ["DefaultSource"]
