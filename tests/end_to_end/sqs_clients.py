"""Four clients of SQS that make the same calls: boto3, boto3 with the Query protocol, aiobotocore, the JavaScript SDK.

A client has `call(action, parameters…)`, which returns the answer as boto3 does and raises `Refused`, and `start`,
which returns a future.
"""

import asyncio
import base64
import copy
import hashlib
import json
import os
import subprocess
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any, Self

import botocore.session
from botocore import xform_name
from botocore.config import Config
from botocore.exceptions import ClientError
from botocore.loaders import Loader

from tests.support.forked import run_python
from tests.support.node_packages import installed_program
from tests.support.server_process import Server

HERE = Path(__file__).parent
KINDS = ("boto3", "boto3-query", "aiobotocore", "javascript")
SECONDS_MAX = 60.0  # Bounds every call; far longer than any takes.
REGION = "us-east-1"
_CONFIG: Any = {
    "retries": {"total_max_attempts": 1},  # A call that is tried again would hide an error.
    "read_timeout": SECONDS_MAX,
    "max_pool_connections": 20,
}


class Credentials:
    """An access key, and where it is accepted."""

    def __init__(self, endpoint: str, access_key_id: str = "test", secret_access_key: str = "test") -> None:
        self.endpoint = endpoint
        self.access_key_id = access_key_id
        self.secret_access_key = secret_access_key

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of botocore's `create_client`."""
        return {
            "service_name": "sqs",
            "region_name": REGION,
            "endpoint_url": self.endpoint,
            "aws_access_key_id": self.access_key_id,
            "aws_secret_access_key": self.secret_access_key,
        }


class Refused(Exception):
    """SQS has answered with an error.

    `name` is the name of the error in the service model, or its code if the model has none. `code` is that of the Query
    protocol, without the prefix `AWS.SimpleQueueService.`.
    """

    def __init__(self, name: str, code: str, message: str, status: int) -> None:
        super().__init__(f"{name} ({code}, {status}): {message}")
        self.name = name
        self.code = code.removeprefix("AWS.SimpleQueueService.")
        self.message = message
        self.status = status


class Client(ABC):
    """A client of one endpoint. Use it in a `with` block."""

    @abstractmethod
    def start(self, action: str, /, **parameters: Any) -> "Future[dict[str, Any]]":
        """Begin a call."""

    def call(self, action: str, /, **parameters: Any) -> dict[str, Any]:
        """The answer to a call.

        Raises:
            Refused: the answer is an error.
        """
        return self.start(action, **parameters).result(SECONDS_MAX)

    def __enter__(self) -> Self:
        return self

    @abstractmethod
    def __exit__(self, *_: object) -> None: ...


class BotoClient(Client):
    """botocore, which boto3 is made of, on threads."""

    def __init__(self, credentials: Credentials, *, model: Path | None = None) -> None:
        session = botocore.session.Session()
        if model is not None:
            session.register_component("data_loader", Loader(extra_search_paths=[str(model)]))
        self._client = session.create_client(config=Config(**_CONFIG), **credentials.options)
        self._threads = ThreadPoolExecutor(16)

    def start(self, action: str, /, **parameters: Any) -> "Future[dict[str, Any]]":
        return self._threads.submit(self._call, action, parameters)

    def call(self, action: str, /, **parameters: Any) -> dict[str, Any]:
        return self._call(action, parameters)

    def _call(self, action: str, parameters: dict[str, Any]) -> dict[str, Any]:
        try:
            return _without_metadata(getattr(self._client, xform_name(action))(**parameters))
        except ClientError as error:
            raise _refused(error) from None

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._client.close()


class AioClient(Client):
    """aiobotocore, on an event loop in a thread."""

    def __init__(self, credentials: Credentials) -> None:
        from aiobotocore.config import AioConfig  # type: ignore[import-untyped]
        from aiobotocore.session import AioSession  # type: ignore[import-untyped]

        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._opened = AioSession().create_client(config=AioConfig(**_CONFIG), **credentials.options)
        self._client = asyncio.run_coroutine_threadsafe(self._opened.__aenter__(), self._loop).result(SECONDS_MAX)

    def start(self, action: str, /, **parameters: Any) -> "Future[dict[str, Any]]":
        return asyncio.run_coroutine_threadsafe(self._call(action, parameters), self._loop)

    async def _call(self, action: str, parameters: dict[str, Any]) -> dict[str, Any]:
        try:
            return _without_metadata(await getattr(self._client, xform_name(action))(**parameters))
        except ClientError as error:
            raise _refused(error) from None

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._opened.__aexit__(None, None, None), self._loop).result(SECONDS_MAX)
        asyncio.run_coroutine_threadsafe(self._loop.shutdown_asyncgens(), self._loop).result(SECONDS_MAX)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(SECONDS_MAX)
        self._loop.close()


class JavaScriptClient(Client):
    """The JavaScript SDK, in a process of Node.js."""

    def __init__(self, credentials: Credentials, program: Path) -> None:
        self._process = subprocess.Popen(
            ["node", str(program), credentials.endpoint, credentials.access_key_id, credentials.secret_access_key],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
        )
        self._ids = count(1)
        self._waiting: dict[int, Future[dict[str, Any]]] = {}
        self._writing = threading.Lock()
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def start(self, action: str, /, **parameters: Any) -> "Future[dict[str, Any]]":
        found: Future[dict[str, Any]] = Future()
        id = next(self._ids)
        self._waiting[id] = found
        line = json.dumps({"id": id, "action": action, "parameters": _bytes_to_text(parameters)})
        assert self._process.stdin is not None
        with self._writing:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        return found

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            answer = json.loads(line, object_hook=_text_to_bytes)
            waiting = self._waiting.pop(answer["id"])
            if (error := answer.get("error")) is None:
                waiting.set_result(answer["answer"])
            elif error["status"] is None:  # An error of the SDK itself: a checksum, or an answer that it cannot read.
                waiting.set_exception(AssertionError(error["stack"]))
            else:
                code = error["code"]
                name = error["name"] if error["isModelled"] else code
                waiting.set_exception(Refused(name, code, error["message"], error["status"]))
        for waiting in self._waiting.values():
            waiting.set_exception(AssertionError("node has ended"))

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(SECONDS_MAX)
        finally:
            self._process.kill()
            self._process.wait()
            self._reader.join(SECONDS_MAX)
            self._process.stdout.close()


class Clients:
    """Makes the clients, each when it is first wanted. Use it in a `with` block."""

    def __init__(self, folder: Path) -> None:
        """What the clients need is written into `folder`."""
        self._folder = folder
        self._opened: dict[tuple[str, str], Client] = {}

    def get(self, kind: str, credentials: Credentials) -> Client:
        key = kind, credentials.endpoint
        if key not in self._opened:
            self._opened[key] = self._open(kind, credentials)
        return self._opened[key]

    def _open(self, kind: str, credentials: Credentials) -> Client:
        if kind == "boto3":
            return BotoClient(credentials)
        if kind == "boto3-query":
            return BotoClient(credentials, model=write_query_model(self._folder / "query"))
        if kind == "aiobotocore":
            return AioClient(credentials)
        return JavaScriptClient(credentials, installed_program(HERE / "sqs_node", "calls.mjs"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for client in self._opened.values():
            client.__exit__()


def _without_metadata(answer: Mapping[str, Any]) -> dict[str, Any]:
    assert answer["ResponseMetadata"]["RequestId"], answer
    return {name: value for name, value in answer.items() if name != "ResponseMetadata"}


def _refused(error: ClientError) -> Refused:
    found = error.response["Error"]
    code = str(found["Code"])
    name = type(error).__name__
    status = error.response["ResponseMetadata"]["HTTPStatusCode"]
    return Refused(code if name == "ClientError" else name, code, str(found.get("Message")), status)


def _bytes_to_text(value: Any) -> Any:
    if isinstance(value, bytes):
        return {"$base64": base64.b64encode(value).decode()}
    if isinstance(value, dict):
        return {name: _bytes_to_text(each) for name, each in value.items()}
    return [_bytes_to_text(each) for each in value] if isinstance(value, list | tuple) else value


def _text_to_bytes(found: dict[str, Any]) -> Any:
    return base64.b64decode(found["$base64"]) if "$base64" in found else found


# The Query protocol. botocore's model describes the JSON protocol, and has only the error codes of the other one.

NAMESPACE = "http://queue.amazonaws.com/doc/2012-11-05/"
_ITEM_NAMES = {  # Of lists; others are named after the shape of their items.
    "AWSAccountIdList": "AWSAccountId",
    "ActionNameList": "ActionName",
    "AttributeNameList": "AttributeName",
    "BinaryList": "BinaryListValue",
    "QueueUrlList": "QueueUrl",
    "StringList": "StringListValue",
}
_MEMBER_NAMES = {  # Of maps.
    "Attributes": "Attribute",
    "MessageAttributes": "MessageAttribute",
    "MessageSystemAttributes": "MessageSystemAttribute",
    "Tags": "Tag",
    "tags": "Tag",
}
_PREFIX = "AWS.SimpleQueueService."
ERRORS: dict[str, tuple[str, int]] = {  # Codes and HTTP statuses. Others have their names as codes, and 400.
    "BatchEntryIdsNotDistinct": (f"{_PREFIX}BatchEntryIdsNotDistinct", 400),
    "BatchRequestTooLong": (f"{_PREFIX}BatchRequestTooLong", 400),
    "EmptyBatchRequest": (f"{_PREFIX}EmptyBatchRequest", 400),
    "InvalidAddress": ("InvalidAddress", 404),
    "InvalidBatchEntryId": (f"{_PREFIX}InvalidBatchEntryId", 400),
    "InvalidSecurity": ("InvalidSecurity", 403),
    "MessageNotInflight": (f"{_PREFIX}MessageNotInflight", 400),
    "OverLimit": ("OverLimit", 403),
    "PurgeQueueInProgress": (f"{_PREFIX}PurgeQueueInProgress", 403),
    "QueueDeletedRecently": (f"{_PREFIX}QueueDeletedRecently", 400),
    "QueueDoesNotExist": (f"{_PREFIX}NonExistentQueue", 400),
    "QueueNameExists": ("QueueAlreadyExists", 400),
    "ReceiptHandleIsInvalid": ("ReceiptHandleIsInvalid", 404),
    "RequestThrottled": ("RequestThrottled", 403),
    "ResourceNotFoundException": ("ResourceNotFoundException", 404),
    "TooManyEntriesInBatchRequest": (f"{_PREFIX}TooManyEntriesInBatchRequest", 400),
    "UnsupportedOperation": (f"{_PREFIX}UnsupportedOperation", 400),
}


def service_model() -> dict[str, Any]:
    """botocore's model of SQS."""
    return copy.deepcopy(dict(Loader().load_service_model("sqs", "service-2")))


def query_model() -> dict[str, Any]:
    """botocore's model of SQS, for the Query protocol."""
    model = service_model()
    metadata = model["metadata"]
    for name in ("awsQueryCompatible", "jsonVersion", "targetPrefix"):
        del metadata[name]
    metadata |= {"protocol": "query", "protocols": ["query"], "xmlNamespace": NAMESPACE}
    for name, operation in model["operations"].items():
        if "output" in operation:
            operation["output"]["resultWrapper"] = f"{name}Result"
    for name, shape in model["shapes"].items():
        if shape["type"] == "list":
            shape["member"]["locationName"] = _ITEM_NAMES.get(name, shape["member"]["shape"])
        elif shape["type"] == "map":
            shape["key"]["locationName"] = "Key" if name == "TagMap" else "Name"
            shape["value"]["locationName"] = "Value"
        elif shape["type"] == "structure":
            for member_name, member in shape["members"].items():
                target = model["shapes"][member["shape"]]
                if target["type"] == "map":
                    member["locationName"] = _MEMBER_NAMES[member_name]
                elif target["type"] == "list":  # An empty list is sent so, without a number.
                    member["locationName"] = _ITEM_NAMES.get(member["shape"], target["member"]["shape"])
        if shape.get("exception"):
            code, status = ERRORS.get(name, (name, 400))
            shape["error"] = {"code": code, "httpStatusCode": status, "senderFault": True}
    return model


def write_query_model(folder: Path) -> Path:
    """Write the model for the Query protocol into a folder that botocore can read."""
    path = folder / "sqs" / "2012-11-05" / "service-2.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(query_model()))
    return folder


# Checksums.


def md5(text: str | bytes) -> str:
    return hashlib.md5(text.encode() if isinstance(text, str) else text).hexdigest()


def md5_of_attributes(attributes: Mapping[str, Mapping[str, Any]]) -> str:
    """The checksum of message attributes, as the developer guide describes it.

    Sorted by name: the length and bytes of the name and of the data type, a byte for the kind of value, and its length
    and bytes. Lengths have 4 bytes, the highest first.
    """
    parts = []
    for name, attribute in sorted(attributes.items()):
        is_binary = attribute["DataType"].startswith("Binary")
        value = attribute["BinaryValue"] if is_binary else attribute["StringValue"].encode()
        parts += [_sized(name.encode()), _sized(attribute["DataType"].encode()), bytes([1 + is_binary]), _sized(value)]
    return md5(b"".join(parts))


def _sized(value: bytes) -> bytes:
    return len(value).to_bytes(4, "big") + value


# Servers.

MOVED_CLOCK = """
import os, time
import fastness.clock as clock

def moved_ns():
    return os.stat({path!r}).st_size * 1_000_000_000

elapsed_ns = clock._elapsed_ns
clock._PROCESS_TIME = clock._SteadyTime(lambda: time.time_ns() + moved_ns(), lambda: elapsed_ns() + moved_ns())
"""


class MovedClock:
    """The clock of a server, which is moved by tests: the seconds are the length of a file."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "moved"
        self._file.touch()
        self.code = MOVED_CLOCK.format(path=str(self._file))  # For the server, before it starts.

    def advance(self, seconds: int) -> None:
        os.truncate(self._file, self._file.stat().st_size + seconds)


@contextmanager
def signed_server(folder: Path, **flags: Any) -> Iterator[Credentials]:
    """A server that checks signatures, and an access key for all of its queues."""
    data, key_file = f"dir:{folder / 'data'}", str(folder / "sqs.key")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FASTNESS_")}
    done = run_python(
        ["-m", "fastness.cli", "--url", data, "token", "create", "clients", "--sqs"],
        env=environment | {"FASTNESS_SQS_KEY_FILE": key_file},
        check=True,
    )
    key = dict(line.split("=", 1) for line in done.stdout.split())
    server = Server(folder, tokens=True, sqs=True, sqs_key_file=key_file, **flags)
    try:
        yield Credentials(f"{server.url}/sqs", key["AWS_ACCESS_KEY_ID"], key["AWS_SECRET_ACCESS_KEY"])
    finally:
        server.kill()


@contextmanager
def anonymous_server(folder: Path, **flags: Any) -> Iterator[Credentials]:
    """A server that accepts every access key."""
    server = Server(folder, sqs=True, sqs_anonymous=True, **flags)
    try:
        yield Credentials(f"{server.url}/sqs")
    finally:
        server.kill()
