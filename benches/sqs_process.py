"""A light SQS client for `bench_sqs`: 64 connections with signed requests of the JSON protocol, on one event loop.

It reads a line of JSON for each task, and answers with the seconds that the task took. A connection sends its next
request when it has the answer to the last one.
"""

import asyncio
import hashlib
import hmac
import json
import sys
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final
from urllib.parse import urlsplit

import uvloop

CONNECTIONS: Final = 64
BODY: Final = "x" * 200
REGION: Final = "us-east-1"


class Connection:
    """One connection, with one request at a time."""

    def __init__(self, url: str, key: str, secret: str) -> None:
        parts = urlsplit(url)
        self._host, self._port, self._path = parts.hostname or "", parts.port or 80, parts.path + "/"
        self._key, self._secret = key, secret

    async def open(self) -> None:
        self._reader, self._writer = await asyncio.open_connection(self._host, self._port)

    async def call(self, action: str, parameters: dict[str, Any]) -> dict[str, Any]:
        body = json.dumps(parameters).encode()
        self._writer.write(self._request(action, body))
        head = await self._reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
        answer: dict[str, Any] = json.loads(await self._reader.readexactly(length) or b"{}")
        if not head.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"{action} failed: {head.decode()}{answer}")
        return answer

    def _request(self, action: str, body: bytes) -> bytes:
        """A signed request (AWS Signature Version 4)."""
        now = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        day, target = now[:8], f"AmazonSQS.{action}"
        host = f"{self._host}:{self._port}"
        signed = "content-type;host;x-amz-date;x-amz-target"
        canonical = "\n".join(
            (
                "POST",
                self._path,
                "",
                "content-type:application/x-amz-json-1.0",
                f"host:{host}",
                f"x-amz-date:{now}",
                f"x-amz-target:{target}",
                "",
                signed,
                hashlib.sha256(body).hexdigest(),
            )
        )
        scope = f"{day}/{REGION}/sqs/aws4_request"
        text = f"AWS4-HMAC-SHA256\n{now}\n{scope}\n{hashlib.sha256(canonical.encode()).hexdigest()}"
        key = f"AWS4{self._secret}".encode()
        for part in scope.split("/"):
            key = hmac.digest(key, part.encode(), "sha256")
        signature = hmac.digest(key, text.encode(), "sha256").hex()
        head = (
            f"POST {self._path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/x-amz-json-1.0\r\n"
            f"X-Amz-Date: {now}\r\nX-Amz-Target: {target}\r\nContent-Length: {len(body)}\r\n"
            f"Authorization: AWS4-HMAC-SHA256 Credential={self._key}/{scope}, SignedHeaders={signed}, "
            f"Signature={signature}\r\n\r\n"
        )
        return head.encode() + body


class Work:
    """What the connections do together: each takes from what is left, until nothing is."""

    def __init__(self, queue: str, messages: int) -> None:
        self.queue, self.left = queue, messages
        self.number = 0  # Makes bodies different, so that no two requests are the same.

    async def send(self, connection: Connection) -> None:
        while self.left > 0:
            self.left -= 1
            await connection.call("SendMessage", {"QueueUrl": self.queue, "MessageBody": self._body()})

    async def send_batches(self, connection: Connection) -> None:
        while self.left > 0:
            self.left -= 10
            entries = [{"Id": str(number), "MessageBody": self._body()} for number in range(10)]
            await connection.call("SendMessageBatch", {"QueueUrl": self.queue, "Entries": entries})

    async def drain(self, connection: Connection) -> None:
        while self.left > 0:
            self.number += 1
            parameters = {"QueueUrl": self.queue, "MaxNumberOfMessages": 10, "VisibilityTimeout": 60 + self.number}
            received = (await connection.call("ReceiveMessage", parameters)).get("Messages", [])
            self.left -= len(received)
            if received:
                entries = [
                    {"Id": str(number), "ReceiptHandle": each["ReceiptHandle"]} for number, each in enumerate(received)
                ]
                await connection.call("DeleteMessageBatch", {"QueueUrl": self.queue, "Entries": entries})

    def _body(self) -> str:
        self.number += 1
        return f"{self.number}{BODY}"


async def main(url: str, key: str, secret: str) -> None:
    connections = [Connection(url, key, secret) for _ in range(CONNECTIONS)]
    for connection in connections:
        await connection.open()
    loop = asyncio.get_running_loop()
    queue, tasks = "", 0
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        task = json.loads(line)
        tasks += 1
        if not task["work"].startswith("receive"):
            created = await connections[0].call("CreateQueue", {"QueueName": f"light-{tasks}"})
            queue = created["QueueUrl"]
        work = Work(queue, task["messages"])
        step: Callable[[Connection], Coroutine[Any, Any, None]] = {
            "single sends": work.send,
            "sends in tens": work.send_batches,
        }.get(task["work"], work.drain)
        started = time.perf_counter()
        await asyncio.gather(*[step(connection) for connection in connections])
        print(json.dumps({"seconds": time.perf_counter() - started}), flush=True)


if __name__ == "__main__":
    uvloop.run(main(*sys.argv[1:]))
