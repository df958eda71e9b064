"""Background work and whole-plane operations: sweeps, compaction, health checks, checkpoints, migrations."""
