"""Schedules alarms, moves deadlines, reports payments and releases orders for order-timeout, inside the caller's Postgres
transaction.

A connection is one of psycopg (or another DB-API driver), or SQLAlchemy's `Connection` or `Session`; those of asyncio are for
`order_timeout.aio`. Opens no connection and commits nothing. Events, and alarms without the database: `order_timeout.broker`.
"""

from datetime import datetime
from inspect import iscoroutinefunction
from typing import Any, Optional

from . import _calls
from ._calls import Answer, Call, Moved, Id, OrderTimeoutError, Payment

__all__ = [
    "Moved",
    "OrderTimeoutError",
    "Payment",
    "first_delivery",
    "move_deadline",
    "payment_received",
    "release",
    "schedule",
]

# How a parameter is written. In parentheses: SQLAlchemy takes `:p1::text` for no parameter.
DBAPI, SQLALCHEMY = r"%(p\1)s", r"(:p\1)"


def schedule(
    connection: Any, order_id: Id, deadline: datetime, *, kind: str = "order", traceparent: Optional[str] = None
) -> None:
    """Schedules an alarm as part of the caller's transaction: it exists if, and only if, that transaction commits.

    `deadline` is the one in the order's row, with a time zone; `kind` one of the worker's settings; `traceparent` the W3C
    trace context of the caller. Raises `OrderTimeoutError`.
    """
    return _run(connection, _calls.schedule(order_id, deadline, kind, traceparent))


def move_deadline(connection: Any, order_id: Id, deadline: datetime, kind: str = "order") -> Moved:
    """Gives an unpaid order another deadline, and an alarm if that is earlier.

    Locks the order's row until the caller's transaction ends. Raises `OrderTimeoutError`; a repetition is always safe.
    """
    return _run(connection, _calls.move_deadline(order_id, deadline, kind))


def payment_received(
    connection: Any, order_id: Id, provider: str, reference: str, amount_minor: int, currency: str, kind: str = "order"
) -> Payment:
    """Reports that a provider has received this money for this order; each reference of a provider counts once.

    Call it first in its transaction. Raises `OrderTimeoutError`: report it again, unless `is_final`.
    """
    return _run(connection, _calls.payment_received(order_id, provider, reference, amount_minor, currency, kind))


def release(connection: Any, order_id: Id, reason: str, kind: str = "order") -> str:
    """Closes an open order now, because its payment has failed for good. Answers with a word, such as `closed` or, if an attempt
    may still bring money, `attempt_open`.

    The event says `reason`, of 1 to 200 bytes. Raises `OrderTimeoutError`; a repetition is always safe.
    """
    return _run(connection, _calls.release(order_id, reason, kind))


def first_delivery(connection: Any, event_id: str) -> bool:
    """Whether this event was not handled before; marks it in the table `handled_events`, in the caller's transaction.

    Waits for a session that handles the same event now. Raises `OrderTimeoutError`.
    """
    require_transaction, mark = _calls.first_delivery(event_id)
    _run(connection, require_transaction)
    return _run(connection, mark)


def _driver(connection: Any, is_async: bool) -> str:
    """The package that the connection comes from; empty for another DB-API driver."""
    name = f"{type(connection).__module__}.{type(connection).__name__}"
    roots = [base.__module__.partition(".")[0] for base in type(connection).__mro__]
    driver = next((root for root in roots if root in ("sqlalchemy", "psycopg", "asyncpg")), "")
    run = getattr(connection, "execute" if driver else "cursor", None)
    # A pool would run the statement in another transaction than the caller's.
    if run is None or type(connection).__name__ == "Pool":
        raise TypeError(f"{name} is no connection of psycopg, SQLAlchemy or asyncpg; give the one of the transaction")
    if is_async != (driver == "asyncpg" or iscoroutinefunction(run)):
        raise TypeError(f"{name} is for the functions of order_timeout{'' if is_async else '.aio'}; import those")
    return driver


def _run(connection: Any, call: Call[Answer]) -> Answer:
    driver = _driver(connection, is_async=False)
    try:
        if driver == "sqlalchemy":
            from sqlalchemy import text

            result = connection.execute(text(call.with_names(SQLALCHEMY)), call.named())
            rows = [tuple(row) for row in result] if result.returns_rows else []
        else:
            options = {}
            if driver == "psycopg":
                from psycopg.rows import tuple_row

                # The connection's own row factory may make anything of a row.
                options["row_factory"] = tuple_row
            with connection.cursor(**options) as cursor:
                cursor.execute(call.with_names(DBAPI), call.named())
                rows = cursor.fetchall() if cursor.description else []
    except Exception as error:
        raise call.error(error) from error
    return call.read(rows)
