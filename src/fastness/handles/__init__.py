"""Handles: what a user works with. Each is written once for asyncio; `sync/` is generated from it."""
