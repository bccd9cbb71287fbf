"""Schedules alarms through RabbitMQ, and listens to events; the wire is docs/WIRE.md of order-timeout. Needs pika.

The database is not needed here. An alarm is scheduled after the commit of its order; inside the transaction it is
`order_timeout.schedule`.
"""

import json
import logging
import threading
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any, Callable, Dict, Iterable, List, Optional, Tuple, Union

import pika
from pika.exceptions import AMQPError, NackError, UnroutableError

from ._calls import Id, OrderTimeoutError, checked_deadline, checked_id, checked_traceparent, refusal

__all__ = ["Event", "OrderTimeoutError", "Publisher", "listen"]

Address = Union[str, pika.ConnectionParameters]

# As those of the Rust client.
TIMEOUT_S = 5.0
MAX_DELAY = timedelta(days=3650)
# An event whose handler fails is tried again after this time, and after twice the last one up to the longest.
FIRST_RETRY_S, LONGEST_RETRY_S = 1.0, 60.0
PREFETCH = 100
# How long it may take until a set `stop` is noticed.
LONGEST_STOP_S = 0.2

logger = logging.getLogger("order_timeout")


def _alarm(
    order_id: Id, deadline: datetime, kind: str, traceparent: Optional[str]
) -> Tuple[bytes, pika.BasicProperties]:
    """An alarm's body and properties, version 1."""
    text, due, context = checked_id(order_id), checked_deadline(deadline), checked_traceparent(traceparent)
    if due - datetime.now(timezone.utc) > MAX_DELAY:
        raise refusal(f"the deadline {deadline} is further ahead than delay.max_delay allows", "is its unit right?")
    digits = "microseconds" if due.microsecond % 1000 else "milliseconds"
    body = {"order_id": text, "deadline": due.astimezone(timezone.utc).isoformat(timespec=digits)[:-6] + "Z"}
    if kind != "order":
        body["kind"] = kind
    properties = pika.BasicProperties(
        type="order.timeout.v1",
        content_type="application/json",
        delivery_mode=2,
        timestamp=int(time.time()),
        message_id=str(uuid.uuid4()),
        app_id="order-timeout",
        headers=None if context is None else {"traceparent": context},
    )
    return json.dumps(body, ensure_ascii=False).encode(), properties


class _Confirming:
    """A connection in confirm mode, driven only while a call waits, so that each call ends in time."""

    def __init__(self, parameters: pika.ConnectionParameters) -> None:
        self._channel: Any = None
        self._connection = pika.SelectConnection(
            parameters,
            on_open_callback=lambda connection: connection.channel(on_open_callback=self._opened),
            on_open_error_callback=lambda _, error: self._end(error),
            on_close_callback=lambda _, reason: self._end(reason),
        )

    def _opened(self, channel: Any) -> None:
        self._channel = channel
        channel.add_on_close_callback(lambda _, reason: self._end(reason) if self._connection.is_open else None)
        # The confirm follows.
        channel.add_on_return_callback(lambda *_: setattr(self, "_is_returned", True))
        channel.confirm_delivery(self._confirmed, callback=lambda _: self._end(None))

    def _confirmed(self, frame: Any) -> None:
        self._end(NackError([]) if isinstance(frame.method, pika.spec.Basic.Nack) else None)

    def _end(self, outcome: Optional[BaseException]) -> None:
        self._outcome = outcome
        self._connection.ioloop.stop()

    def _wait(self) -> None:
        self._outcome = TimeoutError(f"there was no answer within {TIMEOUT_S:g} s")
        timer = self._connection.ioloop.call_later(TIMEOUT_S, self._connection.ioloop.stop)
        self._connection.ioloop.start()
        self._connection.ioloop.remove_timeout(timer)
        if self._outcome is not None:
            raise self._outcome

    def publish(self, exchange: str, body: bytes, properties: pika.BasicProperties) -> None:
        if self._channel is None:
            self._wait()
        self._is_returned = False
        self._channel.basic_publish(exchange, "", body, properties, mandatory=True)
        self._wait()
        if self._is_returned:
            raise UnroutableError([])

    def close(self) -> None:
        # It is not needed again, so its errors are ignored.
        with suppress(Exception):
            self._connection.close()
            self._wait()
        self._connection.ioloop.close()


class Publisher:
    """Schedules alarms through RabbitMQ, with confirms. Connects at the first alarm, and again after an error. Threads may
    share it; they take turns."""

    def __init__(self, url: Address, *, namespace: str = "order") -> None:
        self._parameters = pika.URLParameters(url) if isinstance(url, str) else url
        self._exchange = f"{namespace}.schedule"
        self._lock = threading.Lock()
        self._open: Optional[_Confirming] = None

    def schedule(
        self, order_id: Id, deadline: datetime, *, kind: str = "order", traceparent: Optional[str] = None
    ) -> None:
        """Schedules the alarm of an order that is committed; returns when the broker has confirmed it.

        Raises `OrderTimeoutError` within 20 seconds. A repetition does no harm.
        """
        body, properties = _alarm(order_id, deadline, kind, traceparent)
        with self._lock:
            # A connection that was open may have been lost since, which is noticed only now.
            for is_last in (self._open is None, True):
                try:
                    return self._publish(body, properties)
                except Exception as error:
                    if is_last or not isinstance(error, AMQPError):
                        text = f"the alarm of order {order_id} is not scheduled: {self._fix(error)}"
                        raise OrderTimeoutError(text) from error

    def _publish(self, body: bytes, properties: pika.BasicProperties) -> None:
        connection, self._open = self._open or _Confirming(self._parameters), None
        try:
            connection.publish(self._exchange, body, properties)
        except Exception:
            connection.close()
            raise
        self._open = connection

    def _fix(self, error: Exception) -> str:
        setup = "run `order-timeout setup` with this namespace on this virtual host"
        if isinstance(error, UnroutableError):
            return f"no queue is bound to the exchange {self._exchange}; {setup}"
        if isinstance(error, NackError):
            return "the broker has refused it, because a queue is full or away; repeat it"
        if "NOT_FOUND" in repr(error):
            return f"the broker has no exchange {self._exchange}; {setup}"
        if isinstance(error, TimeoutError):
            return f"{error}; repeat it, and look whether the broker is short of memory or disk"
        return f"{self._parameters.host}:{self._parameters.port} ended the attempt ({error!r}); repeat it later"

    def close(self) -> None:
        with self._lock:
            connection, self._open = self._open, None
            if connection is not None:
                connection.close()


@dataclass(frozen=True)
class Event:
    """An event, as docs/WIRE.md describes each type."""

    #: The same each time the event is delivered.
    id: str
    #: Such as `order.closed.v1`.
    type: str
    routing_key: str
    body: Dict[str, Any]
    #: The W3C trace context of the order's alarm, if it had one.
    traceparent: Optional[str] = None

    def time(self, field: str) -> datetime:
        """A field such as `closed_at` as a time."""
        # Before Python 3.11 `fromisoformat` reads three or six digits of a second, and no Z.
        return datetime.fromisoformat(self.body[field].replace("Z", "+00:00"))


def _read(method: Any, properties: pika.BasicProperties, body: bytes) -> Event:
    read = json.loads(body)
    if not properties.message_id or not isinstance(read, dict):
        raise ValueError("it has no message id, or is no JSON object")
    traceparent = (properties.headers or {}).get("traceparent")
    return Event(properties.message_id, properties.type or "", method.routing_key, read, traceparent)


def listen(
    url: Address,
    queue: str,
    handle: Callable[[Event], object],
    *,
    routing_keys: Iterable[str] = ("order.closed",),
    namespace: str = "order",
    stop: Optional[threading.Event] = None,
) -> None:
    """Calls `handle` with each event, at least once, until `stop` is set; connects again after every error.

    `queue` is this service's own; it is declared, and bound with the routing keys. An event is acknowledged after `handle` has
    returned. If it raises, the event is tried again after a second and more, while others are handled. To handle each event
    once, call `order_timeout.first_delivery` in the transaction that handles it. A handler takes less than a minute, or the
    broker misses the heartbeats.
    """
    stop, routing_keys = stop or threading.Event(), list(routing_keys)
    parameters = pika.URLParameters(url) if isinstance(url, str) else url
    while not stop.is_set():
        try:
            with pika.BlockingConnection(parameters) as connection:
                channel = connection.channel()
                # It keeps the events while the service does not run.
                channel.queue_declare(queue, durable=True, arguments={"x-queue-type": "quorum"})
                for key in routing_keys:
                    channel.queue_bind(queue, exchange=f"{namespace}.events", routing_key=key)
                channel.basic_qos(prefetch_count=PREFETCH)
                logger.info("listening: %s", queue)
                _consume(channel, queue, handle, stop)
        except (AMQPError, OSError) as error:
            hint = "; run `order-timeout setup` first" if "NOT_FOUND" in repr(error) else ""
            logger.warning("connecting again in a second: %r%s", error, hint)
            stop.wait(1)


def _consume(channel: Any, queue: str, handle: Callable[[Event], object], stop: threading.Event) -> None:
    # When to try, the delivery tag, the event, and the pause if it fails. Kept here and not returned to the queue: RabbitMQ 4
    # drops a message after twenty returns.
    waiting: List[Tuple[float, int, Event, float]] = []
    for method, properties, body in channel.consume(queue, inactivity_timeout=LONGEST_STOP_S):
        if method is not None:
            try:
                waiting.append((0, method.delivery_tag, _read(method, properties, body), FIRST_RETRY_S))
            except ValueError as error:
                logger.error("a message is no event, and was rejected: %s", error)
                channel.basic_reject(method.delivery_tag, requeue=False)
        for entry in [entry for entry in waiting if entry[0] <= time.monotonic() and not stop.is_set()]:
            _, tag, event, pause = entry
            waiting.remove(entry)
            try:
                handle(event)
            except Exception:
                logger.exception("event %s was not handled; it is tried again in %g s", event.id, pause)
                waiting.append((time.monotonic() + pause, tag, event, min(2 * pause, LONGEST_RETRY_S)))
            else:
                channel.basic_ack(tag)
        if stop.is_set():
            return
    raise AMQPError("the broker cancelled the consumer")
