"""Benchmarks: each compares Fastness with a bare loop or a peer in the same run, and prints ratios."""
