"""Finds the psycopg connection in what a caller passes to `plane.within`.

    psycopg.Connection, psycopg.AsyncConnection             as it is
    sqlalchemy Connection, Session, scoped_session          the psycopg connection of its transaction
    sqlalchemy AsyncConnection, AsyncSession                the same, on an event loop

SQLAlchemy is not a dependency: it is looked for only if the caller has imported it.
"""

import sys
from typing import Any

import psycopg
from psycopg import pq

from fastness.errors import InvalidArgument, TransactionRequired

Connection = psycopg.Connection[Any]
AsyncConnection = psycopg.AsyncConnection[Any]

_ACCEPTED = "a psycopg connection, or a SQLAlchemy session or connection on psycopg (postgresql+psycopg://…)"


def connection_of(given: object) -> Connection:
    """The psycopg connection of the caller's transaction.

    Raises:
        InvalidArgument: it is none, or one for an event loop.
    """
    found = given
    if not isinstance(given, psycopg.Connection):
        found = _driver_connection(given)
    if isinstance(found, psycopg.Connection):
        return found
    if _is_async(found):
        raise InvalidArgument(
            f"{_name(given)} belongs to an event loop and this plane to threads; open the plane with open_async"
        )
    raise _not_accepted_error(given, found)


async def async_connection_of(given: object) -> AsyncConnection:
    """`connection_of` for an event loop.

    Raises:
        InvalidArgument: it is none, or one for threads.
    """
    found = given
    if not isinstance(given, psycopg.AsyncConnection):
        found = await _async_driver_connection(given)
    if isinstance(found, psycopg.AsyncConnection):
        return found
    if isinstance(found, psycopg.Connection):
        raise InvalidArgument(
            f"{_name(given)} belongs to threads and this plane to an event loop; open the plane with open"
        )
    raise _not_accepted_error(given, found)


def check_open(connection: "Connection | AsyncConnection") -> None:
    """Refuse a connection that has no transaction to write in. Makes no call.

    Without autocommit, psycopg opens the transaction with the first statement, which may be one of Fastness's.

    Raises:
        TransactionRequired: it is closed, in a pipeline, in a failed transaction, or in autocommit mode outside of one.
    """
    status = connection.pgconn.transaction_status
    if connection.closed or status == pq.TransactionStatus.UNKNOWN:
        raise TransactionRequired("The connection is closed; nothing was written. Connect again, and begin again")
    if connection.pgconn.pipeline_status != pq.PipelineStatus.OFF:
        raise TransactionRequired("The connection is in pipeline mode; leave the pipeline before this call")
    if status == pq.TransactionStatus.INERROR:
        raise TransactionRequired("The transaction has failed in PostgreSQL; roll it back and run it again")
    if status == pq.TransactionStatus.ACTIVE:
        raise TransactionRequired("The connection is executing a statement; call this after it has ended")
    if status == pq.TransactionStatus.IDLE and connection.autocommit:
        raise TransactionRequired(
            "The connection is in autocommit mode and has no open transaction; open one: with connection.transaction()"
        )


def _driver_connection(given: object) -> object:
    orm, engine = sys.modules.get("sqlalchemy.orm"), sys.modules.get("sqlalchemy.engine")
    if orm is not None and isinstance(given, orm.Session | orm.scoped_session):
        given = given.connection()
    if engine is not None and isinstance(given, engine.Connection):
        if not given.in_transaction():
            given.begin()  # As its first statement would.
        return given.connection.driver_connection
    return given


async def _async_driver_connection(given: object) -> object:
    extension = sys.modules.get("sqlalchemy.ext.asyncio")
    if extension is not None and isinstance(given, extension.AsyncSession | extension.async_scoped_session):
        given = await given.connection()
    if extension is not None and isinstance(given, extension.AsyncConnection):
        if not given.in_transaction():
            await given.begin()
        return (await given.get_raw_connection()).driver_connection
    return _driver_connection(given)


def _is_async(given: object) -> bool:
    extension = sys.modules.get("sqlalchemy.ext.asyncio")
    kinds: tuple[type, ...] = (psycopg.AsyncConnection,)
    if extension is not None:
        kinds += (extension.AsyncSession, extension.async_scoped_session, extension.AsyncConnection)
    return isinstance(given, kinds)


def _not_accepted_error(given: object, found: object) -> InvalidArgument:
    if found is given:
        return InvalidArgument(f"{_name(given)} is no connection; pass {_ACCEPTED}")
    return InvalidArgument(f"{_name(given)} is connected by {type(found).__module__}; pass {_ACCEPTED}")


def _name(given: object) -> str:
    return f"{type(given).__module__}.{type(given).__name__}"
