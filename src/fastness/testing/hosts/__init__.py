"""Tests of programs and workflows: a host in memory under a manual clock, and crashes at every boundary.

virtual_loop   an event loop whose time moves by itself
processes      a host as one process, that a test interrupts at its boundaries
host_test      the environment that tests use
crashes        runs a scenario once for each boundary, with a crash there
contents       what a plane holds in the end, to be compared
"""
