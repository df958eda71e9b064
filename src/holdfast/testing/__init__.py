"""Test tools that ship with Holdfast: conformance checks for backends, a manual clock, faults and a simulator."""
