"""The lake: Delta tables in a folder or an object store, written by executors and committed by the driver."""
