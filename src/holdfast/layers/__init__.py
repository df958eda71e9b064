"""What Holdfast keeps, as plain functions over a transaction: no clock, no randomness, no I/O."""
