"""The attributes of SQS queues: what they may be, and what they mean for the policy of a queue.

    VisibilityTimeout, DelaySeconds, MessageRetentionPeriod, RedrivePolicy   the policy of the queue
    FifoQueue                                                               the suffix of its name, and group_batches
    everything else                                                         the record of the queue (`layers/sqs.py`)

The policy is the only place of what it has, so native calls and SQS calls change the same thing. Values that SQS cannot
express are shown as the nearest that it can: a queue that keeps its messages for ever has the longest retention.
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, NamedTuple

import msgspec

from fastness.errors import InvalidArgument, InvalidName, InvalidSqsAttribute, UnknownSqsAttribute
from fastness.layers.queues.policies import SUFFIX
from fastness.limits import (
    MAX_ATTEMPTS_MAX,
    SQS_DELAY_SECONDS_MAX,
    SQS_KEY_ID_CHARACTERS_MAX,
    SQS_KEY_REUSE_SECONDS_MAX,
    SQS_KEY_REUSE_SECONDS_MIN,
    SQS_MESSAGE_BYTES_MAX,
    SQS_MESSAGE_BYTES_MIN,
    SQS_NAME_CHARACTERS_MAX,
    SQS_POLICY_BYTES_MAX,
    SQS_RETENTION_SECONDS_MAX,
    SQS_RETENTION_SECONDS_MIN,
    SQS_SOURCE_QUEUES_MAX,
    SQS_TAG_KEY_CHARACTERS_MAX,
    SQS_TAG_VALUE_CHARACTERS_MAX,
    SQS_TAGS_MAX,
    SQS_VISIBILITY_SECONDS_MAX,
    SQS_WAIT_SECONDS_MAX,
)
from fastness.names import checked_queue_name
from fastness.wire.queues import QueuePolicy
from fastness.wire.sqs import ATTRIBUTES, FIFO_SUFFIX

NO_VISIBILITY_SECONDS: Final = 0.001  # What a policy has for VisibilityTimeout=0: a lease that ends at once.

_STANDARD_NAME: Final = (
    f"Can only include alphanumeric characters, hyphens, or underscores. 1 to {SQS_NAME_CHARACTERS_MAX} in length"
)
_NAME: Final = re.compile(rf"[A-Za-z0-9_-]{{1,{SQS_NAME_CHARACTERS_MAX}}}\Z")
_NUMBER: Final = re.compile(r"[0-9]{1,9}\Z", re.ASCII)
_ARN: Final = re.compile(r"arn:[a-z0-9-]+:sqs:[a-z0-9-]*:[0-9]*:([^:]+)\Z")
_SHOWN_CHARACTERS: Final = 200  # Of a value in an error.

_FIFO_ONLY: Final = frozenset(("ContentBasedDeduplication", "DeduplicationScope", "FifoThroughputLimit"))
# Attributes that have no value by default, and that an empty text removes.
_REMOVABLE: Final = frozenset(("KmsMasterKeyId", "Policy", "RedriveAllowPolicy", "RedrivePolicy"))
_OF_POLICY: Final = frozenset(
    ("DelaySeconds", "FifoQueue", "MessageRetentionPeriod", "RedrivePolicy", "VisibilityTimeout")
)
_RETENTION_SECONDS: Final = 345_600  # The default.
_MAX_RECEIVES: Final = 10  # The default of a RedrivePolicy.
_KEY_REUSE_SECONDS: Final = 300  # The default.


class Redrive(NamedTuple):
    """A RedrivePolicy."""

    arn: str
    target: str  # The name of the dead-letter queue.
    max_receives: int


class RedriveAllow(NamedTuple):
    """A RedriveAllowPolicy: which queues may have this one as their dead-letter queue."""

    permission: str
    sources: tuple[str, ...]  # Names of queues, for "byQueue".

    def allows(self, source: str) -> bool:
        return self.permission == "allowAll" or (self.permission == "byQueue" and source in self.sources)


def is_fifo(name: str) -> bool:
    """Whether a queue of this name is a FIFO queue."""
    return name.endswith(FIFO_SUFFIX)


def checked_new_name(name: str) -> str:
    """The name of a new queue, unchanged. Queues that native clients made may have other names.

    Raises:
        InvalidArgument: it is no name of an SQS queue.
    """
    if not _NAME.match(name.removesuffix(FIFO_SUFFIX)) or len(name) > SQS_NAME_CHARACTERS_MAX:
        raise InvalidArgument(_STANDARD_NAME)
    return name


def checked(name: str, attributes: Mapping[str, str]) -> dict[str, str]:
    """The attributes for the queue `name`, each checked by itself and in its normal form.

    Raises:
        UnknownSqsAttribute: there is no such attribute, or it cannot be set, or only FIFO queues have it.
        InvalidSqsAttribute: a value is invalid.
    """
    for each in attributes:
        if each not in ATTRIBUTES:
            raise _unknown(each)
        if each in _FIFO_ONLY and not is_fifo(name):
            if each == "ContentBasedDeduplication":
                raise _unknown(each)
            raise UnknownSqsAttribute(f"You can specify the {each} only when FifoQueue is set to true.")
    return {each: _CHECKS[each](each, value) for each, value in attributes.items()}


def check_fifo(name: str, attributes: Mapping[str, str]) -> None:
    """Check that FifoQueue says whether a new queue of this name is a FIFO queue.

    Raises:
        InvalidArgument: it does not.
        UnknownSqsAttribute: it is false, which only standard queues would have.
    """
    given = attributes.get("FifoQueue")
    if given == "true" and not is_fifo(name):
        raise InvalidArgument(
            "The name of a FIFO queue can only include alphanumeric characters, hyphens, or underscores, must end with "
            f"{FIFO_SUFFIX} suffix and be 1 to {SQS_NAME_CHARACTERS_MAX} in length"
        )
    if given != "true" and is_fifo(name):
        raise InvalidArgument(_STANDARD_NAME)
    if given == "false":
        raise _unknown("FifoQueue")


def check_same_type(name: str, changes: Mapping[str, str]) -> None:
    """Check that a change of attributes leaves a queue of its type.

    Raises:
        UnknownSqsAttribute: a standard queue has no FifoQueue.
        InvalidSqsAttribute: it would make a FIFO queue another one.
    """
    given = changes.get("FifoQueue")
    if given is not None and not is_fifo(name):
        raise _unknown("FifoQueue")
    if given == "false":
        raise InvalidSqsAttribute(
            "Invalid value for the parameter FifoQueue. Reason: Modifying queue type is not supported."
        )


def merged(stored: Mapping[str, str], changes: Mapping[str, str]) -> dict[str, str]:
    """What a queue's record has of its attributes after a change of checked ones.

    Raises:
        InvalidSqsAttribute, UnknownSqsAttribute: they contradict each other.
    """
    found = {**stored, **{name: value for name, value in changes.items() if name not in _OF_POLICY}}
    for name in _REMOVABLE & found.keys():
        if not found[name]:
            del found[name]
    if found.get("FifoThroughputLimit") == "perMessageGroupId" and found.get("DeduplicationScope") != "messageGroup":
        limit = found["FifoThroughputLimit"]
        raise _invalid("FifoThroughputLimit", limit, "it needs DeduplicationScope=messageGroup; set both")
    if "KmsMasterKeyId" in found and found.get("SqsManagedSseEnabled") == "true":
        if "SqsManagedSseEnabled" in changes and changes.get("KmsMasterKeyId"):
            raise UnknownSqsAttribute(
                "You can use one type of server-side encryption (SSE) at one time. You can either enable KMS SSE or "
                "SQS SSE."
            )
        # The kind that was set last replaces the other one.
        del found["KmsMasterKeyId" if "SqsManagedSseEnabled" in changes else "SqsManagedSseEnabled"]
    return found


def policy_with(name: str, policy: QueuePolicy, changes: Mapping[str, str]) -> QueuePolicy:
    """The policy of the queue `name` with the changes that checked attributes mean for it."""
    fields: dict[str, Any] = {}
    if "VisibilityTimeout" in changes:
        fields["visibility_seconds"] = float(changes["VisibilityTimeout"]) or NO_VISIBILITY_SECONDS
    if "DelaySeconds" in changes:
        fields["delay_seconds"] = float(changes["DelaySeconds"])
    if "MessageRetentionPeriod" in changes:
        fields |= {"retention_seconds": float(changes["MessageRetentionPeriod"]), "retention_by_age": True}
    if "RedrivePolicy" in changes:
        redrive = parse_redrive(changes["RedrivePolicy"])
        if redrive is None:
            fields |= {"dead_letter_rule": "never", "dead_letter_queue": None}
        elif redrive.target == name:  # Its messages stay where they are. The ARN in the record shows that it has one.
            fields |= {"dead_letter_rule": "never", "dead_letter_queue": None, "max_attempts": redrive.max_receives}
        else:
            fields |= {
                "dead_letter_rule": "deliveries",
                "dead_letter_queue": redrive.target,
                "max_attempts": redrive.max_receives,
            }
    return msgspec.structs.replace(policy, **fields)


def new_policy(name: str, attributes: Mapping[str, str]) -> QueuePolicy:
    """The policy of a new queue with these checked attributes."""
    # SQS has no back-off: a message is visible again when its timeout has passed.
    policy = QueuePolicy(
        retention_seconds=float(_RETENTION_SECONDS),
        retention_by_age=True,
        dead_letter_rule="never",
        retry_delay_seconds=0.0,
        group_batches=is_fifo(name),
    )
    return policy_with(name, policy, attributes)


def derived(name: str, policy: QueuePolicy, stored: Mapping[str, str], *, arn_prefix: str, arn: str) -> dict[str, str]:
    """All attributes of a queue but the computed ones.

    `stored` is what its record has. `arn` is the ARN that its RedrivePolicy was set with, which is returned while it
    names the dead-letter queue of the policy.
    """
    found = {
        "VisibilityTimeout": str(visibility_seconds(policy)),
        "DelaySeconds": str(math.ceil(policy.delay_seconds)),
        "MessageRetentionPeriod": str(
            SQS_RETENTION_SECONDS_MAX if policy.retention_seconds is None else math.ceil(policy.retention_seconds)
        ),
        "MaximumMessageSize": str(SQS_MESSAGE_BYTES_MAX),
        "ReceiveMessageWaitTimeSeconds": "0",
        "SqsManagedSseEnabled": "false" if "KmsMasterKeyId" in stored else "true",
    }
    if is_fifo(name):
        found |= {
            "FifoQueue": "true",
            "ContentBasedDeduplication": "false",
            "DeduplicationScope": "queue",
            "FifoThroughputLimit": "perQueue",
        }
    if policy.dead_letter_rule != "never" or name_in_arn(arn) == name:
        target = name if policy.dead_letter_rule == "never" else policy.dead_letter_queue or f"{name}{SUFFIX}"
        if name_in_arn(arn) != target:
            arn = f"{arn_prefix}:{target}"
        found["RedrivePolicy"] = _json({"deadLetterTargetArn": arn, "maxReceiveCount": policy.max_attempts})
    if "KmsMasterKeyId" in stored:
        found["KmsDataKeyReusePeriodSeconds"] = str(_KEY_REUSE_SECONDS)
    return {**found, **stored}


def difference(current: Mapping[str, str], given: Mapping[str, str]) -> str | None:
    """The name of a given attribute that has another value than the current one; None if there is none."""
    for name, value in given.items():
        now = current.get(name, "false" if name == "FifoQueue" else "")
        if name == "RedrivePolicy" and (one := parse_redrive(now)) and (other := parse_redrive(value)):
            is_same = one[1:] == other[1:]  # ARNs of one queue may differ in their region.
        else:
            is_same = now == value
        if not is_same:
            return name
    return None


def visibility_seconds(policy: QueuePolicy) -> int:
    """The visibility timeout of a policy in whole seconds."""
    return 0 if policy.visibility_seconds <= NO_VISIBILITY_SECONDS else math.ceil(policy.visibility_seconds)


def parse_redrive(text: str) -> Redrive | None:
    """A RedrivePolicy; None if it is empty.

    Raises:
        InvalidArgument: it is invalid.
    """
    if not text:
        return None
    found = _object(text, {"deadLetterTargetArn", "maxReceiveCount"}, partial(invalid_redrive, text))
    arn, count = found.get("deadLetterTargetArn"), found.get("maxReceiveCount", _MAX_RECEIVES)
    target = name_in_arn(arn) if isinstance(arn, str) else None
    if not isinstance(arn, str) or target is None:
        raise invalid_redrive(text, "deadLetterTargetArn is not the ARN of a queue.")
    if isinstance(count, str) and _NUMBER.match(count):
        count = int(count)
    if count.__class__ is not int or not 1 <= count <= MAX_ATTEMPTS_MAX:
        raise invalid_redrive(
            text,
            f"Invalid value for maxReceiveCount: {_shown(str(count))}, valid values are from 1 to {MAX_ATTEMPTS_MAX} "
            "both inclusive.",
        )
    return Redrive(arn, target, count)


def parse_redrive_allow(text: str) -> RedriveAllow:
    """A RedriveAllowPolicy; an empty one allows all queues.

    Raises:
        InvalidSqsAttribute: it is invalid.
    """
    if not text:
        return RedriveAllow("allowAll", ())
    refusal = partial(_invalid, "RedriveAllowPolicy", text)
    found = _object(text, {"redrivePermission", "sourceQueueArns"}, refusal)
    permission, arns = found.get("redrivePermission", "allowAll"), found.get("sourceQueueArns")
    if permission not in ("allowAll", "denyAll", "byQueue"):
        raise refusal("redrivePermission is allowAll, denyAll or byQueue")
    if permission != "byQueue":
        if arns is not None:
            raise refusal("only byQueue has sourceQueueArns; leave them out")
        return RedriveAllow(permission, ())
    if not isinstance(arns, list) or not 1 <= len(arns) <= SQS_SOURCE_QUEUES_MAX:
        raise refusal(f"byQueue has 1 to {SQS_SOURCE_QUEUES_MAX} sourceQueueArns")
    names = tuple(name_in_arn(arn) if isinstance(arn, str) else None for arn in arns)
    sources = tuple(name for name in names if name is not None)
    if len(sources) != len(names):
        raise refusal("a member of sourceQueueArns is not the ARN of a queue")
    return RedriveAllow(permission, sources)


def name_in_arn(arn: str) -> str | None:
    """The name of the queue that an ARN names; None if it names none. Region and account are not compared."""
    match = _ARN.match(arn)
    if match is None:
        return None
    try:
        return checked_queue_name("queue", match[1])
    except (InvalidName, InvalidArgument):
        return None


def checked_tags(tags: Mapping[str, str]) -> dict[str, str]:
    """All tags of a queue, unchanged.

    Raises:
        InvalidArgument: there are too many, or one is too long or reserved.
    """
    if len(tags) > SQS_TAGS_MAX:
        raise InvalidArgument(f"A queue has at most {SQS_TAGS_MAX} tags, not {len(tags)}; remove some first")
    for key, value in tags.items():
        if not 1 <= len(key) <= SQS_TAG_KEY_CHARACTERS_MAX or not _is_text(key):
            raise InvalidArgument(
                f"The key of a tag has 1 to {SQS_TAG_KEY_CHARACTERS_MAX} characters; {_shown(key)} has {len(key)}"
            )
        if key.casefold().startswith("aws:"):
            raise InvalidArgument(f"Tag {_shown(key)} is reserved: keys that start with aws: cannot be set")
        if len(value) > SQS_TAG_VALUE_CHARACTERS_MAX or not _is_text(value):
            raise InvalidArgument(
                f"The value of a tag has at most {SQS_TAG_VALUE_CHARACTERS_MAX} characters; "
                f"that of {_shown(key)} has {len(value)}"
            )
    return dict(tags)


def _object(text: str, members: set[str], refusal: Callable[[str], Exception]) -> dict[str, Any]:
    """The JSON object in an attribute, which has no other members. `refusal` makes the error of a reason."""
    if len(text) > SQS_POLICY_BYTES_MAX:
        raise refusal(f"it has more than {SQS_POLICY_BYTES_MAX} characters")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise refusal("it is not valid JSON") from None
    if not isinstance(found, dict):
        raise refusal("it is not a JSON object")
    if unknown := found.keys() - members:
        raise refusal(f"it has the unknown member {_shown(min(unknown))}")
    return found


def _number(least: int, most: int) -> Callable[[str, str], str]:
    def check(name: str, value: str) -> str:
        if not _NUMBER.match(value) or not least <= int(value) <= most:
            raise _invalid(name, value, f"it is an integer from {least:,} to {most:,}")
        return str(int(value))

    return check


def _boolean(name: str, value: str) -> str:
    if value.lower() not in ("true", "false"):  # Also what Python's `str(True)` is.
        raise _invalid(name, value, "it is true or false")
    return value.lower()


def _one_of(*values: str) -> Callable[[str, str], str]:
    def check(name: str, value: str) -> str:
        if value not in values:
            raise _invalid(name, value, f"it is {' or '.join(values)}")
        return value

    return check


def _check_key_id(name: str, value: str) -> str:
    if len(value) > SQS_KEY_ID_CHARACTERS_MAX or not _is_text(value):
        raise _invalid(name, value, f"it has at most {SQS_KEY_ID_CHARACTERS_MAX} characters")
    return value


def _check_policy(name: str, value: str) -> str:
    if value:
        if len(value.encode(errors="replace")) > SQS_POLICY_BYTES_MAX:
            raise _invalid(name, value, f"it has more than {SQS_POLICY_BYTES_MAX:,} bytes")
        try:
            is_object = _is_text(value) and isinstance(json.loads(value), dict)
        except (ValueError, RecursionError):
            is_object = False
        if not is_object:
            raise _invalid(name, value, "it is not a JSON object")
    return value


def _check_redrive(name: str, value: str) -> str:
    del name
    redrive = parse_redrive(value)
    if redrive is None:
        return ""
    return _json({"deadLetterTargetArn": redrive.arn, "maxReceiveCount": redrive.max_receives})


def _check_redrive_allow(name: str, value: str) -> str:
    del name
    if not value:
        return ""
    allow = parse_redrive_allow(value)
    if allow.permission != "byQueue":
        return _json({"redrivePermission": allow.permission})
    return _json({"redrivePermission": allow.permission, "sourceQueueArns": json.loads(value)["sourceQueueArns"]})


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def invalid_redrive(policy: str, reason: str) -> InvalidArgument:
    """The error of a RedrivePolicy. SQS has another code for it than for other attributes."""
    return InvalidArgument(f"Value {_shown(policy)} for parameter RedrivePolicy is invalid. Reason: {reason}")


def _unknown(name: str) -> UnknownSqsAttribute:
    return UnknownSqsAttribute(f"Unknown Attribute {_shown(name)}.")


def _invalid(name: str, value: str, reason: str) -> InvalidSqsAttribute:
    return InvalidSqsAttribute(
        f"Invalid value for the parameter {name}. Reason: The value is {_shown(value)}; {reason}."
    )


def _shown(value: str) -> str:
    text = value.encode(errors="backslashreplace").decode()
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 1]}…"


_CHECKS: Final[dict[str, Callable[[str, str], str]]] = {
    "ContentBasedDeduplication": _boolean,
    "DeduplicationScope": _one_of("messageGroup", "queue"),
    "DelaySeconds": _number(0, SQS_DELAY_SECONDS_MAX),
    "FifoQueue": _boolean,
    "FifoThroughputLimit": _one_of("perQueue", "perMessageGroupId"),
    "KmsDataKeyReusePeriodSeconds": _number(SQS_KEY_REUSE_SECONDS_MIN, SQS_KEY_REUSE_SECONDS_MAX),
    "KmsMasterKeyId": _check_key_id,
    "MaximumMessageSize": _number(SQS_MESSAGE_BYTES_MIN, SQS_MESSAGE_BYTES_MAX),
    "MessageRetentionPeriod": _number(SQS_RETENTION_SECONDS_MIN, SQS_RETENTION_SECONDS_MAX),
    "Policy": _check_policy,
    "ReceiveMessageWaitTimeSeconds": _number(0, SQS_WAIT_SECONDS_MAX),
    "RedriveAllowPolicy": _check_redrive_allow,
    "RedrivePolicy": _check_redrive,
    "SqsManagedSseEnabled": _boolean,
    "VisibilityTimeout": _number(0, SQS_VISIBILITY_SECONDS_MAX),
}
