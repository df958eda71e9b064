"""A small relay client that follows docs/relay.md and imports nothing of Fastness."""

import asyncio
import base64
import json
import uuid
from collections.abc import Callable
from typing import Any, Self

import msgspec
import websockets
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from websockets.asyncio.client import ClientConnection, connect

SECONDS_MAX = 60.0
PROTOCOL = "fastness-relay-1"


def base64url(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def from_base64url(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


def to_sign(host: str, nonce: bytes, protocol: str = PROTOCOL) -> bytes:
    parts = (protocol.encode(), host.encode(), nonce)
    return b"".join(len(part).to_bytes(4, "big") + part for part in parts)


class Refused(Exception):
    """The server refused to authenticate the agent."""

    def __init__(self, frame: dict[str, Any] | None, code: int | None) -> None:
        super().__init__(f"{frame} {code}")
        self.error = (frame or {}).get("code")
        self.detail = (frame or {}).get("detail", "")
        self.close = code


class Agent:
    """One connection of an agent. `auto` confirms every mail on receipt."""

    def __init__(
        self,
        url: str,
        address: str,
        *,
        key: Ed25519PrivateKey | None = None,
        token: str | None = None,
        auto: bool = False,
        format: str = "json",
        host: str | None = None,
        receipts_after: int | None = None,
        reads: bool = True,
        **options: Any,
    ) -> None:
        self.address = address
        self.key = key or Ed25519PrivateKey.generate()
        self.mails: list[dict[str, Any]] = []
        self.confirms: list[dict[str, Any]] = []  # Delivery confirmations of this agent's own mails.
        self.frames: list[dict[str, Any]] = []  # All received frames, in order.
        self.sent: dict[str, dict[str, Any]] = {}  # Answers to sends, by message id.
        self.closed: tuple[int, str] | None = None
        self.auto = auto
        self._url = url.replace("http", "ws", 1) + "/v1/relay" + ("?format=msgpack" if format == "msgpack" else "")
        self._token = token
        self._format = format
        self._host = host
        self._receipts_after = receipts_after
        self._reads = reads
        self._options = options
        self._changed = asyncio.Condition()
        self._reading: asyncio.Task[None] | None = None
        self._socket: ClientConnection | None = None

    async def __aenter__(self) -> Self:
        await self.open()
        await self.authenticate()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def open(self) -> dict[str, Any]:
        """Connect; return the challenge."""
        self._socket = await connect(self._url, compression=None, proxy=None, ping_interval=None, **self._options)
        [self.challenge] = await self._receive()
        assert self.challenge["type"] == "challenge", self.challenge
        assert self.challenge["protocol"] == PROTOCOL
        return self.challenge

    async def authenticate(self, **changes: Any) -> None:
        """Answer the challenge, with `changes` to the frame."""
        frame: dict[str, Any] = {"type": "authenticate", "address": self.address}
        if self._receipts_after is not None:
            frame["receipts_after"] = self._receipts_after
        if self._token is not None:
            frame["token"] = self._token
        else:
            host = self._host or self.challenge["host"]
            frame["public_key"] = self._bytes(self.key.public_key().public_bytes_raw())
            frame["signature"] = self._bytes(self.key.sign(to_sign(host, self._nonce())))
        await self.send_frames({**frame, **changes})
        frames: list[dict[str, Any]] = []
        try:
            frames = await self._receive()
            if frames[0]["type"] != "welcome":
                await self._receive()
        except websockets.ConnectionClosed as closed:
            await self.close()
            raise Refused(frames[0] if frames else None, closed.rcvd.code if closed.rcvd else None) from None
        self.welcome = frames[0]
        while len(frames) < 2:
            frames += await self._receive()
        self.pending = frames[1]["pending_count"]
        assert frames[1]["type"] == "queue_status", frames
        mails = self._process(frames[2:])  # Mails may arrive with the welcome.
        if self.auto and mails:
            await self.confirm(*mails)
        if self._reads:
            self.start_reading()

    def start_reading(self) -> None:
        self._reading = asyncio.create_task(self._read())

    async def close(self) -> None:
        if self._socket is not None:
            await self._socket.close()
        if self._reading is not None:
            await asyncio.wait({self._reading}, timeout=SECONDS_MAX)
            self._reading.cancel()

    def abort(self) -> None:
        """Lose the connection without a close frame."""
        assert self._socket is not None
        self._socket.transport.abort()

    async def send_frames(self, *frames: dict[str, Any]) -> None:
        assert self._socket is not None
        message = frames[0] if len(frames) == 1 else list(frames)
        data = json.dumps(message) if self._format == "json" else msgspec.msgpack.encode(message)
        await self._socket.send(data)

    async def send(self, to: str, body: bytes = b"", **options: Any) -> dict[str, Any]:
        """Send a mail; return its answer."""
        id = await self.post(to, body, **options)
        return await self.answer(id)

    async def post(self, to: str, body: bytes = b"", **options: Any) -> str:
        """Send a mail without waiting for its answer; return its id."""
        frame = self.mail(to, body, **options)
        await self.send_frames(frame)
        return str(frame["message_id"])

    def mail(self, to: str, body: bytes = b"", **options: Any) -> dict[str, Any]:
        return {"type": "send", "message_id": str(uuid.uuid4()), "to": to, "body": self._bytes(body), **options}

    async def answer(self, id: str) -> dict[str, Any]:
        await self.until(lambda: id in self.sent)
        return self.sent[id]

    async def confirm(self, *mails: dict[str, Any]) -> None:
        await self.send_frames({"type": "confirm", "message_ids": [mail["message_id"] for mail in mails]})

    async def get(self, count: int) -> list[dict[str, Any]]:
        """The first `count` mails of this connection; waits for them."""
        await self.until(lambda: len(self.mails) >= count)
        return self.mails[:count]

    async def until(self, condition: Callable[[], Any]) -> None:
        try:
            async with asyncio.timeout(SECONDS_MAX), self._changed:
                await self._changed.wait_for(lambda: condition() or self.closed is not None)
        except TimeoutError:
            raise AssertionError(f"the condition never became true; the last frames: {self.frames[-5:]}") from None
        assert condition(), f"closed before the condition became true: {self.closed}"

    async def until_closed(self) -> tuple[int, str]:
        await self.until(lambda: self.closed is not None)
        assert self.closed is not None
        return self.closed

    def bodies(self) -> list[bytes]:
        return [self.body(mail) for mail in self.mails]

    def body(self, mail: dict[str, Any]) -> bytes:
        return from_base64url(mail["body"]) if self._format == "json" else mail["body"]

    def _bytes(self, data: bytes) -> Any:
        return base64url(data) if self._format == "json" else data

    def _nonce(self) -> bytes:
        nonce = self.challenge["nonce"]
        return from_base64url(nonce) if isinstance(nonce, str) else nonce

    async def _receive(self) -> list[dict[str, Any]]:
        assert self._socket is not None
        async with asyncio.timeout(SECONDS_MAX):
            data = await self._socket.recv()
        found = json.loads(data) if isinstance(data, str) else msgspec.msgpack.decode(data)
        return found if isinstance(found, list) else [found]

    async def _read(self) -> None:
        assert self._socket is not None
        try:
            async for data in self._socket:
                found = json.loads(data) if isinstance(data, str) else msgspec.msgpack.decode(data)
                mails = self._process(found if isinstance(found, list) else [found])
                if self.auto and mails:
                    await self.confirm(*mails)
                async with self._changed:
                    self._changed.notify_all()
        except websockets.ConnectionClosed:
            pass
        self.closed = (self._socket.close_code or 1006, self._socket.close_reason or "")
        async with self._changed:
            self._changed.notify_all()

    def _process(self, frames: list[dict[str, Any]]) -> list[dict[str, Any]]:
        self.frames += frames
        mails = [frame for frame in frames if frame["type"] == "mail"]
        self.mails += mails
        self.confirms += [frame for frame in frames if frame["type"] == "delivery_confirm"]
        for frame in frames:
            if frame["type"] in ("sent", "error", "rate_limited") and frame.get("message_id"):
                self.sent[frame["message_id"]] = frame
            elif frame["type"] == "ping":
                asyncio.get_running_loop().create_task(self.send_frames({"type": "pong"}))
        return mails
