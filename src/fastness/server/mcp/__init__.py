"""`/mcp`: the Model Context Protocol over streamable HTTP. `mounting` imports `endpoint` with the first request."""
