"""HTTP: endpoints as tables, one noun a file. Each decodes, asks the plane, and encodes; none decides anything.

edge.py ──► router ──► endpoint ──► visit.ask(request) ──► the plane
(every request)        (table)      (guard, check, idempotency key)
"""
