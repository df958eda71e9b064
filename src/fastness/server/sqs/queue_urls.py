"""Queue URLs and ARNs: the texts by which clients of SQS name queues.

    URL   {base url}/{account}/{queue}                  http://127.0.0.1:9440/sqs/000000000000/orders
    ARN   arn:aws:sqs:{region}:{account}:{queue}        arn:aws:sqs:us-east-1:000000000000:orders

Of a URL only the account and the name count. Its host is not looked at: clients reach a server by several names.
"""

from typing import Final
from urllib.parse import unquote, urlsplit

from fastness.errors import InvalidName
from fastness.names import checked_name
from fastness.server.sqs.caller import SqsCaller
from fastness.server.sqs.errors import QUEUE_DOES_NOT_EXIST, SqsError

_ARN_PARTS: Final = 6


def queue_url(caller: SqsCaller, queue: str) -> str:
    """The URL of a queue."""
    return f"{caller.base_url}/{caller.account}/{queue}"


def queue_at(caller: SqsCaller, url: str) -> str:
    """The name of the queue with this URL.

    Raises:
        SqsError: it is not the URL of a queue (InvalidAddress), or of a queue of another account (QueueDoesNotExist).
    """
    known = f"{caller.base_url}/{caller.account}/"
    if url.startswith(known):  # As this server made it: nearly every call.
        name = url[len(known) :]
    else:
        try:
            path = urlsplit(url).path
        except ValueError:
            path = ""
        parts = [unquote(part) for part in path.split("/") if part]
        name = parts[-1] if parts else ""
        if len(parts) > 1 and parts[-2] != caller.account:
            raise queue_does_not_exist()
    return _checked(name, url)


def queue_arn(caller: SqsCaller, queue: str) -> str:
    """The ARN of a queue."""
    return f"arn:aws:sqs:{caller.region}:{caller.account}:{queue}"


def queue_of_arn(caller: SqsCaller, parameter: str, arn: str) -> str:
    """The name of the queue with this ARN, which a call has in this parameter.

    Raises:
        SqsError: it is not the ARN of a queue, or of a queue of another account or region.
    """
    parts = arn.split(":")
    try:
        if len(parts) != _ARN_PARTS or parts[0] != "arn" or parts[2] != "sqs":
            raise ValueError
        name = checked_name("queue", parts[5])
    except (ValueError, InvalidName):
        raise SqsError(
            "InvalidParameterValue",
            f"You must use this format to specify the {parameter}: "
            "arn:<partition>:<service>:<region>:<account-id>:<resource-id>",
            hint=f"It is {arn[:200]!r}; an ARN is like {queue_arn(caller, 'orders')}",
        ) from None
    if parts[3] != caller.region or parts[4] != caller.account:
        raise resource_not_found(parameter, f"ARNs of this server begin with {queue_arn(caller, '')}")
    return name


def queue_does_not_exist() -> SqsError:
    """The error of a call that names an absent queue by its URL or its name."""
    return SqsError("QueueDoesNotExist", QUEUE_DOES_NOT_EXIST)


def resource_not_found(parameter: str, hint: str) -> SqsError:
    """The error of a call that names an absent queue by its ARN, in this parameter."""
    message = f"The resource that you specified for the {parameter} parameter doesn't exist."
    return SqsError("ResourceNotFoundException", message, hint=hint)


def _checked(name: str, given: str) -> str:
    try:
        return checked_name("queue", name)
    except InvalidName:
        raise SqsError("InvalidAddress", f"The address {given[:200]!r} is not valid for this endpoint.") from None
