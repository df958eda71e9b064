"""The command line: parse, call a handle, print. One file per command group; `main` is the entry point."""
