"""Races of queue deliveries: this code, the code of an earlier commit, and peers.

`contestant.py` is a process with one of them, `races.py` lets such processes take turns, and `lines.py` has the
workloads.
"""
