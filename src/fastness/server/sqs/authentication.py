"""Who sent an SQS request: the holder of an access key, found by its signature; or any local program.

An access key belongs to a token (`fastness token create NAME --sqs`), and allows what the token allows. Beyond a right
signature, a request must

- have the service `sqs` and the region of the server in its scope, and a date within 15 minutes of now;
- sign its host, its date, its content type if it has a body, and every `x-amz-` header: these decide what it means;
- have a body with the hash that is signed. `UNSIGNED-PAYLOAD`, streamed signatures and encoded bodies are refused;
- be new: a request that was intercepted cannot be sent again.

Most SDKs sign a random id with each call, and the number of the attempt with each retry. Such a signature is accepted
once. Other programs sign the date only, which has no fractions of a second, so two equal calls within a second have the
same signature: theirs is accepted again for `SQS_SAME_SIGNATURE_SECONDS` after its first use. Reads may be repeated. A
presigned URL may be used until it expires, which is its purpose.

The memory of signatures is one node's, and ends with its process. TLS is what keeps requests from being intercepted.
"""

import hmac
import logging
import re
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Final

from fastness.errors import EncryptionKeyMissing, NotAllowed
from fastness.limits import (
    SQS_CLOCK_SKEW_SECONDS,
    SQS_PRESIGNED_SECONDS_MAX,
    SQS_SAME_SIGNATURE_SECONDS,
    SQS_SIGNATURES_MAX,
    SQS_SIGNATURES_PER_KEY_MAX,
    SQS_SIGNING_KEYS_MAX,
)
from fastness.plane import tokens
from fastness.plane.tokens import Token
from fastness.server.context import ServerContext
from fastness.server.sqs import signatures
from fastness.server.sqs.caller import SqsCaller
from fastness.server.sqs.errors import SqsError
from fastness.server.sqs.options import SqsOptions
from fastness.server.sqs.signatures import Pairs, Signature
from fastness.server.tokens import Loopback, TokenAuthenticator
from fastness.wire.tokens import token_id_of

_log = logging.getLogger("fastness.sqs")

_SERVICE: Final = "sqs"
_READS: Final = frozenset(
    (
        "GetQueueAttributes",
        "GetQueueUrl",
        "ListDeadLetterSourceQueues",
        "ListMessageMoveTasks",
        "ListQueueTags",
        "ListQueues",
    )
)
_CALL_ID: Final = "amz-sdk-invocation-id"  # AWS SDKs send it with every call, and some of them sign it.
_TRACE_ID: Final = "x-amzn-trace-id"  # SDKs do not sign it, because proxies change it.
_TARGET: Final = "AmazonSQS."
_ACTION: Final = re.compile(rb"(?:^|&)Action=([A-Za-z]{1,64})(?=&|$)")
_ENCODINGS: Final = frozenset(("", "identity"))


class SqsAuthenticator:
    """Finds the token whose access key has signed a request."""

    def __init__(self, context: ServerContext, options: SqsOptions, known: TokenAuthenticator) -> None:
        """`known` has the tokens. It need not be started yet; if it finds access keys that this server cannot decrypt,
        its start fails.
        """
        self._services = context.transport.services
        self._region = options.region
        self._known = known
        self._keys: dict[tuple[str, str], bytes] = {}  # Signing keys by token and day.
        self._used = UsedSignatures()
        known.on_start = self._check_access_keys

    def authenticate(
        self,
        method: str,
        path: str,
        query_string: str,
        headers: Mapping[str, str],
        body: bytes,
        *,
        client: str,
        base_url: str,
    ) -> SqsCaller:
        """The holder of the access key that signed the request.

        Raises:
            SqsError: the request is not signed as it must be, is too old, or was sent before.
        """
        access_key = "-"
        try:
            pairs = signatures.decoded_query(query_string)
            signature = signatures.read_signature(pairs, headers)
            access_key = signature.access_key
            now_seconds = self._known.now_ms() // 1_000
            self._check_scope(signature)
            _check_time(signature, now_seconds)
            body_hash = sha256(body).hexdigest()
            _check_signed(signature, headers, body, body_hash)
            token = self._token(access_key)
            canonical = signatures.canonical_request(
                method, path, pairs, headers, signed=signature.signed_headers, body_hash=body_hash
            )
            text = signatures.string_to_sign(signature, canonical)
            # Constant time: the duration must not reveal how much of a guess was right.
            if not hmac.compare_digest(signatures.sign(self._key(token, signature), text), signature.value):
                raise SqsError(
                    "SignatureDoesNotMatch",
                    "The signature does not match; check the secret access key, and that no proxy changes the path, "
                    "the host or other signed headers",
                )
            if signature.expires_seconds is None:
                self._used.check(signature, _action(pairs, headers, body), now_seconds)
        except SqsError as error:
            self._known.report_signature(error.query_code, error.message, access_key[:128], client)
            raise
        authorizer = self._known.authorizer_of(token.id, client)
        authorizer.entry = _SERVICE
        return SqsCaller(
            authorizer=authorizer,
            universe=token.universes[0],
            client=client,
            base_url=base_url,
            region=self._region,
            trace=headers.get(_TRACE_ID, ""),
        )

    def _check_scope(self, signature: Signature) -> None:
        if signature.service != _SERVICE:
            raise SqsError(
                "SignatureDoesNotMatch",
                f"The credential is scoped to the service {signature.service[:40]!r}; it must be {_SERVICE!r}",
            )
        if signature.region != self._region:
            raise SqsError(
                "SignatureDoesNotMatch",
                f"The credential is scoped to the region {signature.region[:40]!r}; use {self._region!r}, or serve "
                "with another --sqs-region",
            )

    def _token(self, access_key: str) -> Token:
        """The usable token of an access key. Callers are not told why another is refused: they may not hold it."""
        id = token_id_of(access_key)
        token = None if id is None else self._known.known_token(id)
        if token is None or not token.access_key or not token.usable_at(self._known.now_ms()):
            raise SqsError(
                "InvalidClientTokenId",
                "The access key is unknown, revoked or expired; create one with `fastness token create NAME --sqs`",
            )
        return token

    def _key(self, token: Token, signature: Signature) -> bytes:
        """The signing key of a token's access key on the day of a signature."""
        cached = self._keys.get((token.id, signature.day))
        if cached is not None:
            return cached
        try:
            secret = tokens.access_key_secret(self._services, token)
        except EncryptionKeyMissing as error:
            _log.error("the access key of the token %s cannot be used: %s", token.name, error)
            raise SqsError("InternalFailure", "The server cannot decrypt this access key; its log says why") from error
        if len(self._keys) >= SQS_SIGNING_KEYS_MAX:
            self._keys.clear()
        key = signatures.signing_key(secret, signature.day, self._region, _SERVICE)
        self._keys[token.id, signature.day] = key
        return key

    def _check_access_keys(self, found: Sequence[Token]) -> None:
        """Raise EncryptionKeyMissing if this server cannot decrypt the secret of a usable access key."""
        now_ms = self._known.now_ms()
        names, first = [], None
        for token in found:
            if token.access_key and token.usable_at(now_ms):
                try:
                    tokens.access_key_secret(self._services, token)
                except EncryptionKeyMissing as error:
                    names.append(f"{token.name} ({token.id})")
                    first = first or error
        if first is not None:
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            raise EncryptionKeyMissing(f"{first}. Tokens: {', '.join(names[:5])}{more}") from first


class SqsAnonymous:
    """Admits every program on this machine, whether its requests are signed or not; and no web pages of other sites."""

    def __init__(self, context: ServerContext, options: SqsOptions) -> None:
        self._loopback = Loopback(context.transport.services.quotas)
        self._universe = options.universe
        self._region = options.region

    def authenticate(
        self,
        method: str,
        path: str,
        query_string: str,
        headers: Mapping[str, str],
        body: bytes,
        *,
        client: str,
        base_url: str,
    ) -> SqsCaller:
        """A caller that may do everything.

        Raises:
            SqsError: a web page sent the request.
        """
        del method, path, query_string, body
        try:
            authorizer = self._loopback.authenticate(headers, client)
        except NotAllowed as error:
            raise SqsError("AccessDenied", str(error)) from error
        authorizer.entry = _SERVICE
        return SqsCaller(
            authorizer=authorizer,
            universe=self._universe,
            client=client,
            base_url=base_url,
            region=self._region,
            trace=headers.get(_TRACE_ID, ""),
        )


class UsedSignatures:
    """The signatures that were accepted and whose date may still be accepted.

    Dates have seconds, so two equal calls that a client makes within a second have the same signature, unless its SDK
    signs an id of the call. Without such an id, a signature is accepted again for a few seconds after its first use.

    If an access key has too many, those with its oldest date are forgotten, and from then on its signatures with this
    date or an older one are refused. If all keys together have too many, the key with the most is the one that forgets.
    So a caller can harm only itself, also with dates that are ahead of the clock.
    """

    def __init__(self, signatures_max: int = SQS_SIGNATURES_MAX, per_key_max: int = SQS_SIGNATURES_PER_KEY_MAX) -> None:
        self._keys: dict[str, _SignaturesOfKey] = {}
        self._keys_by_second: dict[int, set[str]] = {}  # By date: the access keys with signatures of it.
        self._count = 0
        self._max = signatures_max
        self._per_key_max = per_key_max
        self._cleaned_second = 0

    def check(self, signature: Signature, action: str | None, now_seconds: int) -> None:
        """Remember a signature.

        Raises:
            SqsError: RequestThrottled, if it was used before; RequestExpired, if that is not known any more.
        """
        if action in _READS:
            return
        self._forget_old(now_seconds)
        second = signature.signed_seconds
        known = self._keys.setdefault(signature.access_key, _SignaturesOfKey())
        if second <= known.forgotten_until:
            raise SqsError(
                "RequestExpired",
                f"The date {signature.timestamp} is too old while this access key has so many requests; sign it again, "
                "and check the clock",
            )
        used = known.by_second.setdefault(second, {})
        digest = bytes.fromhex(signature.value[:32])
        first = used.get(digest)
        if first is not None:
            if _CALL_ID not in signature.signed_headers and now_seconds - first <= SQS_SAME_SIGNATURE_SECONDS:
                return
            raise SqsError(
                "RequestThrottled",
                "This signature was used before, and a request is executed once; sign it again to repeat it",
            )
        used[digest] = now_seconds
        self._keys_by_second.setdefault(second, set()).add(signature.access_key)
        known.count += 1
        self._count += 1
        while known.count > self._per_key_max:
            self._forget_oldest(known)
        while self._count > self._max:
            self._forget_oldest(max(self._keys.values(), key=lambda each: each.count))

    def __len__(self) -> int:
        return self._count

    def _forget_oldest(self, known: "_SignaturesOfKey") -> None:
        known.forgotten_until = min(known.by_second)
        self._count -= known.forget(known.forgotten_until)

    def _forget_old(self, now_seconds: int) -> None:
        """Forget signatures that are refused by their date now."""
        if now_seconds == self._cleaned_second:
            return
        self._cleaned_second = now_seconds
        first_second = now_seconds - SQS_CLOCK_SKEW_SECONDS
        for second in [each for each in self._keys_by_second if each < first_second]:
            for key in self._keys_by_second.pop(second):
                self._count -= self._keys[key].forget(second)
        for key in [key for key, known in self._keys.items() if known.is_over(first_second)]:
            del self._keys[key]


class _SignaturesOfKey:
    """The signatures of one access key."""

    __slots__ = ("by_second", "count", "forgotten_until")

    def __init__(self) -> None:
        self.by_second: dict[int, dict[bytes, int]] = {}  # By date: signatures, and when they were first used.
        self.count = 0
        self.forgotten_until = -1  # The newest second whose signatures were forgotten for lack of space.

    def forget(self, second: int) -> int:
        """Forget the signatures with a date, if there are any; returns how many."""
        forgotten = len(self.by_second.pop(second, ()))
        self.count -= forgotten
        return forgotten

    def is_over(self, first_second: int) -> bool:
        """Whether there is nothing to know of it, because dates before `first_second` are refused."""
        return not self.by_second and self.forgotten_until < first_second


def _check_time(signature: Signature, now_seconds: int) -> None:
    signed, expires = signature.signed_seconds, signature.expires_seconds
    if expires is not None and not 1 <= expires <= SQS_PRESIGNED_SECONDS_MAX:
        raise SqsError(
            "IncompleteSignature", f"X-Amz-Expires is {expires}; give 1 to {SQS_PRESIGNED_SECONDS_MAX} seconds"
        )
    if signed > now_seconds + SQS_CLOCK_SKEW_SECONDS:
        raise SqsError(
            "RequestExpired",
            f"The date {signature.timestamp} is more than 15 minutes ahead of the server's clock; correct the clock",
        )
    if expires is None and signed < now_seconds - SQS_CLOCK_SKEW_SECONDS:
        raise SqsError(
            "RequestExpired",
            f"The date {signature.timestamp} is more than 15 minutes ago; sign the request again, or correct the clock",
        )
    if expires is not None and signed + expires <= now_seconds:
        raise SqsError("RequestExpired", "The presigned URL has expired; create another")


def _check_signed(signature: Signature, headers: Mapping[str, str], body: bytes, body_hash: str) -> None:
    """Check that everything is signed that decides what a request means."""
    names = {name.lower() for name in headers}
    signed = set(signature.signed_headers)
    needed = {"host"} | {name for name in names if name.startswith("x-amz-")}
    if body:
        # As another type, the text of a JSON message could be read as parameters of another action.
        needed |= names & {"content-type"}
    if signature.expires_seconds is None:
        needed.add("x-amz-date")
    missing = sorted(needed - signed)
    if missing:
        raise SqsError(
            "IncompleteSignature", f"The header {missing[0][:64]} is not signed; use an AWS SDK to sign the request"
        )
    if "x-amz-security-token" in names:
        raise SqsError(
            "InvalidClientTokenId", "Access keys of this server have no session token; unset AWS_SESSION_TOKEN"
        )
    declared = headers.get("x-amz-content-sha256", body_hash)
    if declared.lower() != body_hash:
        raise SqsError(
            "SignatureDoesNotMatch",
            "The header x-amz-content-sha256 is not the SHA-256 of the body; unsigned and streamed bodies are refused",
        )
    if headers.get("content-encoding", "").strip().lower() not in _ENCODINGS:
        raise SqsError("InvalidHttpRequest", "The body has a Content-Encoding; send it as it is")


def _action(pairs: Pairs, headers: Mapping[str, str], body: bytes) -> str | None:
    """The action that a signed request names; None if it is not clear, and the request counts as one that writes."""
    target = headers.get("x-amz-target")
    found = [value.decode("latin-1") for name, value in pairs if name == b"Action"]
    if target is not None:
        return target.removeprefix(_TARGET) if target.startswith(_TARGET) and not found else None
    found += [name.decode() for name in _ACTION.findall(body)]
    return found[0] if len(found) == 1 else None
