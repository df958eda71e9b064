"""A Spark to run jobs on: one of our own on this machine, that of a cluster, or one behind Spark Connect.

Where somebody names a master or a remote, or runs us by spark-submit, it is their Spark: only what jobs need in any
session is set, and it can be set at any time. A Spark of our own starts fast, listens on loopback alone, and is quiet.
"""

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module
from itertools import takewhile
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from holdfast.errors import InvalidArgument, Unreachable, Unsupported
from holdfast.pipeline import java_runtime

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

_CONNECT_PORT: Final = 15_002
_MASTER_PORT: Final = 7_077
_KNOCK_SECONDS: Final = 10.0
LOOPBACK: Final = "127.0.0.1"
_WARM_SECONDS: Final = 300.0  # How long Java may write at its archive.
_TAIL_BYTES: Final = 2_000  # What is quoted of what Java said before it ended.

# What jobs rely on, in any session.
_NEEDED: Final = {
    "spark.sql.python.filterPushdown.enabled": "true",  # Without it every read of our data source fails.
    "spark.sql.session.timeZone": "UTC",
}
# Quick to compile and small: jobs spend their time in Python workers.
_JVM: Final = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC")


def start(
    *,
    app: str = "holdfast",
    master: str | None = None,
    remote: str | None = None,
    conf: Mapping[str, str] | None = None,
) -> "SparkSession":
    """The session that is there, or a new one; whoever starts it stops it.

    `conf` is for a new session, and goes before what we would choose.

    Raises:
        InvalidArgument: a master and a remote are given.
        Unsupported: Spark or Java is not installed.
        Unreachable: Spark did not start, or the cluster does not answer.
    """
    if master is not None and remote is not None:
        raise InvalidArgument("A job runs on one Spark: give a master or a remote, not both")
    session = running()
    if session is None:
        if _is_ours(master, remote, os.environ):
            session = _ours(app, conf or {})
        else:
            session = _theirs(app, master, remote, conf or {})
    for name, value in _NEEDED.items():
        session.conf.set(name, value)
    return session


def running() -> "SparkSession | None":
    """The session that is there.

    Raises:
        Unsupported: Spark is not installed.
    """
    try:
        from pyspark.sql import SparkSession
    except ImportError as error:
        raise Unsupported("The pipeline needs Spark; run: pip install 'holdfast[spark]'") from error
    return SparkSession.getActiveSession()


def _is_ours(master: str | None, remote: str | None, environment: Mapping[str, str]) -> bool:
    given = ("PYSPARK_GATEWAY_PORT", "SPARK_REMOTE", "SPARK_CONNECT_MODE_ENABLED", "MASTER")
    return master is None and remote is None and not any(environment.get(name) for name in given)


def _theirs(app: str, master: str | None, remote: str | None, conf: Mapping[str, str]) -> "SparkSession":
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.appName(app)
    if remote is not None:
        _knock(remote, _CONNECT_PORT)
        builder = builder.remote(remote)
    elif master is not None:
        if master.startswith("spark://") and "," not in master:
            _knock(master, _MASTER_PORT)
        builder = builder.master(master).config("spark.ui.showConsoleProgress", "false")
        if master.startswith("local"):
            os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    for name, value in conf.items():
        builder = builder.config(name, value)
    try:
        return builder.getOrCreate()
    except Exception as error:  # Of py4j, gRPC or PySpark, each with a tree of its own.
        raise Unreachable(
            f"Spark at {remote or master or 'the given master'} cannot be used: {_headline(error)}"
        ) from error


def _knock(url: str, port: int) -> None:
    """See whether somebody listens: Spark itself would try for minutes."""
    try:
        place = urlsplit(url)
        socket.create_connection((place.hostname or "", place.port or port), _KNOCK_SECONDS).close()
    except (OSError, ValueError) as error:
        raise Unreachable(f"Nobody answers at {url} ({error}); is Spark running there?") from error


def _headline(error: Exception) -> str:
    """What an error says before it begins to tell where."""
    lines = [line.strip() for line in str(error).splitlines()]
    return " ".join(takewhile(lambda line: not line.startswith(("at ", "JVM stacktrace")), lines))[:_TAIL_BYTES]


def warm() -> Path:
    """Make the next start of a Spark of our own take half of the time: start one, and have Java write down its classes.

    Raises:
        Unsupported: Spark or Java is not installed.
        Unreachable: Spark did not start, or Java could not write the archive.
    """
    from pyspark import __version__

    java = java_runtime.find(os.environ)
    archive = java_runtime.archive(java, __version__, os.environ)
    with tempfile.TemporaryDirectory(dir=archive.parent) as folder:
        draft = Path(folder) / archive.name
        spark = _ours("warm", {}, java_runtime.make(java, draft))
        spark.range(1_000).mapInArrow(_same, "id long").groupBy("id").count().collect()
        code = end(spark)
        if code != 0 or not draft.exists():
            raise Unreachable(f"Java ended with {code} and wrote no archive into {archive.parent}; is there room?")
        draft.replace(archive)
    return archive


def end(spark: "SparkSession") -> int:
    """Stop a Spark of our own and wait until its Java has ended, with which exit code.

    Whoever only stops it leaves Java to end some time after this process does.
    """
    from pyspark import SparkContext

    gateway = SparkContext._gateway
    assert gateway is not None
    with suppress(Exception):  # One that is gone cannot be stopped, and its Java has ended.
        spark.stop()
    SparkContext._gateway = SparkContext._jvm = None
    with suppress(Exception):
        gateway.shutdown()
    gateway.proc.stdin.close()  # Java ends when nobody can tell it anything any more.
    code: int = gateway.proc.wait(_WARM_SECONDS)
    return code


def _same(batches: "Iterator[pa.RecordBatch]") -> "Iterator[pa.RecordBatch]":
    return batches


def _ours(app: str, conf: Mapping[str, str], *options: str) -> "SparkSession":
    from pyspark import SparkConf, SparkContext, __version__
    from pyspark.java_gateway import launch_gateway
    from pyspark.sql import SparkSession

    java = java_runtime.find(os.environ)
    if java.home is not None:
        os.environ["JAVA_HOME"] = java.home
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("SPARK_LOCAL_IP", LOOPBACK)
    if not options and (archive := java_runtime.archive(java, __version__, os.environ)).exists():
        options = (java_runtime.use(java, archive),)
    settings = SparkConf(loadDefaults=False)
    for name, value in {**_settings(app, *options), **conf}.items():
        settings.set(name, value)
    with tempfile.TemporaryFile() as said:
        quiet = {} if os.environ.get("HOLDFAST_DEBUG") else {"stdout": said, "stderr": said}
        try:
            with _killed_if_interrupted():
                gateway = launch_gateway(settings, quiet)  # type: ignore[no-untyped-call]
            return SparkSession(SparkContext(conf=settings, gateway=gateway))
        except Exception as error:
            raise Unreachable(f"Spark did not start: {_tail(said) or _headline(error)}") from error


@contextmanager
def _killed_if_interrupted() -> Iterator[None]:
    """Kill the Java that is starting if we do not get to know it: it would wait for ever to be told something."""
    java_gateway: Any = import_module("pyspark.java_gateway")
    started: list[subprocess.Popen[bytes]] = []

    def popen(*words: Any, **options: Any) -> "subprocess.Popen[bytes]":
        # A group of its own: a script starts Java, which starts Java.
        started.append(subprocess.Popen(*words, process_group=0, **options))
        return started[-1]

    original, java_gateway.Popen = java_gateway.Popen, popen  # Nobody else gets to know the process.
    try:
        yield
    except BaseException:
        for process in started:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        raise
    finally:
        java_gateway.Popen = original


def _settings(app: str, *options: str) -> dict[str, str]:
    cores = len(os.sched_getaffinity(0))
    logging = Path(__file__).with_name("log4j2.properties").as_uri()
    return {
        "spark.master": f"local[{cores}]",
        "spark.app.name": app,
        "spark.driver.host": LOOPBACK,
        "spark.driver.bindAddress": LOOPBACK,
        "spark.driver.extraJavaOptions": " ".join((*_JVM, f"-Dlog4j2.configurationFile={logging}", *options)),
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.shuffle.partitions": str(max(2, cores)),
        "spark.sql.warehouse.dir": (Path(tempfile.gettempdir()) / "holdfast-warehouse").as_uri(),  # Never used.
    }


def _tail(said: IO[bytes]) -> str:
    size = said.seek(0, os.SEEK_END)
    said.seek(max(0, size - _TAIL_BYTES))
    return said.read().decode(errors="replace").strip()
