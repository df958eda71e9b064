"""Settings of the SQS endpoint."""

from typing import Final

import msgspec

from fastness.names import UNIVERSE

REGION: Final = "us-east-1"  # What most tools assume; it is part of signatures and ARNs only.


class SqsOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the SQS endpoint."""

    enabled: bool = False
    port: int | None = None  # Of its own, besides `/sqs` of the main port. 0: any free port.
    anonymous: bool = False  # Whether requests need no signature, on a loopback address.
    url: str | None = None  # The public URL that queue URLs begin with; default: what each client has called.
    region: str = REGION
    universe: str = UNIVERSE  # Of anonymous callers. An access key has its own.
    key_file: str | None = None  # The key that encrypts the secrets of access keys; default: beside the data.
