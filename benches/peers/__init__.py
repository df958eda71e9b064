"""Servers that do what Holdfast's does, each a process of its own on this machine, and one client in Python for each.

servers.py starts them, clients.py speaks to them, putters.py is client processes beside ours, scenes.py measures.
"""
