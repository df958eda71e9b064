"""The options of `fastness pipeline`, and their values."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, NotRequired, TypedDict

import click

from fastness.cli.durations import SECONDS
from fastness.cli.encryption_options import key_file_option
from fastness.cli.pipeline_observers import lineage_option, metrics_option
from fastness.errors import InvalidArgument

if TYPE_CHECKING:
    from fastness.pipeline.jobs import JobOptions


class JobArguments(TypedDict):
    """The values of the options that every job has."""

    data: str | None
    lake: str | None
    activity: tuple[str, ...]
    universes: tuple[str, ...]
    storage: tuple[str, ...]
    master: str | None
    remote: str | None
    ui: NotRequired[bool]
    metrics: NotRequired[str | None]
    lineage: NotRequired[str | None]
    reducer: NotRequired[str | None]
    encryption_key_file: NotRequired[str | None]
    key_file: NotRequired[str | None]
    redact: NotRequired[str | None]


_DATA: Final = click.option(
    "--data", metavar="URL", help="The plane: a data directory, postgresql://… or a server.  [default: --url]"
)
LAKE: Final = click.option(
    "--lake", metavar="PATH", envvar="FASTNESS_LAKE", help="The lake: a folder or s3://BUCKET/PATH."
)
_UNIVERSE: Final = click.option(
    "--universe", "universes", metavar="NAME", multiple=True, help="Process only this universe. Repeatable."
)
STORAGE: Final = click.option(
    "--storage",
    metavar="NAME=VALUE",
    multiple=True,
    help="An option of the object store, such as aws_endpoint=…. Repeatable.",
)


def job_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options that every job has."""
    for option in reversed(
        [
            _DATA,
            LAKE,
            click.option(
                "--activity",
                metavar="DIR",
                multiple=True,
                help="A folder of session logs, if they are not in the data directory (PostgreSQL). Repeatable: each "
                "node has its own.",
            ),
            _UNIVERSE,
            STORAGE,
            key_file_option,
            click.option(
                "--key-file",
                metavar="FILE",
                envvar="FASTNESS_LAKE_KEY_FILE",
                help="A file with the secret key of the digests in the lake.",
            ),
            click.option(
                "--redact",
                metavar="FILE",
                envvar="FASTNESS_LAKE_REDACT",
                help="A TOML file with the fields that are replaced before they are stored in the lake.",
            ),
            click.option("--master", metavar="URL", help="The Spark master: spark://…, yarn, k8s://… or local[4]."),
            click.option("--remote", metavar="URL", help="The Spark Connect server: sc://HOST:15002."),
            click.option(
                "--ui", is_flag=True, help="Serve Spark's web interface while the job runs, and print its URL."
            ),
            metrics_option,
            lineage_option,
        ]
    ):
        command = option(command)
    return command


class LakeArguments(TypedDict):
    """The values of the options of commands that start no Spark."""

    data: str | None
    lake: str | None
    universes: tuple[str, ...]
    storage: tuple[str, ...]
    encryption_key_file: str | None


def lake_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of commands that start no Spark."""
    for option in (key_file_option, STORAGE, _UNIVERSE, LAKE, _DATA):
        command = option(command)
    return command


def job_arguments(options: LakeArguments) -> JobArguments:
    return {
        "data": options["data"],
        "lake": options["lake"],
        "universes": options["universes"],
        "storage": options["storage"],
        "encryption_key_file": options["encryption_key_file"],
        "activity": (),
        "master": None,
        "remote": None,
    }


reducer_option = click.option(
    "--reducer",
    metavar="MODULE:NAME",
    help="What replays worlds: a function (state, record) -> state, a program, or an app.  [default: a hash chain]",
)


def retention(assignments: Sequence[str]) -> dict[str, float]:
    """The number of seconds that each table keeps its rows, from TABLE=AGE.

    Raises:
        InvalidArgument: one of them is invalid.
    """
    found = {}
    for each in assignments:
        table, equals, age = each.partition("=")
        try:
            found[table] = SECONDS.convert(age, None, None)
        except click.UsageError as error:
            raise InvalidArgument(f"--retain {each!r} is invalid; use TABLE=AGE, such as activity=90d") from error
        if not (table and equals):
            raise InvalidArgument(f"--retain {each!r} is invalid; use TABLE=AGE, such as activity=90d")
    return found


class SourceArguments(JobArguments):
    """The options of jobs that name sources."""

    worlds: tuple[str, ...]
    kinds: tuple[str, ...]
    queues: tuple[str, ...]
    sessions: tuple[str, ...]
    everything: bool


def source_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options that name sources."""
    for option in (
        click.option("--all", "everything", is_flag=True, help="All sources of the selected universes."),
        click.option(
            "--session", "sessions", metavar="NAME", multiple=True, help="The session logs of this session. Repeatable."
        ),
        click.option(
            "--queue", "queues", metavar="NAME", multiple=True, help="The durable history of this queue. Repeatable."
        ),
        click.option("--kind", "kinds", metavar="KIND", multiple=True, help="This kind of entity. Repeatable."),
        click.option("--world", "worlds", metavar="NAME", multiple=True, help="This world. Repeatable."),
    ):
        command = option(command)
    return command


def named_sources(options: SourceArguments) -> "JobOptions":
    return {
        "worlds": options["worlds"],
        "kinds": options["kinds"],
        "queues": options["queues"],
        "sessions": options["sessions"],
        "everything": options["everything"],
    }
