"""The parts that the SQS endpoint is made of: an authenticator finds the caller, and actions answer its calls."""

from collections.abc import Mapping
from typing import Any, Final, Protocol

import msgspec

from fastness.server.authorization import Authorizer

ACCOUNT: Final = "000000000000"  # Universes take the place of accounts: every caller sees this one.


class SqsCaller(msgspec.Struct, frozen=True, kw_only=True):
    """The sender of one request, and what the URLs and ARNs of its queues begin with."""

    authorizer: Authorizer
    universe: str
    account: str = ACCOUNT
    client: str = ""  # The network address.
    base_url: str  # Of queue URLs, without a slash at the end: `http://127.0.0.1:9440/sqs`.
    region: str
    trace: str = ""  # The header X-Amzn-Trace-Id of the request.


class SqsAuthentication(Protocol):
    """Finds the caller that sent a request."""

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
        """The caller that signed the request.

        `path` and `query_string` are as they were sent, not decoded. `headers` ignores the case of names.
        `client` and `base_url` become those of the caller.

        Raises:
            SqsError: the signature is missing, wrong or expired, or its key is unknown.
        """
        ...


class Actions(Protocol):
    """Executes the actions of the SQS API."""

    async def call(self, caller: SqsCaller, action: str, parameters: dict[str, Any]) -> dict[str, Any]:
        """The output of an action: a dict with the names of the service model, blobs as bytes.

        `action` is one of `shapes.ACTIONS`. `parameters` has the names and types of the action's input, with all that
        is required. Absent members are missing, not None.

        Raises:
            SqsError: the answer is this error.
            FastnessError: the answer is the error that `errors.sqs_error` makes of it.
        """
        ...
