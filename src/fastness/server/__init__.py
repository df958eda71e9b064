"""The server: HTTP API, stream and relay. Each decodes, authorizes and executes requests, and encodes the answers."""
