"""Runs the `holdfast` command with `python -m holdfast.cli`."""

from holdfast.cli.main import main

main()
