"""Requests: every operation of a plane is a struct, and its class declares what the entry points need to know.

    class GetState(Request[FoundState], frozen=True, tag="states.get"):
        operation = Operation(reads=True, http=(Route("GET", "/v1/states/{key}", "Return a state document."),))
        key: str

The table of the stream's requests, the HTTP routes, the permissions of tokens and the rules for repeated calls all
follow from these declarations.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any, ClassVar, Generic, TypeVar, get_args, get_origin

import msgspec

from fastness.tiers import Tier

Answer = TypeVar("Answer")


class Route(msgspec.Struct, frozen=True):
    """One HTTP method of one path that carries a request.

    Fields of the request come from the path, then from `fixed`, and otherwise from the JSON body, or from the query
    where the method has no body. `defaults` apply to fields that the caller leaves out.
    """

    method: str
    path: str
    summary: str
    status: int = 200
    fixed: Mapping[str, Any] = {}
    defaults: Mapping[str, Any] = {}
    body_field: str = ""  # The field whose value is the whole body.
    wrapper: str = ""  # The body may be an object with this single field, as the GET of the same path returns it.
    read_only: tuple[str, ...] = ()  # Fields of the body that are ignored: the GET of the same path returns them.


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """What holds for every request of a class.

    A request that only reads, or that is harmless to repeat, is simply sent again if its answer is lost. Every other
    request takes an idempotency key, under which it is executed once.
    """

    reads: bool = False  # A snapshot serves it, so it never waits for a writer.
    # A standby may serve it, where a plane is opened with `read_from="standby"`: its answer shows what is stored, and
    # decides nothing, unlike the check of a lease, the cursor of a world, a policy, a token or the key of an agent.
    stale: bool = False
    repeatable: str = ""  # Why executing it twice does no harm; empty if it needs an idempotency key.
    network: bool = True  # The stream carries it. Raw writes to the key space stay local: they could break any layer.
    atomic: bool = False  # It can be one of several operations in one commit.
    stores: bool = False  # It adds data: it is refused while the disk is nearly full.
    permission: str = ""  # The verb that a token must allow; empty if it follows from the tag.
    audited: bool = False  # A server records who sent it, when and from where.
    all_universes: bool = False  # A token must be for all universes, although the request names one.
    all_queues: bool = False  # A token must be for all queues: it reaches what is in them, and names none.
    queue_field: str = "queue"  # The field that names its queue, if it has one.
    lists_queues: bool = False  # Its field `only` has the queues of the caller's token, to which its answer is limited.
    any_token: bool = False  # Every usable token allows it, whatever its verbs and universes.
    http: tuple[Route, ...] = ()

    @property
    def takes_key(self) -> bool:
        """Whether a request needs an idempotency key to be sent again."""
        return not (self.reads or self.repeatable)


class Request(
    msgspec.Struct,
    Generic[Answer],
    frozen=True,
    forbid_unknown_fields=True,
    omit_defaults=True,
    tag_field="op",
    kw_only=True,
):
    """An operation to execute; `Request[Answer]` is answered by an `Answer`.

    `tier` is the durability that the caller waits for. A write returns when it holds for what was written, a read when
    it holds for what was read.
    """

    operation: ClassVar[Operation] = Operation()

    tier: Tier = Tier.CRITICAL

    def check(self) -> None:
        """Raise the error of a request that is wrong beyond its types.

        Entry points call this on requests from outside. Handles only build requests that pass.
        """

    def queue_names(self) -> tuple[str, ...]:
        """Every queue that the request names; "*" is all of them. A token for some queues must be for all of these."""
        queue = getattr(self, self.operation.queue_field, None)
        return () if queue is None else (queue,)


class RequestWithoutTier(Request[Answer], Generic[Answer], frozen=True, kw_only=True):
    """A request that has a tier only if its caller gives one. Its handler decides what it waits for otherwise."""

    tier: Tier | None = None  # type: ignore[assignment]  # Only its handler reads it.


class Committed(msgspec.Struct, frozen=True):
    """The answer to a write that returns nothing else: its durability."""

    durability: Tier


@cache
def answer_type(request: type[Request[Any]]) -> Any:
    """The type of the answer to a class of requests."""
    for base in getattr(request, "__orig_bases__", ()):
        if get_origin(base) in (Request, RequestWithoutTier):
            return get_args(base)[0]
    raise TypeError(f"{request.__name__} does not declare its answer; derive it from Request[Answer]")


@cache
def permission_of(request: type[Request[Any]]) -> str:
    """The verb that a token must allow for a class of requests: `queue:put` for `queues.put`."""
    if request.operation.permission:
        return request.operation.permission
    plural, _, verb = str(request.__struct_config__.tag).partition(".")
    noun = f"{plural.removesuffix('ies')}y" if plural.endswith("ies") else plural.removesuffix("s")
    return f"{noun}:{verb}"
