"""The ingress: accepts pushes into a bounded buffer and writes them to mailboxes in batches."""
