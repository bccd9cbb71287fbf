"""The functions of `order_timeout` for asyncio: with a connection of asyncpg, an `AsyncConnection` of psycopg, or SQLAlchemy's
`AsyncConnection` or `AsyncSession`."""

from datetime import datetime
from typing import Any, Optional

from . import DBAPI, SQLALCHEMY, _calls, _driver
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


async def schedule(
    connection: Any, order_id: Id, deadline: datetime, *, kind: str = "order", traceparent: Optional[str] = None
) -> None:
    """As `order_timeout.schedule`."""
    return await _run(connection, _calls.schedule(order_id, deadline, kind, traceparent))


async def move_deadline(connection: Any, order_id: Id, deadline: datetime, kind: str = "order") -> Moved:
    """As `order_timeout.move_deadline`."""
    return await _run(connection, _calls.move_deadline(order_id, deadline, kind))


async def payment_received(
    connection: Any, order_id: Id, provider: str, reference: str, amount_minor: int, currency: str, kind: str = "order"
) -> Payment:
    """As `order_timeout.payment_received`."""
    call = _calls.payment_received(order_id, provider, reference, amount_minor, currency, kind)
    return await _run(connection, call)


async def release(connection: Any, order_id: Id, reason: str, kind: str = "order") -> str:
    """As `order_timeout.release`."""
    return await _run(connection, _calls.release(order_id, reason, kind))


async def first_delivery(connection: Any, event_id: str) -> bool:
    """As `order_timeout.first_delivery`."""
    require_transaction, mark = _calls.first_delivery(event_id)
    await _run(connection, require_transaction)
    return await _run(connection, mark)


async def _run(connection: Any, call: Call[Answer]) -> Answer:
    driver = _driver(connection, is_async=True)
    try:
        if driver == "asyncpg":
            rows = [tuple(row) for row in await connection.fetch(call.sql, *call.values)]
        elif driver == "sqlalchemy":
            from sqlalchemy import text

            result = await connection.execute(text(call.with_names(SQLALCHEMY)), call.named())
            rows = [tuple(row) for row in result] if result.returns_rows else []
        else:
            from psycopg.rows import tuple_row

            async with connection.cursor(row_factory=tuple_row) as cursor:
                await cursor.execute(call.with_names(DBAPI), call.named())
                rows = await cursor.fetchall() if cursor.description else []
    except Exception as error:
        raise call.error(error) from error
    return call.read(rows)
