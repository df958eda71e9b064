"""The data model as functions over a transaction, without clocks, randomness or I/O."""
