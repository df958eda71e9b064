"""Everything above the layers that waits, runs in the background, holds state in memory or does I/O.

Written for asyncio; the synchronous versions in `sync/` are generated.
"""
