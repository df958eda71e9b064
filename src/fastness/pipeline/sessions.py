"""Spark sessions to run jobs on: a local Spark, a cluster, or Spark Connect.

With a given master or remote, or under spark-submit, only the settings that jobs need are changed, and these can be set
at any time. A local Spark is configured to start fast, to listen on loopback only, and to be quiet.
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

from fastness.errors import FastnessError, InvalidArgument, Unreachable, Unsupported
from fastness.extras import how_to_install
from fastness.pipeline import java_runtime

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

_CONNECT_PORT: Final = 15_002
_MASTER_PORT: Final = 7_077
_CONNECT_SECONDS: Final = 10.0
LOOPBACK: Final = "127.0.0.1"
_TASK_ATTEMPTS: Final = 4  # As on a cluster. By default a local Spark fails at the first lost Python worker.
_EXIT_SECONDS: Final = 300.0  # For Java to exit and write its archive.
_TAIL_BYTES: Final = 2_000  # How much of Java's output an error quotes.

_NEEDED: Final = {"spark.sql.session.timeZone": "UTC"}  # Jobs need this in any session.
# Fast to start and small: jobs spend their time in Python workers. `benches/bench_jvm.py` measures other flags.
_JVM: Final = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC")


def start(
    *,
    app: str = "fastness",
    master: str | None = None,
    remote: str | None = None,
    conf: Mapping[str, str] | None = None,
) -> "SparkSession":
    """The active session, or a new one. The caller that started it must stop it.

    `conf` is for a new session, and overrides the defaults.

    Raises:
        InvalidArgument: both a master and a remote are given.
        Unsupported: Spark or Java is not installed.
        Unreachable: Spark did not start, or the cluster is unreachable.
    """
    if master is not None and remote is not None:
        raise InvalidArgument("Give a master or a remote, not both")
    session = running()
    if session is None:
        if _uses_local_spark(master, remote, os.environ):
            session = _start_local(app, conf or {})
        else:
            session = _connect_cluster(app, master, remote, conf or {})
    for name, value in _NEEDED.items():
        session.conf.set(name, value)
    return session


def running() -> "SparkSession | None":
    """The active session, if there is one.

    Raises:
        Unsupported: Spark is not installed.
    """
    try:
        from pyspark.sql import SparkSession
    except ImportError as error:
        raise Unsupported(f"The pipeline needs Spark; {how_to_install('spark')}") from error
    session = SparkSession.getActiveSession()
    if session is not None and has_ended(session):
        _forget()
        return None
    return session


def ui_url(spark: "SparkSession") -> str:
    """The URL of Spark's web interface.

    Raises:
        Unsupported: the session was started without it.
    """
    url = spark.sparkContext.uiWebUrl
    if url is None:
        raise Unsupported("This Spark session was started without its web interface; set spark.ui.enabled to true")
    return url


def has_ended(spark: "SparkSession") -> bool:
    """Whether the Java process of a session has ended. Spark Connect has none in this process."""
    from py4j.protocol import Py4JError

    if ".connect." in type(spark).__module__:
        return False
    process = _java_process(spark)
    if process is not None and process.poll() is not None:
        return True
    try:
        spark.sparkContext._jsc.sc().isStopped()
    except (Py4JError, OSError):
        return True
    return False


@contextmanager
def report_end_of_java(spark: "SparkSession | None", job: str) -> Iterator[None]:
    """Raise Unreachable if Java ends meanwhile, instead of one of many errors of Spark's parts.

    The session is forgotten, so that `start` starts another.
    """
    try:
        yield
    except FastnessError:
        raise
    except Exception as error:  # py4j, sockets and PySpark have unrelated exception types.
        if spark is None or not has_ended(spark):
            raise
        process = _java_process(spark)
        _forget()
        raise Unreachable(
            f"The Java process of Spark ended during {job}{_exit_text(process)}. Check the machine's log for a lack of "
            "memory, start Spark again, and repeat the job; it continues after its last commit"
        ) from error


def _java_process(spark: "SparkSession") -> "subprocess.Popen[bytes] | None":
    """The Java process, if this process has started it."""
    return getattr(spark.sparkContext._gateway, "proc", None)


def _exit_text(process: "subprocess.Popen[bytes] | None") -> str:
    if process is None:
        return ""
    try:
        code = process.wait(_CONNECT_SECONDS)  # Its connections are closed a moment before it has ended.
    except subprocess.TimeoutExpired:
        return ""
    return f" (signal {signal.Signals(-code).name})" if code < 0 else f" (exit code {code})"


def _forget() -> None:
    """Drop the session of a Java process that has ended, which PySpark would use again."""
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    gateway = SparkContext._gateway
    SparkContext._gateway = SparkContext._jvm = SparkContext._active_spark_context = None
    SparkSession._instantiatedSession = None
    if gateway is not None:
        with suppress(Exception):  # Its connections are broken.
            gateway.shutdown()


def _uses_local_spark(master: str | None, remote: str | None, environment: Mapping[str, str]) -> bool:
    given = ("PYSPARK_GATEWAY_PORT", "SPARK_REMOTE", "SPARK_CONNECT_MODE_ENABLED", "MASTER")
    return master is None and remote is None and not any(environment.get(name) for name in given)


def _connect_cluster(app: str, master: str | None, remote: str | None, conf: Mapping[str, str]) -> "SparkSession":
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.appName(app)
    if remote is not None:
        _check_listening(remote, _CONNECT_PORT)
        builder = builder.remote(remote)
    elif master is not None:
        if master.startswith("spark://") and "," not in master:
            _check_listening(master, _MASTER_PORT)
        builder = builder.master(master).config("spark.ui.showConsoleProgress", "false")
        if master.startswith("local"):
            os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    for name, value in conf.items():
        builder = builder.config(name, value)
    try:
        return builder.getOrCreate()
    except Exception as error:  # py4j, gRPC and PySpark have unrelated exception types.
        raise Unreachable(
            f"Spark at {remote or master or 'the given master'} cannot be used: {_headline(error)}"
        ) from error


def _check_listening(url: str, port: int) -> None:
    """Raise Unreachable if the port does not accept connections: Spark itself would retry for minutes."""
    try:
        address = urlsplit(url)
        socket.create_connection((address.hostname or "", address.port or port), _CONNECT_SECONDS).close()
    except (OSError, ValueError) as error:
        raise Unreachable(f"Cannot connect to Spark at {url} ({error}); is it running?") from error


def _headline(error: Exception) -> str:
    """The message of an error, without its stack trace."""
    lines = [line.strip() for line in str(error).splitlines()]
    return " ".join(takewhile(lambda line: not line.startswith(("at ", "JVM stacktrace")), lines))[:_TAIL_BYTES]


def warm() -> Path:
    """Halve the start-up time of a local Spark: start one, and make Java save its loaded classes to an archive.

    Raises:
        Unsupported: Spark or Java is not installed.
        Unreachable: Spark did not start, or Java could not write the archive.
    """
    from pyspark import __version__

    java = java_runtime.find(os.environ)
    archive = java_runtime.archive(java, __version__, os.environ)
    with tempfile.TemporaryDirectory(dir=archive.parent) as folder:
        draft = Path(folder) / archive.name
        spark = _start_local("warm", {}, java_runtime.create_archive_option(java, draft))
        spark.range(1_000).mapInArrow(_identity, "id long").groupBy("id").count().collect()
        code = end(spark)
        if code != 0 or not draft.exists():
            raise Unreachable(f"Java exited with {code} and wrote no archive to {archive.parent}; is the disk full?")
        draft.replace(archive)
    return archive


def end(spark: "SparkSession") -> int:
    """Stop a local Spark and wait until its Java has exited; returns the exit code.

    `SparkSession.stop` alone leaves Java running until some time after this process ends.
    """
    from pyspark import SparkContext

    gateway = SparkContext._gateway
    assert gateway is not None
    with suppress(Exception):  # It may have stopped already.
        spark.stop()
    SparkContext._gateway = SparkContext._jvm = None
    with suppress(Exception):
        gateway.shutdown()
    gateway.proc.stdin.close()  # Java exits when its standard input is closed.
    code: int = gateway.proc.wait(_EXIT_SECONDS)
    return code


def _identity(batches: "Iterator[pa.RecordBatch]") -> "Iterator[pa.RecordBatch]":
    return batches


def _start_local(app: str, conf: Mapping[str, str], *options: str) -> "SparkSession":
    from pyspark import SparkConf, SparkContext, __version__
    from pyspark.java_gateway import launch_gateway
    from pyspark.sql import SparkSession

    java = java_runtime.find(os.environ)
    if java.home is not None:
        os.environ["JAVA_HOME"] = java.home
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("SPARK_LOCAL_IP", LOOPBACK)
    if not options and (archive := java_runtime.archive(java, __version__, os.environ)).exists():
        options = (java_runtime.archive_option(java, archive),)
    settings = SparkConf(loadDefaults=False)
    for name, value in {**_local_settings(app, *options), **conf}.items():
        settings.set(name, value)
    with tempfile.TemporaryFile() as output:
        quiet = {} if os.environ.get("FASTNESS_DEBUG") else {"stdout": output, "stderr": output}
        try:
            with _kill_java_on_error():
                gateway = launch_gateway(settings, quiet)  # type: ignore[no-untyped-call]
            return SparkSession(SparkContext(conf=settings, gateway=gateway))
        except Exception as error:
            raise Unreachable(f"Spark did not start: {_output_tail(output) or _headline(error)}") from error


@contextmanager
def _kill_java_on_error() -> Iterator[None]:
    """Kill the starting Java on an error: it would wait for a connection for ever."""
    java_gateway: Any = import_module("pyspark.java_gateway")
    started: list[subprocess.Popen[bytes]] = []

    def popen(*args: Any, **options: Any) -> "subprocess.Popen[bytes]":
        # Its own process group: a script starts Java, which starts Java.
        started.append(subprocess.Popen(*args, process_group=0, **options))
        return started[-1]

    original, java_gateway.Popen = java_gateway.Popen, popen  # launch_gateway does not return the process.
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


def _local_settings(app: str, *options: str) -> dict[str, str]:
    cores = len(os.sched_getaffinity(0))
    logging = Path(__file__).with_name("log4j2.properties").as_uri()
    return {
        "spark.master": f"local[{cores},{_TASK_ATTEMPTS}]",
        "spark.app.name": app,
        "spark.driver.host": LOOPBACK,
        "spark.driver.bindAddress": LOOPBACK,
        "spark.driver.extraJavaOptions": " ".join((*_JVM, f"-Dlog4j2.configurationFile={logging}", *options)),
        "spark.hadoop.parquet.page.verify-checksum.enabled": "true",  # Files of the lake have a checksum in each page.
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.shuffle.partitions": str(max(2, cores)),
        "spark.sql.warehouse.dir": (Path(tempfile.gettempdir()) / "fastness-warehouse").as_uri(),  # Never used.
    }


def _output_tail(output: IO[bytes]) -> str:
    size = output.seek(0, os.SEEK_END)
    output.seek(max(0, size - _TAIL_BYTES))
    return output.read().decode(errors="replace").strip()
