"""Mailboxes: mail waits for its recipient, in order, until the recipient says that it has arrived.

    send ──► stored ── deliver ──► delivered ── confirm ──► gone
                │                      │
                └──── ttl is over ─────┴──────────────────► gone

Sequences come from the transaction, never from a clock, so their order is the order of the commits. Reading removes
nothing: a reader keeps the sequence that it has come to, and what it did not confirm is there when it comes back.
Whoever has read everything there is becomes *live* in that very transaction: mail from `live_from` on came while its
reader was there. So nothing is stranded between the last look and the first live mail, and nothing overtakes.
"""

from holdfast.layers.mailboxes.expiry import sweep
from holdfast.layers.mailboxes.keys import Address, Box, address_of, keys_of, policy_of, set_policy
from holdfast.layers.mailboxes.reading import confirm, count, deliver, join, leave, mailboxes, peek
from holdfast.layers.mailboxes.receipts import receipts, see_receipts
from holdfast.layers.mailboxes.sending import block, blocks, send

__all__ = [
    "Address",
    "Box",
    "address_of",
    "block",
    "blocks",
    "confirm",
    "count",
    "deliver",
    "join",
    "leave",
    "mailboxes",
    "peek",
    "policy_of",
    "receipts",
    "keys_of",
    "see_receipts",
    "send",
    "set_policy",
    "sweep",
]
