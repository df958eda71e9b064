"""See Holdfast keep its promise: `make demo`.

A writer puts transfers between accounts into a plane, each transfer in one commit. Again and again its
process is killed in the middle with SIGKILL. After the crashes the plane is opened again, and everything that the
writer was told is done must be there, whole. The demo exits with 0 only if every claim it prints was checked.
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.progress import track

import holdfast
from holdfast import Plane, Subspace, Tier, Transaction
from holdfast.errors import DamagedDatabase

ACCOUNTS = Subspace("demo", "accounts")
TRANSFERS = Subspace("demo", "transfers")
ROUNDS = 12
console = Console()


def open_accounts(tx: Transaction) -> None:
    for number in range(10):
        tx.put(ACCOUNTS.key(number), b"1000")


def transfer(tx: Transaction, giver: int, taker: int, amount: int) -> str:
    """Move money and note that it was moved: three keys, one commit."""
    for account, change in ((giver, -amount), (taker, amount)):
        balance = int(tx.get(ACCOUNTS.key(account)) or b"0")
        tx.put(ACCOUNTS.key(account), b"%d" % (balance + change))
    receipt = tx.new_id()
    tx.put(TRANSFERS.key(receipt), b"%d %d %d" % (giver, taker, amount))
    return str(receipt)


def audit(tx: Transaction) -> tuple[int, dict[str, tuple[int, int, int]], list[int]]:
    """The sum of all balances, every transfer on record, and the balances that these transfers add up to."""
    balances = [int(value) for _, value in tx.scan(*ACCOUNTS.range(), limit=100)]
    transfers: dict[str, tuple[int, int, int]] = {}
    begin, end = TRANSFERS.range()
    while page := tx.scan(begin, end, limit=1_000):
        for key, value in page:
            giver, taker, amount = map(int, value.split())
            transfers[str(TRANSFERS.unpack(key)[0])] = giver, taker, amount
        begin = page[-1][0] + b"\x00"
    replayed = [1_000] * 10
    for giver, taker, amount in transfers.values():
        replayed[giver] -= amount
        replayed[taker] += amount
    return sum(balances), transfers, replayed if replayed == balances else []


def write_until_killed(url: str) -> None:
    """The child: transfer money, and say on standard output what was acknowledged, line by line."""
    chance = random.Random()
    with holdfast.open(url) as plane:
        while True:
            giver, taker = chance.sample(range(10), 2)
            tier = Tier.CRITICAL if chance.random() < 0.7 else Tier.IMPORTANT
            receipt = plane.transact(transfer, giver, taker, chance.randrange(1, 100), tier=tier)
            os.write(1, f"{receipt}\n".encode())


def kill_in_the_middle(url: str, seconds: float) -> set[str]:
    """Start the child, kill it that long after its first acknowledgement; all receipts it was given."""
    command = [sys.executable, __file__, "--child", url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, bufsize=0) as child:
        assert child.stdout is not None
        head = child.stdout.read(1)
        time.sleep(seconds)
        child.send_signal(signal.SIGKILL)
        lines = (head + child.stdout.read()).decode().splitlines(keepends=True)
    return {line.strip() for line in lines if line.endswith("\n")}


def check(claim: str, holds: bool) -> None:
    console.print(f"  [green]✓[/] {claim}" if holds else f"  [red]✗ {claim}[/]")
    if not holds:
        sys.exit(1)


def first_steps(plane: Plane) -> None:
    console.rule("One commit")
    plane.transact(open_accounts)
    receipt = plane.transact(transfer, 0, 1, 250)
    check(f"a transfer moved 250 from account 0 to account 1 (receipt {receipt})", bool(receipt))

    def careless(tx: Transaction) -> None:
        transfer(tx, 2, 3, 999)
        raise RuntimeError("changed my mind")

    try:
        plane.transact(careless)
    except RuntimeError:
        total, transfers, balances = plane.transact(audit)
        check("a function that raises has written nothing", len(transfers) == 1 and balances[2] == 1_000)
        check("the total is unchanged", total == 10_000)


def survive_crashes(url: str) -> None:
    console.rule(f"{ROUNDS} times kill -9")
    promised: set[str] = set()
    chance = random.Random()
    for _ in track(range(ROUNDS), description="  writing, killing", console=console, transient=True):
        promised |= kill_in_the_middle(url, chance.uniform(0.0, 0.3))
    with holdfast.open(url) as plane:
        total, transfers, balances = plane.transact(audit)
    check(f"{len(promised):,} transfers were acknowledged, and all of them are there", promised <= transfers.keys())
    check("no transfer is half there: every balance is what the transfers add up to", bool(balances))
    check(f"the total is still {total:,}", total == 10_000)


def notice_damage(data: Path) -> None:
    console.rule("A flipped bit")
    with holdfast.open(f"dir:{data}") as plane:
        for _ in range(200):
            plane.transact(transfer, 4, 5, 1)
        image = data.with_name("image")
        shutil.copytree(data, image)
    log = max((image / "kv").glob("*.log"))
    damaged = bytearray(log.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    log.write_bytes(damaged)
    try:
        holdfast.open(f"dir:{image}").close()
    except DamagedDatabase as error:
        check(f"one bit flipped in a copy of the log is reported: {error.code}", True)
    else:
        check("one bit flipped in a copy of the log is reported", False)
    with holdfast.open(f"dir:{data}") as plane:
        check("the original is fine", bool(plane.transact(audit)[2]))


def main() -> None:
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, "data")
        with holdfast.open(f"dir:{data}") as plane:
            first_steps(plane)
        survive_crashes(f"dir:{data}")
        notice_damage(data)
    console.rule(f"Every claim was checked, in {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        write_until_killed(sys.argv[2])
    else:
        main()
