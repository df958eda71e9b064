"""Synchronous modules, generated from the asynchronous ones in the parent package."""
