"""Run a fleet of agents against a real server, and take screenshots of its console: docs/images/console-*.png.

python tools/make_screenshots.py [--seconds 75] [--folder docs/images]

Needs Chromium on the PATH. Takes about two minutes, most of them to collect data for the charts.
"""

import argparse
import asyncio
import random
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import msgspec
from playwright.sync_api import Browser, Page, sync_playwright

import holdfast
from holdfast import Plane
from holdfast.errors import HoldfastError

IMAGES = Path(__file__).parent.parent / "docs" / "images"
IMAGE_BYTES_MAX = 200_000
TIERS = """
[fields]
"order.id" = "critical"
"order.total" = "critical"
"order.status" = "critical"
"agent.key" = "critical"

[patterns]
"trace_*" = "best_effort"
"""
QUEUES = {  # Puts per second, seconds per message, workers.
    "crawl": (10, 0.012, 2),
    "embeddings": (35, 0.030, 1),
    "emails": (12, 0.040, 1),
    "invoices": (6, 0.080, 1),
    "settlements": (3, 0.120, 1),
    "summaries": (3, 0.300, 1),
}
ERRORS = {
    "invoices": [
        "CardDeclined: issuer answered 51, insufficient funds (order 80412)",
        "ValidationError: VAT number DE29931 is not 9 digits",
        "TimeoutError: ledger.internal:7443 did not answer within 10 s",
    ],
    "emails": [
        "SMTPRecipientsRefused: 550 5.1.1 no such user marta@exmaple.com",
        "KeyError: 'unsubscribe_url' while rendering receipt.mjml",
    ],
    "embeddings": ["ValueError: input has 9,214 tokens, the model takes 8,192"],
}
AGENTS = ("billing", "concierge", "planner", "researcher", "reviewer", "scheduler", "translator", "writer")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=75.0, help="run time of the fleet before the first screenshot")
    parser.add_argument("--folder", type=Path, default=IMAGES)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        sys.exit("Chromium is not installed; apt-get install chromium")
    with tempfile.TemporaryDirectory(prefix="holdfast-screenshots-") as folder, serving(Path(folder)) as url:
        fill(url)
        with running_fleet(url), sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            take_screenshots(browser, url, options.folder, options.seconds)
            browser.close()


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """Run a server on a data directory of its own, and yield its URL."""
    (folder / "tiers.toml").write_text(TIERS)
    words = ["serve", "--data", f"dir:{folder / 'data'}", "--port", "0", "--tiers", str(folder / "tiers.toml")]
    process = subprocess.Popen([sys.executable, "-m", "holdfast.cli", *words], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip().rpartition(" ")[2]
    finally:
        process.terminate()
        process.wait(20)
        if process.stdout is not None:
            process.stdout.close()


# The fleet.


def fill(url: str) -> None:
    """Create the initial data: dead letters, worlds with a history, entities."""
    generator = random.Random(7)
    with holdfast.connect(url, universe="staging") as staging:
        staging.queue("emails").put(b"{}")
    with holdfast.connect(url) as plane:
        for queue, errors in ERRORS.items():
            for number, error in enumerate(errors):
                plane.queue(queue).put({"order": 80_400 + number, "customer": generator.choice(AGENTS)}, max_attempts=1)
                for message in plane.queue(queue).receive_many():
                    message.nack(error=error)
        plane.queue("nightly-export").put({"table": "orders", "day": "2026-11-14"}, delay_seconds=9_000)
        plane.queue("nightly-export").pause()
        for name, records in (("ledger-eu", 5_200), ("ledger-us", 3_350), ("onboarding", 420), ("support-desk", 1_280)):
            make_world(plane, name, records, generator)
        for number in range(80_400, 80_440):
            order = {
                "id": f"A-{number}",
                "total": round(generator.uniform(9, 900), 2),
                "status": "paid",
                "note": "gift",
            }
            plane.entities.write("order", f"a-{number}", {**order, "trace_id": "4bf92f35"})
        for name in AGENTS:
            plane.entities.write("agent", name, {"key": f"ed25519:{name}", "model": "small", "trace_span": 1})
            plane.entities.write(
                "task", f"daily-{name}", {"id": name, "status": "open", "priority": 3, "title": "Report"}
            )


def make_world(plane: Plane, name: str, records: int, generator: random.Random) -> None:
    world, height, since = plane.world(name), 0, 0
    world.create()
    while height < records:
        words = ("order.paid", "order.shipped", "refund.asked", "note.added")
        batch = [{"event": generator.choice(words), "order": generator.randrange(90_000)} for _ in range(200)]
        height = world.append(batch, expected_head=height) + len(batch)
        since += len(batch)
        if since >= 1_000:
            since = 0
            world.snapshots.commit(
                {"orders": height},
                height=height,
                promote=True,
            )
            height = world.head()
    world.compact(entries=512, margin=64)


@contextmanager
def running_fleet(url: str) -> Iterator[None]:
    """Run agents that put, work, send mail, wait for leases and append, until the block ends."""
    stopped = threading.Event()
    jobs = [threading.Thread(target=put, args=(url, stopped, queue, *QUEUES[queue][:1])) for queue in QUEUES]
    jobs.append(threading.Thread(target=crawl, args=(url, stopped)))
    jobs += [
        threading.Thread(target=work, args=(url, stopped, queue, seconds, number))
        for queue, (_, seconds, workers) in QUEUES.items()
        for number in range(workers)
    ]
    jobs += [threading.Thread(target=each, args=(url, stopped)) for each in (send_mail, append, research)]
    jobs += [threading.Thread(target=read_mail, args=(url, stopped, agent)) for agent in AGENTS[::2]]
    jobs += [threading.Thread(target=hold_lease, args=(url, stopped, key, owner)) for key, owner in LEASES]
    for job in jobs:
        job.start()
    try:
        yield
    finally:
        stopped.set()
        for job in jobs:
            job.join(30)


LEASES = [
    ("deploy/eu-west", "planner"),
    ("deploy/eu-west", "scheduler"),
    ("deploy/eu-west", "reviewer"),
    ("orders/80412", "billing"),
    ("catalogue/reindex", "researcher"),
    ("catalogue/reindex", "translator"),
    ("ledger-eu/writer", "billing"),
]


def put(url: str, stopped: threading.Event, queue: str, per_second: float) -> None:
    generator = random.Random(queue)
    with holdfast.connect(url) as plane:
        while not stopped.wait(generator.expovariate(per_second)):
            plane.queue(queue).put({"order": generator.randrange(80_000, 90_000), "from": generator.choice(AGENTS)})


def work(url: str, stopped: threading.Event, queue: str, seconds: float, number: int) -> None:
    generator = random.Random(f"{queue} {number}")
    with holdfast.connect(url) as plane:
        while not stopped.is_set():
            for message in plane.queue(queue).receive_many(8, wait_seconds=0.5, owner=f"{queue}-{number}"):
                stopped.wait(seconds * generator.uniform(0.3, 1.6))
                if generator.random() < 0.01:
                    message.nack(error="ConnectionResetError: peer went away", delay_seconds=4)
                else:
                    message.ack()


def send_mail(url: str, stopped: threading.Event) -> None:
    generator = random.Random(3)
    with holdfast.connect(url) as plane:
        while not stopped.wait(generator.uniform(0.05, 0.4)):
            sender, to = generator.sample(AGENTS, 2)
            words = generator.choice(("Draft is ready", "Please review", "Budget for Thursday", "Figures of the week"))
            plane.mailbox(sender).send(to, msgspec.json.encode({"subject": words, "thread": generator.randrange(900)}))


def read_mail(url: str, stopped: threading.Event, agent: str) -> None:
    """Read the mail of one agent. Mail of agents without a reader stays stored."""
    with holdfast.connect(url) as plane:
        while not stopped.is_set():
            box = plane.mailbox(agent)
            for mail in box.subscribe(wait_seconds=1.0):
                box.confirm(mail)
                if stopped.is_set():
                    break


def crawl(url: str, stopped: threading.Event) -> None:
    """Many agents in one process: their concurrent puts share a commit."""

    async def run() -> None:
        generator = random.Random(11)
        async with await holdfast.connect_async(url) as plane:
            while not stopped.is_set():
                pages = [
                    {"page": f"https://example.com/{generator.randrange(10**6)}"}
                    for _ in range(generator.randrange(1, 24))
                ]
                puts = (plane.queue("crawl").put(page) for page in pages)
                seen = (
                    plane.state(f"seen/{each}").update(generator.random()) for each in range(generator.randrange(12))
                )
                await asyncio.gather(*puts, *seen)
                await asyncio.sleep(generator.uniform(0.1, 0.6))

    asyncio.run(run())


def append(url: str, stopped: threading.Event) -> None:
    generator = random.Random(5)
    with holdfast.connect(url) as plane:
        while not stopped.wait(0.4):
            world = plane.world(generator.choice(("ledger-eu", "support-desk")))
            with suppress(HoldfastError):
                world.append(
                    [{"event": "order.paid", "order": generator.randrange(90_000)}], expected_head=world.head()
                )


def research(url: str, stopped: threading.Event) -> None:
    """A host with a run that has done some steps and waits for an approval."""
    app = holdfast.HostApp()
    generator = random.Random(13)
    failures = iter(["search.internal:8080 refused the connection"])

    async def plan(question: str) -> list[str]:
        await asyncio.sleep(0.6)
        return [f"{topic}: {question}" for topic in ("size", "competitors", "prices")]

    async def search(topic: str) -> dict[str, object]:
        await asyncio.sleep(generator.uniform(0.4, 1.4))
        if error := next(failures, None):
            raise ConnectionError(error)
        return {"topic": topic, "sources": generator.randrange(3, 12)}

    async def draft(found: list[dict[str, object]]) -> str:
        await asyncio.sleep(1.2)
        return f"A report of {len(found)} chapters"

    @app.workflow
    async def market_report(run: holdfast.WorkflowRun, question: str) -> str:
        topics = await run.step(plan, question)
        found = await run.gather(*(run.step(search, topic, retry=holdfast.Retry(5)) for topic in topics))
        await run.sleep(0.5)
        report = await run.step(draft, found)
        await run.state({"stage": "review", "chapters": len(found), "draft": report})
        await run.wait_for("approval", timeout=timedelta(days=30))
        return report

    with holdfast.connect(url) as plane, holdfast.Host(plane, app, owner="agents-eu-1"):
        plane.workflows.start(market_report, "agents in Europe", id="report-2026-11")
        stopped.wait()


def hold_lease(url: str, stopped: threading.Event, key: str, owner: str) -> None:
    with holdfast.connect(url) as plane:
        while not stopped.is_set():
            with suppress(HoldfastError), plane.lease(key).acquire(owner, ttl_seconds=45, wait_seconds=5):
                stopped.wait(20)
            stopped.wait(0.2)


# The screenshots.


def take_screenshots(browser: Browser, url: str, folder: Path, seconds: float) -> None:
    page = browser.new_page(viewport={"width": 1440, "height": 900}, color_scheme="light")
    page.goto(f"{url}/console")
    page.wait_for_selector(".status.live")
    page.wait_for_timeout(seconds * 1_000)
    save_screenshot(page, folder, "overview-light")
    for name, address in {
        "queues": "#/queues",
        "dead-letters": "#/queues/invoices",
        "run": "#/runs/report-2026-11",
        "world": "#/worlds/ledger-eu",
        "mail": "#/mail",
        "leases": "#/leases",
        "entities": "#/entities",
    }.items():
        page.goto(f"{url}/console{address}")
        page.wait_for_selector("tbody tr")
        if name == "world":
            page.get_by_role("button", name="Verify").click()
            page.wait_for_selector(".verdict.good")
        if name == "dead-letters":
            page.locator(".opener").first.click()
        page.wait_for_timeout(2_500)
        save_screenshot(page, folder, name)
    page.goto(f"{url}/console#/overview")
    page.keyboard.press("t")
    page.wait_for_timeout(2_500)
    save_screenshot(page, folder, "overview-dark")
    page.set_viewport_size({"width": 390, "height": 844})
    page.goto(f"{url}/console#/queues")
    page.wait_for_timeout(2_500)
    save_screenshot(page, folder, "phone")


def save_screenshot(page: Page, folder: Path, name: str) -> None:
    path = folder / f"console-{name}.png"
    page.screenshot(path=str(path))
    assert path.stat().st_size <= IMAGE_BYTES_MAX, f"{path} has {path.stat().st_size:,} bytes"
    print(f"{path} {path.stat().st_size // 1_024} KiB")


if __name__ == "__main__":
    main()
