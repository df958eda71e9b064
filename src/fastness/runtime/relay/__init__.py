"""The relay: sessions of connected agents, and the hub that commits their mail in batches."""
