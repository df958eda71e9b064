"""Spark finds the data source `holdfast` by the name of this module."""

from holdfast.pipeline.source import HoldfastSource as DefaultSource

__all__ = ["DefaultSource"]
