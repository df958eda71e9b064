"""Comparable servers, each a separate process on this machine, and a Python client for each.

servers.py starts them, clients.py has the clients, put_clients.py runs clients in further processes, environment.py
holds what a run shares, and workloads.py measures.
"""
