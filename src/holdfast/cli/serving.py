"""`holdfast serve`: the plane over the network. Flags over HOLDFAST_* over a TOML file."""

import os
from typing import Any, Final

import click

from holdfast.cli.commands import Verb, given
from holdfast.cli.durations import SECONDS

# What commands read in the environment; a server has no such settings.
_OF_COMMANDS: Final = ("HOLDFAST_CA", "HOLDFAST_CERT", "HOLDFAST_KEY", "HOLDFAST_DEBUG")


@click.command(
    cls=Verb,
    examples=[
        "holdfast serve --data dir:./data",
        "holdfast serve --data postgresql://holdfast@db/holdfast --objects s3://bucket/holdfast",
        "holdfast serve --host 0.0.0.0 --tokens --tls-cert server.pem --tls-key server.key",
    ],
)
@click.option("--config", type=click.Path(exists=True, dir_okay=False), help="A TOML file of settings.")
@click.option("--data", metavar="URL", help="The plane: dir:PATH, postgresql://… or memory:.  [default: dir:./data]")
@click.option("--objects", metavar="URL", help="Where big bytes go: dir:, s3://, az:// or gs://.")
@click.option("--activity", metavar="PATH", help="Where session logs are written first.")
@click.option("--tiers", metavar="PATH", help="A TOML file that says which tier each field of an entity has.")
@click.option("--verify-blobs", type=click.Choice(["always", "sampled", "never"]), help="Hash blobs again when read.")
@click.option("--compact-every", "compact_every_seconds", type=SECONDS, help="Move cold ends of journals away.")
@click.option("--host", help="The address to listen on.  [default: 127.0.0.1]")
@click.option("--port", type=int, help="0 is any that is free.  [default: 9440]")
@click.option("--tokens/--no-tokens", default=None, help="Whether callers need a token.")
@click.option("--tls-cert", metavar="FILE", help="The server's certificate.")
@click.option("--tls-key", metavar="FILE", help="Its private key.")
@click.option("--tls-client-ca", metavar="FILE", help="Only clients with a certificate of this authority come in.")
@click.option("--insecure", is_flag=True, default=None, help="Listen beyond this machine without TLS.")
@click.option("--drain", "--drain-seconds", "drain_seconds", type=SECONDS, help="How long SIGTERM waits for calls.")
@click.option("--queue-max-consumers", type=int, help="How many consumers may wait.")
@click.option("--queue-poll-interval", "queue_poll_interval_seconds", type=SECONDS, help="Between looks at a queue.")
@click.option("--queue-poll-jitter", "queue_poll_jitter_seconds", type=SECONDS, help="Spreads the looks of nodes.")
@click.option(
    "--queue-resilient-poll-interval",
    "queue_resilient_poll_interval_seconds",
    type=SECONDS,
    help="Between looks where notifications come too.",
)
@click.option("--relay-host", help="What agents call this server when they sign.")
@click.option("--relay-registration", type=click.Choice(["open", "closed"]), help="Whether agents register themselves.")
@click.option("--relay-rate", "relay_rate_per_second", type=float, help="Mails of one sender, a second; 0 is no limit.")
@click.option("--pipeline-reports", metavar="FOLDER", help="Reports of the pipeline, for the console to show.")
@click.option("--log-format", type=click.Choice(["text", "json"]), help="How log lines are written.")
@click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]), help="What is logged.")
def serve(config: str | None, **flags: Any) -> None:
    """Serve a plane over HTTP and WebSocket until SIGTERM."""
    # Loaded here: no other command needs a server, and each would wait for it.
    from holdfast.server.serving import run
    from holdfast.server.settings import Settings

    wanted = {name: value for name, value in flags.items() if value is not None}
    if "objects" not in wanted and given().get("objects"):
        wanted["objects"] = given()["objects"]
    environment = {name: value for name, value in os.environ.items() if name not in _OF_COMMANDS}
    click.get_current_context().exit(run(Settings.load(wanted, file=config, environment=environment)))
