"""Signatures of SQS requests: those of botocore and of AWS's test suite are right, all others are refused."""

import logging
from collections.abc import AsyncIterator
from contextlib import suppress
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import botocore.auth
import pytest
from botocore.auth import SigV4Auth, SigV4QueryAuth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from starlette.datastructures import Headers

from fastness.access_keys import FileSecrets, MemorySecrets, NoSecrets, secrets_of
from fastness.backends.memory import MemoryDatabase
from fastness.errors import EncryptionKeyMissing, InvalidArgument, NotAllowed
from fastness.handles.tokens import AsyncTokens
from fastness.layers import tokens as layer
from fastness.limits import SQS_CLOCK_SKEW_SECONDS, SQS_PRESIGNED_SECONDS_MAX, SQS_SAME_SIGNATURE_SECONDS
from fastness.plane.embedded import AsyncEmbeddedTransport
from fastness.plane.services import Services
from fastness.server.context import ServerContext
from fastness.server.sqs import signatures
from fastness.server.sqs.authentication import SqsAnonymous, SqsAuthenticator, UsedSignatures
from fastness.server.sqs.caller import SqsCaller
from fastness.server.sqs.errors import SqsError
from fastness.server.sqs.options import SqsOptions
from fastness.server.sqs.signatures import Signature
from fastness.server.tokens import TokenAuthenticator
from fastness.testing.clock import ManualClock
from fastness.wire.queues import PutMessages
from fastness.wire.tokens import NewToken, access_key_id, token_id_of

URL = "http://127.0.0.1:9324/"
REGION = "us-east-1"
EMPTY = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
SEND = b'{"QueueUrl": "http://127.0.0.1:9324/000000000000/orders", "MessageBody": "1"}'


class Endpoint:
    """An authenticator over a plane in memory, with one access key, and a signer whose clock can differ."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self.skew_seconds = 0
        self.services = Services(MemoryDatabase(clock=clock), clock=clock, access_keys=MemorySecrets())
        self.transport = AsyncEmbeddedTransport(self.services)
        self.known = TokenAuthenticator(self.transport)
        self.options = SqsOptions(enabled=True)
        self.authenticator = SqsAuthenticator(ServerContext(self.transport), self.options, self.known)
        self.tokens = AsyncTokens(self.transport)

    async def create(self, **options: Any) -> NewToken:
        given = {"universes": "shop", "verbs": "queue:*", "sqs": True, **options}
        made = await self.tokens.create("ci", **given)
        await self.known._load()
        return made

    def now(self) -> datetime:
        return datetime.fromtimestamp(self.clock.now_ms() / 1_000 + self.skew_seconds, UTC)

    def sign(self, made: NewToken, request: AWSRequest, *, region: str = REGION, service: str = "sqs") -> AWSRequest:
        SigV4Auth(credentials(made), service, region).add_auth(request)
        return request

    def presign(self, made: NewToken, request: AWSRequest, *, expires: int = 60) -> AWSRequest:
        if request.data:
            request.data = dict(parse_qsl(request.data.decode()))  # botocore moves fields into the query.
        SigV4QueryAuth(credentials(made), "sqs", REGION, expires=expires).add_auth(request)
        return request

    def accept(self, request: AWSRequest, *, body: bytes | None = None, **headers: str | None) -> SqsCaller:
        """Authenticate what a client would send, with some headers replaced, or removed if they are None."""
        parts = urlsplit(request.url)
        sent = {"host": parts.netloc, **{name.lower(): text(value) for name, value in request.headers.items()}}
        for name, value in headers.items():
            sent[name.replace("_", "-")] = value or ""
            if value is None:
                del sent[name.replace("_", "-")]
        raw = [(name.encode(), value.encode("latin-1")) for name, value in sent.items()]
        given = (
            (request.data.encode() if isinstance(request.data, str) else request.data or b"") if body is None else body
        )
        return self.authenticator.authenticate(
            request.method, parts.path, parts.query, Headers(raw=raw), given, client="10.0.0.9", base_url="http://x"
        )


def text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def credentials(made: NewToken) -> Credentials:
    return Credentials(made.info.access_key_id, made.secret_access_key)


def send(**headers: str) -> AWSRequest:
    given = {"X-Amz-Target": "AmazonSQS.SendMessage", "Content-Type": "application/x-amz-json-1.0", **headers}
    return AWSRequest("POST", URL, headers=given, data=SEND)


def query(action: str = "SendMessage", **fields: str) -> AWSRequest:
    pairs = {"Action": action, "Version": "2012-11-05", **fields}
    body = "&".join(f"{name}={value}" for name, value in pairs.items())
    given = {"Content-Type": "application/x-www-form-urlencoded; charset=utf-8"}
    return AWSRequest("POST", URL, headers=given, data=body.encode())


@pytest.fixture
async def endpoint(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Endpoint]:
    clock = ManualClock()
    found = Endpoint(clock)
    monkeypatch.setattr(botocore.auth, "get_current_datetime", found.now)
    monkeypatch.setattr(logging.getLogger("fastness.refusals"), "filters", [])
    await found.known.start()
    yield found
    await found.known.stop()
    await found.transport.close()


def refused(code: str, match: str | None = None) -> Any:
    return pytest.raises(SqsError, match=match, check=lambda error: error.query_code == code)


# AWS's own test suite.

VECTORS = [
    ("GET", "/", "", {}, b"", "5fa00fa31553b73ebf1942676e86291e8372ff2a2260956d9b8aae1d763fbf31"),
    ("POST", "/", "", {}, b"", "5da7c1a2acd57cee7505fc6676e4e544621c30862966e37dddb68e92efbe5d6b"),
    ("GET", "/example/..", "", {}, b"", "5fa00fa31553b73ebf1942676e86291e8372ff2a2260956d9b8aae1d763fbf31"),
    ("GET", "//", "", {}, b"", "5fa00fa31553b73ebf1942676e86291e8372ff2a2260956d9b8aae1d763fbf31"),
    ("GET", "/./", "", {}, b"", "5fa00fa31553b73ebf1942676e86291e8372ff2a2260956d9b8aae1d763fbf31"),
    ("GET", "/ሴ", "", {}, b"", "8318018e0b0f223aa2bbf98705b62bb787dc9c0e678f255a891fd03141be5d85"),
    (
        "GET",
        "/",
        "Param2=value2&Param1=value1",
        {},
        b"",
        "b97d918cfa904a5beff61c982a1b6f458b799221646efd99d3219ec94cdf2500",
    ),
    ("GET", "/", "ሴ=bar", {}, b"", "2cdec8eed098649ff3a119c94853b13c643bcf08f8b0a1d91e12c9027818dd04"),
    (
        "GET",
        "/",
        "Param-3=Value3&Param=Value2&%E1%88%B4=Value1",
        {},
        b"",
        "371d3713e185cc334048618a97f809c9ffe339c62934c032af5a0e595648fcac",
    ),
    ("POST", "/", "Param1=value1", {}, b"", "28038455d6de14eafc1f9222cf5aa6f1a96197d7deb8263271d420d138af7f11"),
    (
        "GET",
        "/",
        "",
        {"my-header1": " value1", "my-header2": ' "a   b   c"'},
        b"",
        "acc3ed3afb60bb290fc8d2dd0098b9911fcaa05412b367055dee359757a9c736",
    ),
    (
        "POST",
        "/",
        "",
        {"my-header1": "value1"},
        b"",
        "c5410059b04c1ee005303aed430f6e6645f61f4dc9e1461ec8f8916fdf18852c",
    ),
    (
        "POST",
        "/",
        "",
        {"content-type": "application/x-www-form-urlencoded"},
        b"Param1=value1",
        "ff11897932ad3f4e8b18135d722051e5ac45fc38421b1da7b9d196a0fe09473a",
    ),
]


@pytest.mark.parametrize("vector", VECTORS)
def test_signatures_are_those_of_the_test_suite_of_aws(
    vector: tuple[str, str, str, dict[str, str], bytes, str],
) -> None:
    method, path, query_string, headers, body, expected = vector
    sent = {"host": "example.amazonaws.com", "x-amz-date": "20150830T123600Z", **headers}
    pairs = signatures.decoded_query(query_string)
    names = tuple(sorted(sent))
    digest = sha256(body).hexdigest()
    canonical = signatures.canonical_request(method, path, pairs, sent, signed=names, body_hash=digest)
    signature = Signature(
        access_key="AKIDEXAMPLE",
        day="20150830",
        region="us-east-1",
        service="service",
        timestamp="20150830T123600Z",
        signed_seconds=1_440_938_160,
        signed_headers=names,
        value=expected,
    )
    secret = "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"
    key = signatures.signing_key(secret, "20150830", "us-east-1", "service")
    assert signatures.sign(key, signatures.string_to_sign(signature, canonical)) == expected


# botocore's signatures.


async def test_caller_is_the_holder_of_the_access_key(endpoint: Endpoint) -> None:
    made = await endpoint.create(queues="orders*")
    caller = endpoint.accept(endpoint.sign(made, send()))
    assert (caller.universe, caller.region, caller.client) == ("shop", REGION, "10.0.0.9")
    assert (caller.authorizer.token_id, caller.authorizer.holder, caller.authorizer.entry) == (
        made.info.id,
        "ci",
        "sqs",
    )
    caller.authorizer.authorize(PutMessages("orders", [], "shop"))
    with pytest.raises(NotAllowed, match="the queue payments"):
        caller.authorizer.authorize(PutMessages("payments", [], "shop"))
    with pytest.raises(NotAllowed, match="main"):
        caller.authorizer.authorize(PutMessages("orders", [], "main"))


@pytest.mark.parametrize(
    "path", ["", "000000000000/orders", "000000000000/a%20b", "sqs/", "000000000000/%E1%88%B4.fifo", "a//b/../c/"]
)
async def test_paths_are_signed_as_they_are_sent(endpoint: Endpoint, path: str) -> None:
    made = await endpoint.create()
    request = AWSRequest("POST", URL + path, headers={"Content-Type": "text/plain"}, data=b"Action=X")
    endpoint.accept(endpoint.sign(made, request))


@pytest.mark.parametrize(
    "query_string", ["a=1&b=2", "b=2&a=1", "a=%2F%3D%26&%E1%88%B4=x", "flag=&x=a%20b", "Z=1&a=2&A=3", "a-b=1&a=2&a.b=3"]
)
async def test_queries_are_signed_in_any_order(endpoint: Endpoint, query_string: str) -> None:
    made = await endpoint.create()
    request = AWSRequest("GET", f"{URL}?{query_string}")
    endpoint.accept(endpoint.sign(made, request))
    later = endpoint.sign(made, AWSRequest("GET", f"{URL}?{query_string}", headers={"X-Amz-Extra": "1"}))
    later.url += "&more=1"
    with refused("SignatureDoesNotMatch"):
        endpoint.accept(later)


async def test_headers_are_signed_without_superfluous_spaces(endpoint: Endpoint) -> None:
    made = await endpoint.create()
    endpoint.accept(endpoint.sign(made, send(**{"X-Amz-Meta": "  a   b  "})), x_amz_meta="a b")
    with refused("SignatureDoesNotMatch"):
        endpoint.accept(endpoint.sign(made, send(**{"X-Amz-Meta": "a b"})), x_amz_meta="ab")


@pytest.mark.parametrize(
    "change",
    [
        {"x_amz_target": "AmazonSQS.DeleteQueue"},
        {"content_type": "application/x-www-form-urlencoded"},
        {"host": "other:9324"},
        {"body": SEND.replace(b'"1"', b'"2"')},
        {"body": b""},
        {"x_amz_date": "20240229T000000Z"},
    ],
)
async def test_changed_request_is_refused(endpoint: Endpoint, change: dict[str, Any]) -> None:
    made = await endpoint.create()
    endpoint.clock.jump_to_ms(1_709_164_800_000 + 60_000)  # Another date within the allowed time, of the same day.
    with refused("SignatureDoesNotMatch"):
        endpoint.accept(endpoint.sign(made, send()), **change)


async def test_wrong_secret_region_service_and_method_are_refused(endpoint: Endpoint) -> None:
    made, other = await endpoint.create(), await endpoint.create()
    mixed = NewToken(made.token, made.info, other.secret_access_key)
    with refused("SignatureDoesNotMatch", "check the secret"):
        endpoint.accept(endpoint.sign(mixed, send()))
    with refused("SignatureDoesNotMatch", "'eu-west-1'; use 'us-east-1'"):
        endpoint.accept(endpoint.sign(made, send(), region="eu-west-1"))
    with refused("SignatureDoesNotMatch", "'s3'; it must be 'sqs'"):
        endpoint.accept(endpoint.sign(made, send(), service="s3"))
    request = endpoint.sign(made, send())
    request.method = "PUT"
    with refused("SignatureDoesNotMatch"):
        endpoint.accept(request)


async def test_what_decides_the_meaning_of_a_request_must_be_signed(endpoint: Endpoint) -> None:
    made = await endpoint.create()
    for name, value in (
        ("x_amz_target", "AmazonSQS.DeleteQueue"),
        ("content_type", "application/x-www-form-urlencoded"),
    ):
        request = send()
        del request.headers[name.replace("_", "-")]
        unsigned: dict[str, Any] = {name: value}
        with refused("IncompleteSignature", f"{name.replace('_', '-')} is not signed"):
            endpoint.accept(endpoint.sign(made, request), **unsigned)
    request = endpoint.presign(made, AWSRequest("GET", f"{URL}?Action=ListQueues"))
    with refused("IncompleteSignature", "x-amz-target is not signed"):
        endpoint.accept(request, x_amz_target="AmazonSQS.DeleteQueue")
    request = endpoint.sign(made, send())
    signed = request.headers["Authorization"].replace("host;", "")
    with refused("IncompleteSignature", "host is not signed"):
        endpoint.accept(request, authorization=signed)
    with refused("IncompleteSignature", "x-amz-date"):
        endpoint.accept(request, authorization=request.headers["Authorization"].replace(";x-amz-date", ""))


async def test_repeated_headers_and_parameters_are_refused(endpoint: Endpoint) -> None:
    made = await endpoint.create()
    request = endpoint.sign(made, send())
    raw = [("host", "127.0.0.1:9324"), *request.headers.items(), ("X-Amz-Target", "AmazonSQS.DeleteQueue")]
    headers = Headers(raw=[(name.lower().encode(), text(value).encode()) for name, value in raw])
    with refused("IncompleteSignature", "'x-amz-target' is repeated"):
        endpoint.authenticator.authenticate("POST", "/", "", headers, SEND, client="", base_url="")
    request = endpoint.presign(made, AWSRequest("GET", f"{URL}?Action=ListQueues"))
    request.url += "&Action=DeleteQueue"
    with refused("IncompleteSignature", "twice"):
        endpoint.accept(request)


async def test_body_must_be_signed_and_plain(endpoint: Endpoint) -> None:
    made = await endpoint.create()
    for declared in ("UNSIGNED-PAYLOAD", "STREAMING-AWS4-HMAC-SHA256-PAYLOAD", EMPTY):
        with refused("SignatureDoesNotMatch", "not the SHA-256 of the body"):
            endpoint.accept(endpoint.sign(made, send(**{"X-Amz-Content-SHA256": declared})))
    digest = sha256(SEND).hexdigest()
    endpoint.accept(endpoint.sign(made, send(**{"X-Amz-Content-SHA256": digest})))
    with refused("InvalidHttpRequest", "Content-Encoding"):
        endpoint.accept(endpoint.sign(made, send(**{"Content-Encoding": "gzip"})))
    with refused("InvalidHttpRequest", "Content-Encoding"):
        endpoint.accept(endpoint.sign(made, send()), content_encoding="aws-chunked")


async def test_session_tokens_are_refused(endpoint: Endpoint) -> None:
    made = await endpoint.create()
    request = send()
    SigV4Auth(Credentials(made.info.access_key_id, made.secret_access_key, "session"), "sqs", REGION).add_auth(request)
    with refused("InvalidClientTokenId", "unset AWS_SESSION_TOKEN"):
        endpoint.accept(request)


@pytest.mark.parametrize(
    ("authorization", "code"),
    [
        (None, "MissingAuthenticationToken"),
        ("", "IncompleteSignature"),
        ("Bearer fnt_1_2", "IncompleteSignature"),
        ("AWS4-HMAC-SHA256", "IncompleteSignature"),
        ("AWS4-ECDSA-P256-SHA256 Credential=a, SignedHeaders=b, Signature=c", "IncompleteSignature"),
        ("AWS4-HMAC-SHA256 Credential=a/b, SignedHeaders=host, Signature=c", "IncompleteSignature"),
        ("AWS4-HMAC-SHA256 Credential=a, Credential=b, SignedHeaders=host, Signature=c", "IncompleteSignature"),
    ],
)
async def test_unusable_authorization_is_refused(endpoint: Endpoint, authorization: str | None, code: str) -> None:
    made = await endpoint.create()
    with refused(code):
        endpoint.accept(endpoint.sign(made, send()), authorization=authorization)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("/aws4_request", "/aws4_other"),
        ("SignedHeaders=content-type;host", "SignedHeaders=host;content-type"),
        ("SignedHeaders=content-type;host", "SignedHeaders=Content-Type;host"),
        ("SignedHeaders=content-type;host", "SignedHeaders=;content-type;host"),
        ("SignedHeaders=content-type;host", "SignedHeaders=content-type;host;hosts"),
        ("Signature=", "Signature=0"),
        ("Signature=", "Signatur="),
    ],
)
async def test_malformed_parts_are_refused(endpoint: Endpoint, old: str, new: str) -> None:
    made = await endpoint.create()
    request = endpoint.sign(made, send())
    changed = request.headers["Authorization"].replace(old, new)
    assert changed != request.headers["Authorization"]
    with refused("IncompleteSignature"):
        endpoint.accept(request, authorization=changed)


async def test_two_signatures_are_refused(endpoint: Endpoint) -> None:
    made = await endpoint.create()
    presigned = endpoint.presign(made, AWSRequest("GET", f"{URL}?Action=ListQueues"))
    with refused("IncompleteSignature", "send one"):
        endpoint.accept(presigned, authorization=endpoint.sign(made, send()).headers["Authorization"])


# Keys.


async def test_unknown_revoked_and_expired_keys_are_refused(endpoint: Endpoint) -> None:
    plain = await endpoint.tokens.create("plain", universes="shop", verbs="*")
    await endpoint.known._load()
    without = NewToken(plain.token, plain.info, "x" * 40)
    for id in (access_key_id("0" * 32), access_key_id(plain.info.id), "AKIDEXAMPLE", ""):
        request = send()
        SigV4Auth(Credentials(id, without.secret_access_key), "sqs", REGION).add_auth(request)
        with refused("InvalidClientTokenId"):
            endpoint.accept(request)
    made = await endpoint.create(ttl_seconds=10)
    endpoint.clock.advance_ms(9_999)
    endpoint.accept(endpoint.sign(made, send()))
    endpoint.clock.advance_ms(1)
    with refused("InvalidClientTokenId", "revoked or expired"):
        endpoint.accept(endpoint.sign(made, send()))
    made = await endpoint.create()
    endpoint.accept(endpoint.sign(made, send()))
    await endpoint.tokens.revoke(made.info.id)
    await endpoint.known._load()
    with refused("InvalidClientTokenId"):
        endpoint.accept(endpoint.sign(made, send()))
    stored = await endpoint.services.database.read_async(layer.find, made.info.id)
    assert stored is not None
    assert stored.access_key == b"", "the secret of a revoked key is not kept"


async def test_caller_that_was_authenticated_is_refused_after_the_revocation(endpoint: Endpoint) -> None:
    made = await endpoint.create()
    caller = endpoint.accept(endpoint.sign(made, send()))
    await endpoint.tokens.revoke(made.info.id)
    await endpoint.known._load()
    with pytest.raises(NotAllowed, match="revoked"):
        caller.authorizer.authorize(PutMessages("orders", [], "shop"))


async def test_access_key_is_for_one_universe(endpoint: Endpoint) -> None:
    for universes in ("*", "a,b"):
        with pytest.raises(InvalidArgument, match="for one universe"):
            await endpoint.create(universes=universes)


def test_access_key_id_names_its_token() -> None:
    id = "0198f2a7c3d94e5f8a1b2c3d4e5f6a7b"
    assert token_id_of(access_key_id(id)) == id
    assert access_key_id(id) == "FN0198F2A7C3D94E5F8A1B2C3D4E5F6A7B"
    for other in ("", "FN", access_key_id(id) + "0", access_key_id(id).lower(), f"FN{'G' * 32}"):
        assert token_id_of(other) is None


# Dates.


@pytest.mark.parametrize("sign", [1, -1])
async def test_clocks_may_differ_by_fifteen_minutes(endpoint: Endpoint, sign: int) -> None:
    made = await endpoint.create()
    endpoint.skew_seconds = sign * SQS_CLOCK_SKEW_SECONDS
    endpoint.accept(endpoint.sign(made, send()))
    endpoint.skew_seconds += sign
    with refused("RequestExpired", "15 minutes"):
        endpoint.accept(endpoint.sign(made, send()))


async def test_date_must_be_one_and_of_the_day_of_the_credential(endpoint: Endpoint) -> None:
    made = await endpoint.create()
    for date in ("20241345T000000Z", "2024-02-29T00:00:00Z", "Thu, 29 Feb 2024 00:00:00 GMT", "19700102T000000Z", ""):
        with refused("IncompleteSignature"):
            endpoint.accept(endpoint.sign(made, send()), x_amz_date=date)


# Presigned URLs.


async def test_presigned_url_is_accepted_until_it_expires(endpoint: Endpoint) -> None:
    made = await endpoint.create()
    request = endpoint.presign(made, query(MessageBody="a%20b"), expires=60)
    assert request.data == ""
    request.method = "POST"
    assert endpoint.accept(request).universe == "shop"
    endpoint.clock.advance_ms(59_999)
    endpoint.accept(request)
    endpoint.clock.advance_ms(1)
    with refused("RequestExpired", "has expired"):
        endpoint.accept(request)


async def test_presigned_url_cannot_be_changed(endpoint: Endpoint) -> None:
    made = await endpoint.create()
    request = endpoint.presign(made, query(MessageBody="a%20b"), expires=60)
    with refused("SignatureDoesNotMatch"):
        endpoint.accept(request, body=b"Action=DeleteQueue")
    url = request.url
    for old, new in (("SendMessage", "DeleteQueue"), ("Expires=60", "Expires=61"), ("&Version=2012-11-05", "")):
        request.url = url.replace(old, new)
        assert request.url != url
        with refused("SignatureDoesNotMatch"):
            endpoint.accept(request)
    request.url = url.replace("a%20b", "a+b")  # The same parameters, written in another way.
    endpoint.accept(request)
    request.url = url.replace("a%20b", "a%2Bb")
    with refused("SignatureDoesNotMatch"):
        endpoint.accept(request)


@pytest.mark.parametrize("expires", [0, SQS_PRESIGNED_SECONDS_MAX + 1])
async def test_presigned_url_has_a_bounded_life(endpoint: Endpoint, expires: int) -> None:
    made = await endpoint.create()
    endpoint.accept(endpoint.presign(made, query("ListQueues"), expires=SQS_PRESIGNED_SECONDS_MAX))
    with refused("IncompleteSignature", "X-Amz-Expires"):
        endpoint.accept(endpoint.presign(made, query("ListQueues"), expires=expires))


async def test_presigned_url_of_the_future_is_refused(endpoint: Endpoint) -> None:
    made = await endpoint.create()
    endpoint.skew_seconds = SQS_CLOCK_SKEW_SECONDS + 1
    with refused("RequestExpired", "ahead"):
        endpoint.accept(endpoint.presign(made, query("ListQueues")))


# Replays.


@pytest.mark.parametrize("make", [send, query])
async def test_request_is_accepted_once(endpoint: Endpoint, make: Any) -> None:
    made = await endpoint.create()
    request = make()
    request.headers["amz-sdk-invocation-id"] = "4b1e"
    endpoint.sign(made, request)
    endpoint.accept(request)
    for seconds in (0, 1, SQS_CLOCK_SKEW_SECONDS - 1):
        endpoint.clock.advance_ms(seconds * 1_000)
        with refused("RequestThrottled", "used before"):
            endpoint.accept(request)
    endpoint.clock.advance_ms(1_000)
    with refused("RequestExpired"):
        endpoint.accept(request)
    endpoint.accept(endpoint.sign(made, make()))


async def test_retry_of_an_sdk_is_a_new_request(endpoint: Endpoint) -> None:
    made = await endpoint.create()
    for attempt in (1, 2, 3):  # In the same second.
        retry = {"amz-sdk-invocation-id": "4b1e", "amz-sdk-request": f"attempt={attempt}; max=5"}
        endpoint.accept(endpoint.sign(made, send(**retry)))


async def test_refused_request_does_not_use_up_its_signature(endpoint: Endpoint) -> None:
    made = await endpoint.create()
    request = endpoint.sign(made, send())
    with refused("SignatureDoesNotMatch"):
        endpoint.accept(request, body=b"{}")
    endpoint.accept(request)


@pytest.mark.parametrize("action", ["GetQueueAttributes", "ListQueues"])
async def test_reads_may_be_repeated(endpoint: Endpoint, action: str) -> None:
    made = await endpoint.create()
    for request in (send(**{"X-Amz-Target": f"AmazonSQS.{action}"}), query(action)):
        endpoint.sign(made, request)
        endpoint.accept(request)
        endpoint.clock.advance_ms(60_000)
        endpoint.accept(request)


@pytest.mark.parametrize("clock_seconds", [0, 600], ids=["right clock", "slow clock"])
async def test_equal_calls_of_a_second_are_accepted_for_a_few_seconds(endpoint: Endpoint, clock_seconds: int) -> None:
    """Nothing distinguishes their signatures, unless the SDK signs an id of the call."""
    made = await endpoint.create()
    for request in (send(), query("SendMessage"), query("ReceiveMessage")):
        endpoint.sign(made, request)
        endpoint.clock.advance_ms(clock_seconds * 1_000)
        endpoint.accept(request)
        endpoint.accept(request)
        endpoint.clock.advance_ms(SQS_SAME_SIGNATURE_SECONDS * 1_000)
        endpoint.accept(request)
        endpoint.clock.advance_ms(1_000)
        with refused("RequestThrottled"):
            endpoint.accept(request)


async def test_unclear_action_counts_as_a_write(endpoint: Endpoint) -> None:
    made = await endpoint.create()
    for request in (
        query("ListQueues", x="1&Action=SendMessage"),
        AWSRequest("POST", f"{URL}?Action=ListQueues", headers={"Content-Type": "a/b"}, data=b"Action=SendMessage"),
        AWSRequest("POST", f"{URL}?Action=ListQueues", headers={"X-Amz-Target": "AmazonSQS.ListQueues"}, data=b""),
        query("List%51ueues"),
        send(**{"X-Amz-Target": "Other.ListQueues"}),
    ):
        endpoint.sign(made, request)
        endpoint.accept(request)
        endpoint.clock.advance_ms((SQS_SAME_SIGNATURE_SECONDS + 1) * 1_000)
        with refused("RequestThrottled"):
            endpoint.accept(request)


def used(second: int, number: int, *, access_key: str = "FN") -> Signature:
    return Signature(
        access_key=access_key,
        day="20240229",
        region=REGION,
        service="sqs",
        timestamp=f"of {second}",
        signed_seconds=second,
        signed_headers=("amz-sdk-invocation-id", "host"),
        value=f"{number:064x}"[::-1],
    )


def test_memory_of_signatures_is_bounded_and_refuses_what_it_has_forgotten() -> None:
    memory = UsedSignatures(signatures_max=4)
    for second in (100, 101, 102):
        for number in (1, 2):
            memory.check(used(second, number), "SendMessage", now_seconds=102)
    assert len(memory) == 4
    for second in (99, 100):
        with refused("RequestExpired", "sign it again"):
            memory.check(used(second, 3), "SendMessage", now_seconds=102)
    with refused("RequestThrottled"):
        memory.check(used(101, 2), "SendMessage", now_seconds=102)
    memory.check(used(102 + SQS_CLOCK_SKEW_SECONDS, 1), "SendMessage", now_seconds=102 + SQS_CLOCK_SKEW_SECONDS)
    assert len(memory) == 3, "those of the second 101 are refused by their date now"


def test_one_access_key_does_not_shut_out_others_with_dates_ahead_of_the_clock() -> None:
    memory, now = UsedSignatures(signatures_max=100, per_key_max=40), 1_000_000
    memory.check(used(now, 1, access_key="honest"), "SendMessage", now_seconds=now)
    for key in ("one", "two", "three"):
        for number in range(200):
            second = now + SQS_CLOCK_SKEW_SECONDS - number % 7
            with suppress(SqsError):
                memory.check(used(second, number, access_key=key), "SendMessage", now_seconds=now)
        assert len(memory) <= 100
    memory.check(used(now, 2, access_key="honest"), "SendMessage", now_seconds=now)
    with refused("RequestThrottled"):  # It is still known.
        memory.check(used(now, 1, access_key="honest"), "SendMessage", now_seconds=now)
    with refused("RequestExpired"):
        memory.check(used(now, 1, access_key="one"), "SendMessage", now_seconds=now)


def test_the_memory_of_an_access_key_ends_with_its_signatures() -> None:
    memory = UsedSignatures(signatures_max=4, per_key_max=2)
    for number in range(3):
        memory.check(used(100 + number, number), "SendMessage", now_seconds=100)
    later = 103 + SQS_CLOCK_SKEW_SECONDS
    memory.check(used(later, 1, access_key="other"), "SendMessage", now_seconds=later)
    assert len(memory) == 1
    memory.check(used(later, 1), "SendMessage", now_seconds=later)
    assert len(memory) == 2


# Secrets.


async def test_no_secret_is_logged_or_stored(endpoint: Endpoint, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    made = await endpoint.create()
    endpoint.accept(endpoint.sign(made, send()))
    with refused("SignatureDoesNotMatch") as caught:
        endpoint.accept(endpoint.sign(made, send()), body=b"{}")
    secret = made.secret_access_key
    ours = [record for record in caplog.records if record.name.startswith("fastness")]
    assert ours
    assert secret not in "".join(record.getMessage() + repr(record.__dict__) for record in ours)
    assert secret not in caught.value.message
    assert secret not in repr(made)
    stored = await endpoint.services.database.read_async(lambda tx: list(tx.scan(b"", b"\xff" * 8, limit=10_000)))
    assert not any(secret.encode() in value for _, value in stored)
    page = await endpoint.tokens.page()
    assert secret not in repr(page)
    assert [each.access_key_id for each in page.tokens] == [made.info.access_key_id]


async def test_server_with_another_key_file_does_not_start(endpoint: Endpoint) -> None:
    made = await endpoint.create()
    endpoint.services.access_keys = MemorySecrets()
    known = TokenAuthenticator(endpoint.transport)
    SqsAuthenticator(ServerContext(endpoint.transport), endpoint.options, known)
    with pytest.raises(EncryptionKeyMissing, match=made.info.id):
        await known.start()


async def test_key_that_cannot_be_decrypted_later_is_refused(
    endpoint: Endpoint, caplog: pytest.LogCaptureFixture
) -> None:
    made = await endpoint.create()
    endpoint.services.access_keys = NoSecrets()
    with refused("InternalFailure", "cannot decrypt"):
        endpoint.accept(endpoint.sign(made, send()))
    assert "--sqs-key-file" in caplog.text


def test_key_file_is_made_for_its_owner_only(tmp_path: Any) -> None:
    secrets = secrets_of(f"dir:{tmp_path}", None)
    secrets.prepare(has_access_keys=False)
    path = tmp_path / "sqs.key"
    assert path.stat().st_mode & 0o777 == 0o600
    assert [each.name for each in tmp_path.iterdir()] == ["sqs.key"]
    encrypted = secrets.encrypt("s" * 40, binding="a")
    assert b"ssss" not in encrypted
    before = path.read_text()
    secrets.prepare(has_access_keys=True)
    assert path.read_text() == before
    assert secrets_of(f"dir:{tmp_path}", None).decrypt(encrypted, binding="a") == "s" * 40
    with pytest.raises(EncryptionKeyMissing, match="revoke its token"):
        secrets.decrypt(encrypted, binding="b")


def test_missing_wrong_and_unreadable_key_files_say_what_to_do(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FASTNESS_SQS_KEY_FILE", raising=False)
    path = tmp_path / "sqs.key"
    secrets = secrets_of(f"dir:{tmp_path}", None)
    with pytest.raises(EncryptionKeyMissing, match="restore the file"):
        secrets.prepare(has_access_keys=True)
    assert not path.exists(), "a new key would hide that the right one is missing"
    secrets.prepare(has_access_keys=False)
    encrypted = secrets.encrypt("s" * 40, binding="a")
    path.unlink()
    secrets.prepare(has_access_keys=False)
    with pytest.raises(EncryptionKeyMissing, match="name the file that it was created with by --sqs-key-file"):
        secrets.decrypt(encrypted, binding="a")
    path.write_text("this is no key\n")
    with pytest.raises(InvalidArgument, match="not NAME BASE64"):
        secrets.prepare(has_access_keys=False)
    with pytest.raises(EncryptionKeyMissing, match="new-key` prints"):
        secrets_of("postgresql://db/fastness", str(tmp_path / "none")).prepare(has_access_keys=False)
    assert not (tmp_path / "none").exists()
    with pytest.raises(EncryptionKeyMissing, match="the same on every node"):
        secrets_of("postgresql://db/fastness", None).prepare(has_access_keys=False)


def test_key_file_can_be_rotated(tmp_path: Any) -> None:
    from fastness.encryption_keys import new_master_key

    secrets = FileSecrets(tmp_path / "keys", may_create=True)
    secrets.prepare(has_access_keys=False)
    first = secrets.encrypt("s" * 40, binding="a")
    with (tmp_path / "keys").open("a") as file:
        file.write(new_master_key("sqs-2") + "\n")
    second = secrets.encrypt("t" * 40, binding="a")
    assert [secrets.decrypt(each, binding="a") for each in (first, second)] == ["s" * 40, "t" * 40]
    lines = (tmp_path / "keys").read_text().splitlines()
    (tmp_path / "keys").write_text(lines[1] + "\n")
    assert secrets.decrypt(second, binding="a") == "t" * 40
    with pytest.raises(EncryptionKeyMissing):
        secrets.decrypt(first, binding="a")


# Without signatures.


async def test_anonymous_endpoint_admits_programs_and_no_web_pages(endpoint: Endpoint) -> None:
    options = SqsOptions(enabled=True, anonymous=True, universe="shop")
    anonymous = SqsAnonymous(ServerContext(endpoint.transport), options)

    def call(**headers: str) -> SqsCaller:
        return anonymous.authenticate("POST", "/", "", headers, b"", client="127.0.0.1", base_url="http://x")

    caller = call(host="localhost:9324")
    assert (caller.universe, caller.authorizer.entry, caller.authorizer.holder) == ("shop", "sqs", None)
    assert call(host="127.0.0.1", authorization="AWS4-HMAC-SHA256 nonsense").universe == "shop"
    with refused("AccessDenied"):
        call(host="localhost", origin="https://evil.example")
    with refused("AccessDenied"):
        call(host="evil.example")
