"""Run every benchmark, or those whose name contains one of the arguments: `python -m benches rocksdb execute`."""

import importlib
import sys
from pathlib import Path


def main() -> None:
    names = sorted(path.stem for path in Path(__file__).parent.glob("bench_*.py"))
    wanted = sys.argv[1:]
    for name in names:
        if not wanted or any(word in name for word in wanted):
            importlib.import_module(f"benches.{name}").main()


if __name__ == "__main__":
    main()
