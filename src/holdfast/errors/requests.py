"""What is wrong with a request before anything is done."""

from holdfast.errors.families import Validation


class InvalidUrl(Validation):
    """The URL names no backend that Holdfast has."""

    code = "invalid_url"


class InvalidName(Validation):
    """A universe, world or queue is named with characters that names do not have."""

    code = "invalid_name"


class InvalidKey(Validation):
    """A key, or a part of one, has a type or form that keys cannot have."""

    code = "invalid_key"


class InvalidValue(Validation):
    """A value is not bytes."""

    code = "invalid_value"


class InvalidArgument(Validation):
    """An argument is outside the range that the message names."""

    code = "invalid_argument"


class IdempotencyKeyReused(Validation):
    """The key was used for another call within the last minutes; nothing was done. Give every call its own."""

    code = "idempotency_key_reused"


class KeyTooLarge(Validation):
    """The key is longer than `limits.KEY_BYTES_MAX`."""

    code = "key_too_large"


class ValueTooLarge(Validation):
    """The value is longer than `limits.VALUE_BYTES_MAX`."""

    code = "value_too_large"


class TransactionTooLarge(Validation):
    """One transaction writes more bytes or keys than it may."""

    code = "transaction_too_large"


class EmptyBatch(Validation):
    """A batch has nothing in it."""

    code = "empty_batch"


class BatchTooLarge(Validation):
    """A batch has more entries or bytes than one append may have."""

    code = "batch_too_large"


class PayloadTooLarge(Validation):
    """What was sent is larger than fits, or than its sender's token allows; send less, or its hash if it is a blob."""

    code = "payload_too_large"


class AnswerTooLarge(Validation):
    """The answer is longer than a stream carries; ask for less at a time, or for a blob over HTTP."""

    code = "answer_too_large"


class NestedTransaction(Validation):
    """`transact` was called from inside a transaction of the same database."""

    code = "nested_transaction"


class TransactionEnded(Validation):
    """The transaction was used after its function returned."""

    code = "transaction_ended"


class ReadOnlyTransaction(Validation):
    """A read snapshot was asked to write."""

    code = "read_only_transaction"


class UnsupportedTier(Validation):
    """A transaction cannot keep this tier's promise."""

    code = "unsupported_tier"


class NotSynchronous(Validation):
    """The function is a coroutine or a generator: it would run after its transaction has ended."""

    code = "not_synchronous"


class NotEmbedded(Validation):
    """This call needs the database in the same process, and the handle speaks to a server."""

    code = "not_embedded"
