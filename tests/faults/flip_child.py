"""Opens directories, one path a line on standard input, and says what it found in each.

same: all pairs are there. refused: a typed error. Anything else is a failure, described.
"""

import sys
from pathlib import Path

from holdfast.backends.rocksdb import RocksDatabase
from holdfast.errors import HoldfastError
from holdfast.kv import pages


def examine(path: Path) -> str:
    try:
        with RocksDatabase(path) as database:
            pairs = database.read(lambda tx: [pair for page in pages(tx, b"", b"\xff") for pair in page])
    except HoldfastError as error:
        return f"refused {error.code}"
    except BaseException as error:
        return f"untyped {error!r}"
    expected = [(b"key %06d" % number, b"value %06d" % number * 20) for number in range(len(pairs))]
    if pairs != expected:
        return "wrong pairs"
    return "same" if len(pairs) == int(sys.argv[1]) else f"silent loss: {len(pairs)} pairs"


for line in sys.stdin:
    print(examine(Path(line.strip())), flush=True)
