"""The command line of a bench that runs on several storages."""

import argparse
from collections.abc import Collection, Sequence
from pathlib import Path


class StorageOptions(argparse.Namespace):
    """What was given."""

    storages: list[str]
    quick: bool
    json: Path | None


def parse_options(
    argv: Sequence[str], storages: Collection[str], *, name: str, doc: str | None, quick: str
) -> StorageOptions:
    """The options of a bench; all storages if none is named.

    Args:
        argv: the arguments.
        storages: the names to choose from.
        name: of the bench.
        doc: of its module; the first line describes it.
        quick: what `--quick` leaves.
    """
    parser = argparse.ArgumentParser(prog=f"python -m benches.{name}", description=(doc or "").partition("\n")[0])
    parser.add_argument("storages", nargs="*", help=f"which storages, of {', '.join(storages)} [all]")
    parser.add_argument("--quick", action="store_true", help=f"a smoke test with {quick} and one round")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    options = parser.parse_args(list(argv), namespace=StorageOptions())
    if unknown := set(options.storages) - set(storages):
        parser.error(f"there is no storage {', '.join(sorted(unknown))}; the storages are {', '.join(storages)}")
    options.storages = options.storages or list(storages)
    return options
