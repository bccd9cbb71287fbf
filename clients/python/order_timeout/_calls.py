"""The statements of the package, what their answers mean, and what their errors advise. No I/O.

Each statement is written for any driver: its values are text and numbers, which the database casts.
"""

import re
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Callable, Dict, Generic, Literal, Optional, Sequence, Tuple, TypeVar, Union
from uuid import UUID

Id = Union[str, int, UUID]
Answer = TypeVar("Answer")

# As the worker reads it from a message, and as `alarm_outbox` keeps it.
MAX_ORDER_ID_BYTES = 200
# Of the W3C specification: no version ff, no ids of zeros; version 00 has nothing behind the flags.
TRACEPARENT = re.compile(
    r"(?!ff|00.{53}.|.{3}0{32}|.{36}0{16})[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(-[\x00-\x7f]{0,144})?"
)


class OrderTimeoutError(Exception):
    """What was asked for is not known to have happened. The message is one sentence that says how to fix it, and
    `__cause__` is the driver's error. Roll the transaction back."""

    def __init__(self, message: str, *, is_final: bool = False, sqlstate: Optional[str] = None) -> None:
        super().__init__(message)
        #: No repetition can succeed, because of what was given.
        self.is_final = is_final
        #: PostgreSQL's error code, if the database has answered.
        self.sqlstate = sqlstate


@dataclass(frozen=True)
class Moved:
    """What became of a deadline."""

    #: `later` (or the same): the alarm in flight suffices. `earlier`: a new alarm is in the outbox. `unchanged`: the order
    #: is not unpaid, or a trigger skipped the update. `too_far`: `extend_max` of its kind does not allow it. `unknown`: there
    #: is no such order.
    outcome: Literal["later", "earlier", "unchanged", "too_far", "unknown"]
    #: Of the order; None if there is none.
    status: Optional[str]
    #: The deadline in the row now; None if it has none.
    deadline: Optional[datetime]


@dataclass(frozen=True)
class Payment:
    """What a payment did. A repeated report gets the answer of the first one."""

    outcome: Literal["paid", "partial", "late"]
    #: Why it is late, such as `closed`; otherwise None.
    reason: Optional[str]
    #: What the order still lacks, in the currency's smallest unit, if `partial`; otherwise 0.
    missing_minor: int
    #: What was paid too much; it is late money.
    surplus_minor: int
    #: Whether this is the first report of this provider's reference.
    is_new: bool


@dataclass(frozen=True)
class Call(Generic[Answer]):
    """One statement with parameters `$1`, `$2`, …"""

    sql: str
    values: Tuple[Any, ...]
    #: The answer that these rows are.
    read: Callable[[Sequence[Any]], Answer]
    #: What has not happened if it fails.
    failed: str
    #: How an error with this SQLSTATE is fixed.
    fixes: Dict[str, str]

    def named(self) -> Dict[str, Any]:
        return {f"p{number}": value for number, value in enumerate(self.values, 1)}

    def with_names(self, form: str) -> str:
        # A driver with %(name)s takes a single % for the beginning of a name.
        sql = self.sql.replace("%", "%%") if form.startswith("%") else self.sql
        return re.sub(r"\$(\d)", form, sql)

    def error(self, cause: BaseException) -> OrderTimeoutError:
        """The sentence for what the driver has raised."""
        state = sqlstate(cause)
        said = str(getattr(cause, "orig", None) or cause).strip().split("\n")[0]
        is_final = "final: " in said or (state in FINAL and state in self.fixes)
        # What is final says by itself what to do; without a code, the answer may have been lost.
        advice = "" if is_final else f"; {'roll back' if state else 'connect again'} and repeat it"
        fix = self.fixes.get(state or "") or FIXES.get(state or "") or said + advice
        return OrderTimeoutError(f"{self.failed}: {fix}", is_final=is_final, sqlstate=state)


# invalid_text_representation and check_violation, where a call has a fix for them: elsewhere they are about the shop's own
# tables, and it may mend those. What our functions refuse for good begins with `final: `.
FINAL = {"22P02", "23514"}
DEADLINE = "choose a deadline before the year 9999, and a kind of a-z, 0-9 and _"
FIXES = {
    # undefined_table, undefined_function, undefined_column, invalid_schema_name
    **dict.fromkeys(
        ["42P01", "42883", "42703", "3F000"], "run `order-timeout setup`, and put its schema on search_path"
    ),
    # lock_not_available, query_canceled, serialization_failure, deadlock_detected
    **dict.fromkeys(["55P03", "57014", "40001", "40P01"], "another session holds the order; roll back and repeat it"),
    # admin_shutdown, crash_shutdown, cannot_connect_now
    **dict.fromkeys(["57P01", "57P02", "57P03"], "the database is restarting; connect again and repeat it"),
    "25006": "this is a standby; connect to the primary",
    "25P02": "an earlier statement of this transaction has failed; roll it back first",
}


def sqlstate(error: Optional[BaseException]) -> Optional[str]:
    """PostgreSQL's code of a driver's error: psycopg, asyncpg, psycopg2, or SQLAlchemy around one of them."""
    while error is not None:
        code = getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)
        if isinstance(code, str):
            return code
        error = getattr(error, "orig", None) or error.__cause__
    return None


def refusal(what: str, advice: str) -> OrderTimeoutError:
    """Of what can never be used. Nothing was sent."""
    return OrderTimeoutError(f"{what}; {advice}", is_final=True)


def checked_id(order_id: Id) -> str:
    text = str(order_id)
    is_id = isinstance(order_id, (str, int, UUID)) and not re.search(r"[\x00-\x1f\x7f-\x9f]", text)
    if not is_id or not 1 <= len(text.encode("utf-8", "replace")) <= MAX_ORDER_ID_BYTES:
        what = f"the order id {text[:50]!r} is not 1 to {MAX_ORDER_ID_BYTES} bytes without control characters"
        raise refusal(what, "give it as the orders table prints it")
    return text


def checked_deadline(deadline: datetime) -> datetime:
    if not isinstance(deadline, datetime) or deadline.utcoffset() is None:
        raise refusal(f"the deadline {deadline!r} has no time zone", "give one such as datetime.now(timezone.utc)")
    return deadline


def checked_traceparent(context: Optional[str]) -> Optional[str]:
    """No order may fail for its trace, so text that is no trace context is left out."""
    return context if context is not None and TRACEPARENT.fullmatch(context) else None


def schedule(order_id: Id, deadline: datetime, kind: str, traceparent: Optional[str]) -> Call[None]:
    text, due = checked_id(order_id), checked_deadline(deadline).isoformat()
    return Call(
        "INSERT INTO alarm_outbox (order_id, deadline, traceparent, kind)"
        " VALUES ($1::text, $2::text::timestamptz, $3::text, $4::text)",
        (text, due, checked_traceparent(traceparent), kind),
        lambda rows: None,
        f"the alarm of order {text} is not scheduled",
        {"42501": "grant this user INSERT on alarm_outbox", "23514": DEADLINE},
    )


def move_deadline(order_id: Id, deadline: datetime, kind: str) -> Call[Moved]:
    text, due = checked_id(order_id), checked_deadline(deadline).isoformat()

    def read(rows: Sequence[Any]) -> Moved:
        answer: Sequence[Any] = rows[0] if rows else ("unknown", None, None)
        outcome, status, written = answer
        return Moved(outcome, status, written and datetime.fromisoformat(written + "+00:00"))

    return Call(
        # As text: `infinity`, for example, is not a datetime.
        "SELECT outcome, status, to_char(coalesce(moved_to, before) AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS.US')"
        " FROM move_deadline($1::text, $2::text::timestamptz, $3::text)",
        (text, due, kind),
        read,
        f"the deadline of order {text} is unchanged",
        {"42501": "GRANT EXECUTE ON FUNCTION move_deadline to this user", "23514": DEADLINE},
    )


def payment_received(
    order_id: Id, provider: str, reference: str, amount_minor: int, currency: str, kind: str
) -> Call[Payment]:
    if not isinstance(amount_minor, int):
        raise refusal(f"the amount {amount_minor!r} is not a whole number", "give it in the currency's smallest unit")
    return Call(
        "SELECT outcome, reason, missing_minor, surplus_minor, is_new"
        " FROM payment_received($1::text, $2::text, $3::text, $4::bigint, $5::text, $6::text)",
        (checked_id(order_id), provider, reference, amount_minor, currency, kind),
        lambda rows: Payment(*rows[0]),
        f"payment {reference!r} of {provider} is not recorded",
        {"42501": "GRANT EXECUTE ON FUNCTION payment_received to this user"},
    )


def release(order_id: Id, reason: str, kind: str) -> Call[str]:
    text = checked_id(order_id)
    return Call(
        "SELECT release($1::text, $2::text, $3::text)",
        (text, reason, kind),
        lambda rows: str(rows[0][0]),
        f"order {text} is not released",
        {"42501": "GRANT EXECUTE ON FUNCTION release to this user"},
    )


def first_delivery(event_id: str) -> Tuple[Call[None], Call[bool]]:
    failed = f"event {event_id!r} is not marked as handled"
    fixes = {
        "42P01": "run `CREATE TABLE handled_events (id uuid PRIMARY KEY, handled_at timestamptz DEFAULT now())`",
        "42501": "grant this user INSERT and SELECT on handled_events",
        "22P02": "the message id of an event is a UUID",
        # no_active_sql_transaction
        "25P01": "begin a transaction first, whose rollback takes the mark back if the event is not handled",
    }
    # The database refuses it outside a transaction, where a failed handler would leave the event marked and lost.
    require_transaction = "LOCK TABLE handled_events IN ACCESS SHARE MODE"
    mark = "INSERT INTO handled_events (id) VALUES ($1::text::uuid) ON CONFLICT DO NOTHING RETURNING true"
    return Call(require_transaction, (), lambda rows: None, failed, fixes), Call(mark, (event_id,), bool, failed, fixes)
