"""The network client: the same handles as the embedded plane, over HTTP and WebSocket."""
