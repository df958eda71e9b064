"""A server, on a free port of this machine alone."""

from urllib.parse import urlsplit
from urllib.request import urlopen

from holdfast.demo.context import DemoContext
from holdfast.demo.processes import PATIENCE_SECONDS


def tell(night: DemoContext) -> None:
    stage, url = night.stage, night.server.url
    stage.chapter("The server")
    stage.say(
        "`holdfast serve` runs in a process of its own, on a free port that only this machine reaches, over a data "
        "directory that was empty a moment ago. There is no database to install and no broker beside it."
    )
    with urlopen(f"{url}/readyz", timeout=PATIENCE_SECONDS) as answer:
        stage.claim(
            f"the server, process {night.server.child.pid}, is ready, on the loopback address alone",
            answer.status == 200 and urlsplit(url).hostname == "127.0.0.1",
            checked="GET /readyz, which reads a key; its address",
            figure=f"port {night.server.port}",
        )
    with urlopen(f"{url}/console", timeout=PATIENCE_SECONDS) as answer:
        page = answer.read().decode()
        stage.claim(
            "it has a web console",
            answer.status == 200 and "<title>" in page,
            checked="GET /console",
            figure=f"{len(page):,} bytes",
        )
    stage.say("Open the console now, and watch the night go by:")
    stage.note(f"{url}/console")
