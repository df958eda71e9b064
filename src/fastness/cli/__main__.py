"""Runs the `fastness` command with `python -m fastness.cli`."""

from fastness.cli.main import main

main()
