"""Mailboxes: mail is stored for its recipient, in order, until the recipient confirms it.

    send ──► stored ── deliver ──► delivered ── confirm ──► removed
                │                      │
                └──── TTL expires ─────┴──────────────────► removed

Sequences come from the transaction, never from a clock, so their order is the order of the commits. Reading removes
nothing: a reader tracks its own sequence, and unconfirmed mail is delivered again when it comes back. A reader that has
read everything becomes *live* in the same transaction: mail from `live_from` on arrived while it was connected. So no
mail is lost or reordered between the last read and the first live mail.
"""

from fastness.layers.mailboxes.expiry import due_entries, sweep
from fastness.layers.mailboxes.keys import Address, address_of, keys_of, policy_of, set_policy
from fastness.layers.mailboxes.reading import confirm, deliver, join, leave, mailboxes, peek, summary
from fastness.layers.mailboxes.receipts import mark_receipts_seen, receipts
from fastness.layers.mailboxes.sending import block, blocks, send
