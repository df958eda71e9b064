"""Ordered locks among the threads and tasks of one process."""
