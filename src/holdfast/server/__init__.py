"""Doors: what comes in over the network is decoded, checked, executed by the plane, and encoded again."""
