"""Session logs: BEST_EFFORT records in files, rotated into the object store."""
