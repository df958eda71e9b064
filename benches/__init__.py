"""Benchmarks: each compares Holdfast with a bare loop or a peer in the same run, and prints ratios."""
