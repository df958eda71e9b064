"""A scraper: it follows links, reads each page once, and at most five pages of a site start in a second.

The workflow decides which pages come next. Each fetch is a step that runs on workers of a queue, whose policy limits
the rate of each site, for all workers together.

    python scraper.py                  # in a temporary folder
    python scraper.py dir:./data       # kill it while it runs, and start it again
"""

import sys
import tempfile
from urllib.parse import urlsplit

import fastness

app = fastness.HostApp()
tasks = fastness.TaskApp()
PAGES_MAX = 100

SITES: dict[str, list[str]] = {
    "https://a.test/": ["https://a.test/1", "https://a.test/2", "https://b.test/"],
    "https://a.test/1": ["https://a.test/2", "https://a.test/3"],
    "https://a.test/2": ["https://a.test/"],
    "https://a.test/3": ["https://b.test/1"],
    "https://b.test/": ["https://b.test/1", "https://b.test/2"],
    "https://b.test/1": ["https://b.test/2"],
    "https://b.test/2": [],
}


def site_of(url: str) -> str:
    return urlsplit(url).netloc


@tasks.task(queue="pages", max_attempts=3)
def fetch(url: str) -> list[str]:
    """The links of a page. Here a real scraper downloads it, and stores the page as a blob."""
    sys.stdout.write(f"fetch {url}\n")  # Two threads print.
    return SITES[url]


@app.workflow
async def scrape(run: fastness.WorkflowRun, start: str) -> list[str]:
    """Returns the pages that were found."""
    found = [start]
    following = [start]
    while following and len(found) < PAGES_MAX:
        fetched = await run.gather(*(run.step(fetch, url, queue="pages", key=site_of(url)) for url in following))
        following = sorted({link for links in fetched for link in links} - set(found))
        found += following
        run.state({"found": len(found)})
    return found


def main(url: str) -> None:
    with fastness.open(url) as plane:
        policy = fastness.QueuePolicy(rate_per_key=5, concurrency_per_key=1, fair=True, visibility_seconds=2)
        plane.queue("pages").set_policy(policy)
        tasks.use(plane)
        worker = tasks.worker(concurrency=2)
        worker.start()
        with fastness.Host(plane, app):
            run = plane.workflows.start(scrape, "https://a.test/", id="a.test")
            print(f"found {len(run.result(wait_seconds=60))} pages")
        worker.stop()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(sys.argv[1] if len(sys.argv) > 1 else f"dir:{folder}")
