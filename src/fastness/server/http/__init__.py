"""The HTTP API: tables of endpoints, one file per resource.

An endpoint decodes a request, calls the plane and encodes the answer; it holds no logic of its own.

middleware.py ──► router ──► endpoint ──► context.call(request) ──► the plane
(every request)   (tables)                (authorize, check, idempotency key)
"""
