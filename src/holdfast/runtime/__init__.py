"""What waits, ticks, holds memory or does I/O, above the layers. Written for asyncio; `sync/` is generated."""
