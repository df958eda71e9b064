"""The command line: parse, call a handle, print. One noun a file; `main` is where it starts."""
