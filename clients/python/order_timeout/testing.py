"""For a shop's own tests: moves the clock of a database that was made for them. Opens no connection."""

from typing import Any

from . import _run
from ._calls import Call

__all__ = ["advance"]

_FIXES = {"3F000": "this database was not made for tests; create one with `order-timeout setup --for-tests`"}


def advance(connection: Any, seconds: float) -> None:
    """Moves the clock that the worker and all statements read forward, on a database of `order-timeout setup --for-tests`.

    Takes effect at once, also within a transaction: a running worker closes what fell due meanwhile. Raises
    `OrderTimeoutError` on any other database.
    """
    sql = "SELECT order_timeout_clock.advance(make_interval(secs => $1::text::float8))"
    _run(connection, Call(sql, (str(seconds),), lambda rows: None, "the clock is not moved", _FIXES))
