"""`fastness serve`: runs a server. Flags override FASTNESS_* variables, which override a TOML file."""

import os
from typing import Final

import click

from fastness.cli.commands import LeafCommand, given_options
from fastness.cli.durations import SECONDS
from fastness.cli.sizes import SIZE

# Variables that the other commands read; the server has no such settings.
_CLIENT_VARIABLES: Final = ("FASTNESS_CA", "FASTNESS_CERT", "FASTNESS_KEY", "FASTNESS_DEBUG")


@click.command(
    cls=LeafCommand,
    examples=[
        "fastness serve --data dir:./data",
        "fastness serve --data postgresql://fastness@db/fastness --objects s3://bucket/fastness",
        "fastness serve --data 'postgresql://fastness@a,b/fastness' --read-from standby",
        "fastness serve --host 0.0.0.0 --tokens --tls-cert server.pem --tls-key server.key",
    ],
)
@click.option("--config", type=click.Path(exists=True, dir_okay=False), help="Read settings from this TOML file.")
@click.option(
    "--data", metavar="URL", help="The plane to serve: dir:PATH, postgresql://… or memory:.  [default: dir:./data]"
)
@click.option(
    "--init",
    is_flag=True,
    help="First create the tables of PostgreSQL, or upgrade those of an older version. Needs their owner.",
)
@click.option(
    "--read-from",
    type=click.Choice(["primary", "standby"]),
    help="Where lists, statistics and other reads that may be stale come from, on PostgreSQL.  [default: primary]",
)
@click.option("--objects", metavar="URL", help="The object store: dir:, s3://, az:// or gs://.")
@click.option("--activity", metavar="PATH", help="The folder that session logs are written to first.")
@click.option("--tiers", metavar="PATH", help="A TOML file with the durability tier of each entity field.")
@click.option("--encryption-key-file", metavar="PATH", help="The file with the master keys of encrypted universes.")
@click.option(
    "--encryption-command", metavar="COMMAND", help="A command that wraps and unwraps keys of encrypted universes."
)
@click.option(
    "--verify-blobs",
    type=click.Choice(["always", "sampled", "never"]),
    help="When to verify the hash of a blob that is read.",
)
@click.option(
    "--compact-every",
    "compact_every_seconds",
    type=SECONDS,
    help="How often to move old journal records to the object store.",
)
@click.option(
    "--gc-every",
    "gc_every_seconds",
    type=SECONDS,
    help="How often to delete unreferenced blobs and session logs past their retention; 0: never.  [default: 1h]",
)
@click.option(
    "--gc-grace",
    "gc_grace_seconds",
    type=SECONDS,
    help="How long to keep an unreferenced blob, and its body after that.  [default: 1d]",
)
@click.option(
    "--activity-keep",
    "activity_keep_seconds",
    type=SECONDS,
    help="How long to keep rotated session logs.  [default: for ever]",
)
@click.option(
    "--activity-max",
    "activity_bytes_max",
    type=SIZE,
    help="How much of a universe's rotated session logs to keep, as in 10GiB.  [default: no limit]",
)
@click.option(
    "--disk-reserve",
    "disk_reserve_bytes",
    type=SIZE,
    help="Refuse new data while less of the disk is free; 0: never.  [default: a tenth of it, 64MiB to 384MiB]",
)
@click.option(
    "--on-database-failure",
    type=click.Choice(["reopen", "exit"]),
    help="What to do when the key space fails: reopen it, or exit with code 12.  [default: reopen]",
)
@click.option("--host", help="The address to listen on.  [default: 127.0.0.1]")
@click.option("--port", type=int, help="The port to listen on; 0 selects a free one.  [default: 9440]")
@click.option("--tokens/--no-tokens", default=None, help="Whether clients need an access token.")
@click.option("--tls-cert", metavar="FILE", help="The server's certificate.")
@click.option("--tls-key", metavar="FILE", help="The private key of --tls-cert.")
@click.option("--tls-client-ca", metavar="FILE", help="Require client certificates issued by this CA.")
@click.option(
    "--insecure", is_flag=True, default=None, help="Allow listening on other addresses than localhost without TLS."
)
@click.option(
    "--drain",
    "--drain-seconds",
    "drain_seconds",
    type=SECONDS,
    help="How long to wait for calls in progress after SIGTERM.",
)
@click.option(
    "--queue-max-consumers",
    type=int,
    help="The maximum number of waiting consumers, over all queues; more are refused. 0: 4,096.",
)
@click.option(
    "--queue-poll-interval",
    "queue_poll_interval_seconds",
    type=SECONDS,
    help="How often waiting consumers and the sweeper read PostgreSQL, in case a notification is lost. "
    "An embedded store is never polled.",
)
@click.option(
    "--queue-poll-jitter",
    "queue_poll_jitter_seconds",
    type=SECONDS,
    help="A random time that is added to the poll interval, so nodes poll at different times.",
)
@click.option(
    "--queue-resilient-poll-interval",
    "queue_resilient_poll_interval_seconds",
    type=SECONDS,
    help="A shorter poll interval for waiting consumers only; without effect if it is 0, or longer than "
    "--queue-poll-interval.",
)
@click.option("--relay-host", help="The host name that agents sign when they log in to the relay.")
@click.option(
    "--relay-registration", type=click.Choice(["open", "closed"]), help="Whether agents can register themselves."
)
@click.option(
    "--relay-rate",
    "relay_rate_per_second",
    type=float,
    help="The maximum number of mails per second and sender; 0 is unlimited.",
)
@click.option(
    "--mail-max",
    "mail_pending_max",
    type=int,
    help="The maximum number of pending mails per mailbox, in universes without a mail policy of their own "
    "(`fastness mail policy`).  [default: 1000]",
)
@click.option(
    "--mail-ttl",
    "mail_ttl_seconds",
    type=SECONDS,
    help="Remove mail after this time, in universes without a mail policy of their own.  [default: 7d]",
)
@click.option(
    "--mcp/--no-mcp",
    default=None,
    help="Whether agents can use MCP at /mcp.  [default: if the extra fastness[mcp] is installed]",
)
@click.option("--mcp-agent", help="The name of every MCP client of a server without tokens.  [default: local]")
@click.option(
    "--mcp-url",
    metavar="URL",
    help="The public URL of /mcp, if a proxy changes it.  [default: made of the host that a client has called]",
)
@click.option(
    "--mcp-authorization-servers",
    metavar="URLS",
    help="The authorization servers that the metadata of /mcp names, separated by commas.",
)
@click.option(
    "--sqs/--no-sqs",
    default=None,
    help="Whether programs for Amazon SQS can use the queues, at /sqs.  [default: if --sqs-port is given]",
)
@click.option("--sqs-port", type=int, help="A port for SQS, too: 9324 is usual, and 0 selects a free one.")
@click.option(
    "--sqs-anonymous",
    is_flag=True,
    default=None,
    help="Accept SQS requests with any access key or none, on localhost only.",
)
@click.option(
    "--sqs-url",
    metavar="URL",
    help="The public URL of SQS, if a proxy changes it.  [default: made of the host that a client has called]",
)
@click.option("--sqs-region", help="The region in the names and signatures of SQS.  [default: us-east-1]")
@click.option(
    "--sqs-universe",
    help="The universe of requests with --sqs-anonymous. An access key has its own.  [default: main]",
)
@click.option(
    "--sqs-key-file",
    metavar="FILE",
    help="The file with the key that encrypts the secrets of access keys.  [default: sqs.key beside the data]",
)
@click.option("--pipeline-reports", metavar="FOLDER", help="The folder of pipeline reports that the console shows.")
@click.option(
    "--pipeline-lake",
    metavar="FOLDER",
    help="The folder of the lake. The console shows its live aggregates and, without --pipeline-reports, its reports.",
)
@click.option("--log-format", type=click.Choice(["text", "json"]), help="The format of log lines.")
@click.option(
    "--log-level", type=click.Choice(["debug", "info", "warning", "error"]), help="The minimum level of log lines."
)
def serve(config: str | None, *, init: bool, **flags: object) -> None:
    """It serves until SIGTERM or SIGINT."""
    # Imported here: no other command needs the server, and its import is slow.
    from fastness.plane.migrations import upgrade_tables
    from fastness.server.serving import run
    from fastness.server.settings import Settings

    settings = {name: value for name, value in flags.items() if value is not None}
    if "objects" not in settings and given_options().get("objects"):
        settings["objects"] = given_options()["objects"]
    environment = {name: value for name, value in os.environ.items() if name not in _CLIENT_VARIABLES}
    loaded = Settings.load(settings, file=config, environment=environment)
    if loaded.log_format == "json":
        given_options()["json"] = True  # An error of the start is a line of JSON, too.
    if init and loaded.data.startswith(("postgresql:", "postgres:")):
        upgrade_tables(loaded.data)  # A directory is created when it is opened.
    before = os.umask(0o077)  # The files of RocksDB get their mode from it.
    try:
        code = run(loaded)
    finally:
        os.umask(before)
    click.get_current_context().exit(code)
