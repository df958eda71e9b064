"""The server, on a free port of the loopback address."""

from urllib.parse import urlsplit
from urllib.request import urlopen

from fastness.demo.context import DemoContext
from fastness.demo.processes import PATIENCE_SECONDS


def run(context: DemoContext) -> None:
    output, url = context.output, context.server.url
    output.chapter("The server")
    output.say(
        "`fastness serve` runs as a separate process on a free local port, with an empty data directory. It needs no "
        "database and no broker."
    )
    with urlopen(f"{url}/readyz", timeout=PATIENCE_SECONDS) as answer:
        output.claim(
            f"the server, process {context.server.child.pid}, is ready, and listens on the loopback address only",
            answer.status == 200 and urlsplit(url).hostname == "127.0.0.1",
            checked="GET /readyz, which reads a key; its address",
            figure=f"port {context.server.port}",
        )
    with urlopen(f"{url}/console", timeout=PATIENCE_SECONDS) as answer:
        page = answer.read().decode()
        output.claim(
            "the server has a web console",
            answer.status == 200 and "<title>" in page,
            checked="GET /console",
            figure=f"{len(page):,} bytes",
        )
    output.say("Open the console to follow the demo:")
    output.note(f"{url}/console")
