"""Which event loop the clients run on: the standard library's, which is what users have, or uvloop."""

import asyncio
from collections.abc import Callable

import uvloop as fast


def loop_factory(*, uvloop: bool) -> Callable[[], asyncio.AbstractEventLoop]:
    return fast.new_event_loop if uvloop else asyncio.new_event_loop
