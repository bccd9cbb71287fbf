"""Tests the package against a running worker, its database and its broker: DATABASE_URL, AMQP_URL and NAMESPACE say where.

`cargo test --test examples python_package` starts them, and installs the drivers. FIXTURES is the folder of the wire's vectors.
"""

import asyncio
import json
import logging
import os
import socket
import threading
import time
import unittest
import uuid
from datetime import datetime, timedelta, timezone
from pathlib import Path

import asyncpg
import pika
import psycopg
import sqlalchemy
from psycopg.rows import dict_row
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

import order_timeout
from order_timeout import Moved, OrderTimeoutError, Payment, aio
from order_timeout.broker import Event, Publisher, listen

DATABASE, BROKER, NAMESPACE = (os.environ[name] for name in ("DATABASE_URL", "AMQP_URL", "NAMESPACE"))
FIXTURES = Path(os.environ["FIXTURES"])
LIMIT_S = 30
TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
NEW_ORDER = "INSERT INTO orders (id, expires_at, amount_minor, currency) VALUES ({}, {}, 1999, 'EUR')"


def after(seconds):
    return datetime.now(timezone.utc).replace(microsecond=0) + timedelta(seconds=seconds)


def wait_for(condition):
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end, "in time"
        time.sleep(0.05)


def sqlalchemy_url(driver):
    return sqlalchemy.make_url(DATABASE).set(drivername=f"postgresql+{driver}")


class Listening(logging.Handler):
    """A listener in a thread. It is bound when the block begins."""

    def __init__(self, queue, handle, **options):
        super().__init__()
        self.begun, self.stop, self.said = threading.Event(), threading.Event(), f"listening: {queue}"
        options["stop"] = self.stop
        self.thread = threading.Thread(target=listen, args=(BROKER, queue, handle), kwargs=options, daemon=True)

    def emit(self, record):
        if record.getMessage() == self.said:
            self.begun.set()

    def __enter__(self):
        logger = logging.getLogger("order_timeout")
        logger.setLevel(logging.INFO)
        logger.propagate = False
        logger.addHandler(self)
        self.thread.start()
        assert self.begun.wait(LIMIT_S)

    def __exit__(self, *_):
        self.stop.set()
        self.thread.join(LIMIT_S)
        logging.getLogger("order_timeout").removeHandler(self)
        assert not self.thread.is_alive()


class PackageTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        with psycopg.connect(DATABASE) as connection:
            connection.execute(
                "CREATE TABLE IF NOT EXISTS handled_events (id uuid PRIMARY KEY, handled_at timestamptz DEFAULT now())"
            )

    def setUp(self):
        self.connection = psycopg.connect(DATABASE, autocommit=True, row_factory=dict_row)
        self.addCleanup(self.connection.close)
        broker = pika.BlockingConnection(pika.URLParameters(BROKER))
        self.addCleanup(broker.close)
        self.channel = broker.channel()
        self.queue = f"shop.{uuid.uuid4()}"
        self.addCleanup(lambda: broker.channel().queue_delete(self.queue))

    def one(self, sql, *values):
        return self.connection.execute(sql, values).fetchone()

    def order(self, deadline):
        order_id = uuid.uuid4()
        self.connection.execute(NEW_ORDER.format("%s", "%s"), (order_id, deadline))
        return order_id

    def alarms(self, order_id):
        sql = "SELECT deadline, kind, traceparent FROM alarm_outbox WHERE order_id = %s ORDER BY created_at"
        return [tuple(row.values()) for row in self.connection.execute(sql, (str(order_id),))]

    def status(self, order_id):
        return self.one("SELECT status::text FROM orders WHERE id = %s", order_id)["status"]

    def refused(self, *parts):
        """One sentence with these parts."""
        test = self

        class Refused:
            def __enter__(self):
                return self

            def __exit__(self, kind, error, _):
                test.assertIsInstance(error, OrderTimeoutError)
                test.assertNotIn("\n", str(error))
                for part in parts:
                    test.assertIn(part, str(error))
                self.error = error
                return True

        return Refused()

    def test_transaction_schedules_and_event_is_heard_once(self):
        tried, heard = [], []

        with self.refused("is not marked as handled: begin a transaction first"):
            order_timeout.first_delivery(self.connection, str(uuid.uuid4()))

        def handle(event):
            with psycopg.connect(DATABASE) as connection:
                if order_timeout.first_delivery(connection, event.id):
                    heard.append(event)
                    tried.append(event.id)
                    if len(tried) == 1:
                        raise RuntimeError("the handler's transaction is rolled back, and the event is tried again")
                else:
                    tried.append(event.id)

        with Listening(self.queue, handle, namespace=NAMESPACE):
            deadline, order_id = after(2), uuid.uuid4()
            with self.connection.transaction():
                self.connection.execute(NEW_ORDER.format("%s", "%s"), (order_id, deadline))
                order_timeout.schedule(self.connection, order_id, deadline, traceparent=TRACE)
            with self.connection.transaction():
                order_timeout.schedule(self.connection, "rolled back", deadline)
                raise psycopg.Rollback
            self.assertEqual(self.alarms("rolled back"), [])
            self.assertEqual(self.alarms(order_id), [(deadline, "order", TRACE)])
            of_order = lambda: [event for event in heard if event.body["order_id"] == str(order_id)]
            # One whose transaction is rolled back, and the one that counts.
            wait_for(lambda: len(of_order()) == 2)
            event = of_order()[1]
            self.assertEqual((event.type, event.routing_key), ("order.closed.v1", "order.closed"))
            self.assertEqual((event.time("deadline"), event.traceparent), (deadline, TRACE))
            self.assertGreaterEqual(event.time("closed_at"), deadline)
            self.assertEqual(self.status(order_id), "closed")
            # The same event once more.
            self.connection.execute("UPDATE event_outbox SET sent_at = NULL WHERE id = %s", (event.id,))
            wait_for(lambda: tried.count(event.id) > 2)
        self.assertEqual(heard.count(event), 2)
        self.assertEqual(self.channel.queue_declare(self.queue, passive=True).method.message_count, 0)

    def test_each_driver_writes_the_same(self):
        deadline = after(3600)

        def sync(connection, order_id):
            order_timeout.schedule(connection, order_id, deadline, kind="acceptance", traceparent="no trace context")
            moved = order_timeout.move_deadline(connection, order_id, deadline - timedelta(minutes=1))
            paid = order_timeout.payment_received(connection, order_id, "stripe", f"pi_{order_id}", 2000, "EUR")
            return moved, paid

        async def run_async(connection, order_id):
            await aio.schedule(connection, order_id, deadline, kind="acceptance", traceparent="no trace context")
            moved = await aio.move_deadline(connection, order_id, deadline - timedelta(minutes=1))
            paid = await aio.payment_received(connection, order_id, "stripe", f"pi_{order_id}", 2000, "EUR")
            return moved, paid

        async def by_asyncpg(order_id):
            connection = await asyncpg.connect(DATABASE)
            async with connection.transaction():
                answers = await run_async(connection, order_id)
                event_id = str(uuid.uuid4())
                self.assertEqual([await aio.first_delivery(connection, event_id) for _ in range(2)], [True, False])
            await connection.close()
            return answers

        async def by_psycopg(order_id):
            async with await psycopg.AsyncConnection.connect(DATABASE, row_factory=dict_row) as connection:
                return await run_async(connection, order_id)

        async def by_session(driver, order_id):
            engine = create_async_engine(sqlalchemy_url(driver))
            async with AsyncSession(engine) as session, session.begin():
                answers = await run_async(session, order_id)
            await engine.dispose()
            return answers

        def by_sqlalchemy(order_id):
            engine = sqlalchemy.create_engine(sqlalchemy_url("psycopg"))
            self.addCleanup(engine.dispose)
            with sqlalchemy.orm.Session(engine) as session, session.begin():
                return sync(session, order_id)

        ways = {
            "psycopg": lambda order_id: sync(self.connection, order_id),
            "SQLAlchemy": by_sqlalchemy,
            "asyncpg": lambda order_id: asyncio.run(by_asyncpg(order_id)),
            "psycopg, async": lambda order_id: asyncio.run(by_psycopg(order_id)),
            "SQLAlchemy, asyncpg": lambda order_id: asyncio.run(by_session("asyncpg", order_id)),
            "SQLAlchemy, psycopg, async": lambda order_id: asyncio.run(by_session("psycopg_async", order_id)),
        }
        for name, way in ways.items():
            with self.subTest(name):
                order_id, earlier = self.order(deadline), deadline - timedelta(minutes=1)
                moved, paid = way(order_id)
                self.assertEqual(moved, Moved("earlier", "unpaid", earlier))
                self.assertEqual(paid, Payment("paid", None, 0, 1, True))
                self.assertEqual(self.alarms(order_id), [(deadline, "acceptance", None), (earlier, "order", None)])
                self.assertEqual(self.status(order_id), "paid")

    def test_deadline_moves_later_earlier_or_not(self):
        deadline, order_id = after(600), self.order(after(600))
        later = deadline + timedelta(minutes=5, microseconds=3)
        self.assertEqual(order_timeout.move_deadline(self.connection, order_id, later), Moved("later", "unpaid", later))
        self.assertEqual(self.alarms(order_id), [])
        moved = order_timeout.move_deadline(self.connection, str(order_id), deadline)
        self.assertEqual((moved.outcome, moved.deadline), ("earlier", deadline))
        self.connection.execute("UPDATE orders SET status = 'cancelled', expires_at = NULL WHERE id = %s", (order_id,))
        moved = order_timeout.move_deadline(self.connection, order_id, later)
        self.assertEqual(moved, Moved("unchanged", "cancelled", None))
        for unknown in (uuid.uuid4(), "7"):
            moved = order_timeout.move_deadline(self.connection, unknown, later)
            self.assertEqual(moved, Moved("unknown", None, None))

    def test_payments_are_answered(self):
        order_id, reference = self.order(after(600)), str(uuid.uuid4())

        def report(part, amount, order=order_id, **more):
            return order_timeout.payment_received(
                self.connection, order, "stripe", f"{reference}{part}", amount, "EUR", **more
            )

        self.assertEqual(report(1, 999), Payment("partial", None, 1000, 0, True))
        self.assertEqual(report(1, 999), Payment("partial", None, 1000, 0, False))
        self.assertEqual(report(2, 1001, kind="order"), Payment("paid", None, 0, 1, True))
        self.assertEqual(report(3, 5), Payment("late", "already_paid", 0, 0, True))
        self.assertEqual(report(4, 5, uuid.uuid4()).reason, "unknown_order")
        with self.refused("is not recorded: final: payment", "reference of its own") as refused:
            report(1, 998)
        self.assertEqual((refused.error.is_final, refused.error.sqlstate), (True, "23505"))
        with self.refused("is not recorded: final: the amount -1 is negative; report what was received") as refused:
            report(5, -1)
        self.assertEqual((refused.error.is_final, refused.error.sqlstate), (True, "22023"))
        # A CHECK of the shop's own tables, which it may mend: nothing was recorded, and the payment must be reported again.
        unreserved = self.order(after(600))
        item = "INSERT INTO order_items (order_id, article_id, quantity) VALUES (%s, 'article', 1)"
        self.connection.execute(item, (unreserved,))
        with self.refused("is not recorded", "reserved_is_never_negative", "and repeat it") as refused:
            report(7, 1999, unreserved)
        self.assertEqual((refused.error.is_final, refused.error.sqlstate), (False, "23514"))
        with self.refused("the amount 19.99 is not a whole number", "smallest unit"):
            report(6, 19.99)

    def test_order_is_released_unless_it_may_be_paid(self):
        order_id, release = self.order(after(600)), order_timeout.release
        attempt = "INSERT INTO payment_attempts VALUES ('stripe', %s, %s, 1999, 'EUR')"
        self.connection.execute(attempt, (str(uuid.uuid4()), str(order_id)))
        self.assertEqual(release(self.connection, order_id, "declined"), "attempt_open")
        self.connection.execute("UPDATE payment_attempts SET state = 'closed' WHERE order_id = %s", (str(order_id),))
        self.assertEqual(release(self.connection, order_id, "declined", kind="order"), "closed")
        self.assertEqual((self.status(order_id), release(self.connection, order_id, "again")), ("closed", "already_closed"))
        event = self.one("SELECT payload FROM event_outbox WHERE payload ->> 'order_id' = %s", str(order_id))["payload"]
        self.assertEqual((event["closed_by"], event["why"]), ("released", "declined"))
        with self.refused("is not released: final: the reason '' is not 1 to 200 bytes") as refused:
            release(self.connection, order_id, "")
        self.assertTrue(refused.error.is_final)

        async def by_asyncpg():
            connection = await asyncpg.connect(DATABASE)
            answer = await aio.release(connection, uuid.uuid4(), "declined")
            await connection.close()
            return answer

        self.assertEqual(asyncio.run(by_asyncpg()), "unknown")

    def test_broker_takes_wire_vectors(self):
        exchange = f"{self.queue}.schedule"
        publisher = Publisher(BROKER, namespace=self.queue)
        self.addCleanup(publisher.close)
        with self.refused("no exchange shop.", "run `order-timeout setup`"):
            publisher.schedule("1", after(60))
        self.channel.exchange_declare(exchange, "fanout", auto_delete=True)
        with self.refused("no queue is bound to", "run `order-timeout setup`") as refused:
            publisher.schedule("1", after(60))
        self.assertFalse(refused.error.is_final)
        self.channel.queue_declare(self.queue)
        self.channel.queue_bind(self.queue, exchange)
        deadline = datetime(2026, 11, 20, 11, 30, tzinfo=timezone(timedelta(hours=1)))
        publisher.schedule(uuid.UUID("01939f6e-7a3c-7c11-9d1a-6b1f0e2d3c4b"), deadline, traceparent=TRACE)
        publisher.schedule(4711, deadline, kind="acceptance")
        for name, headers in [("timeout_due.v1.json", {"traceparent": TRACE}), ("timeout_due_of_kind.v1.json", None)]:
            _, properties, body = self.channel.basic_get(self.queue, auto_ack=True)
            self.assertEqual(json.loads(body), json.loads((FIXTURES / name).read_text()))
            self.assertEqual(
                (properties.type, properties.delivery_mode, properties.headers), ("order.timeout.v1", 2, headers)
            )
            self.assertEqual((properties.content_type, properties.expiration), ("application/json", None))
            self.assertLess(abs(properties.timestamp - time.time()), LIMIT_S)
            uuid.UUID(properties.message_id)
        # What the queue is full for, it refuses with a nack.
        self.channel.queue_declare(f"{self.queue}.full", arguments={"x-max-length": 0, "x-overflow": "reject-publish"})
        self.channel.queue_bind(f"{self.queue}.full", exchange)
        with self.refused("the broker has refused it", "repeat it"):
            publisher.schedule("1", after(60))
        self.channel.queue_delete(f"{self.queue}.full")
        publisher.schedule("1", after(60))

    def test_listener_reads_wire_vectors(self):
        body = (FIXTURES / "order_closed.v1.json").read_bytes()
        read = json.loads(body)
        exchange = f"{self.queue}.events"
        self.channel.exchange_declare(exchange, "topic", auto_delete=True)
        events = []
        with Listening(
            self.queue, events.append, namespace=self.queue, routing_keys=["order.closed", "order.expiring"]
        ):

            def send(body, message_id, key="order.closed"):
                properties = pika.BasicProperties(message_id=message_id, type=f"{key}.v1")
                self.channel.basic_publish(exchange, key, body, properties)

            send(body, "1")
            send(b"not JSON", "2")
            send(body, None)
            send(body, "3", "order.expiring")
            wait_for(lambda: events and events[-1].id == "3")
            depth = lambda: self.channel.queue_declare(self.queue, passive=True).method.message_count
            wait_for(lambda: depth() == 0)
        self.assertEqual(events[0], Event("1", "order.closed.v1", "order.closed", read))
        self.assertEqual([event.id for event in events], ["1", "3"], "what is no event is rejected")
        self.assertEqual(events[0].time("closed_at"), datetime(2026, 11, 20, 10, 30, 0, 3142, tzinfo=timezone.utc))

    def test_broker_schedules(self):
        publisher = Publisher(BROKER, namespace=NAMESPACE)
        self.addCleanup(publisher.close)
        deadline = after(1)
        order_id = self.order(deadline)
        publisher.schedule(order_id, deadline)
        wait_for(lambda: self.status(order_id) == "closed")
        with socket.create_server(("127.0.0.1", 0)) as silent:
            with self.refused("no answer within 5 s", "repeat it"):
                Publisher(pika.ConnectionParameters(*silent.getsockname())).schedule(order_id, after(1))
        away = pika.ConnectionParameters("127.0.0.1", 1)
        with self.refused("127.0.0.1:1 ended the attempt (", "repeat it"):
            Publisher(away).schedule(order_id, after(1))

    def test_publisher_opens_lost_connection_again(self):
        publisher = Publisher(BROKER, namespace=NAMESPACE)
        self.addCleanup(publisher.close)
        publisher.schedule("1", after(1))
        # The broker's end of it, as after a restart.
        publisher._open._connection._transport._sock.shutdown(2)
        publisher.schedule("1", after(1))

    def test_bad_input_is_refused_with_advice(self):
        deadline, publisher = after(600), Publisher(BROKER, namespace=NAMESPACE)
        ways = [
            lambda *given: order_timeout.schedule(self.connection, *given),
            publisher.schedule,
            lambda *given: order_timeout.move_deadline(self.connection, *given),
        ]
        self.addCleanup(publisher.close)
        for way in ways:
            for bad in ("", "a\nb", "x" * 201, None):
                with self.refused("1 to 200 bytes", "as the orders table prints it") as refused:
                    way(bad, deadline)
                self.assertTrue(refused.error.is_final)
            for bad in (datetime.now(), "2026-11-20", None):
                with self.refused("has no time zone", "datetime.now(timezone.utc)"):
                    way("7", bad)
        with self.refused("choose a deadline before the year 9999"):
            order_timeout.schedule(self.connection, "7", datetime(9999, 12, 31, 1, tzinfo=timezone.utc))
        with self.refused("further ahead than delay.max_delay"):
            publisher.schedule("7", after(11 * 366 * 86_400))
        with psycopg.connect(DATABASE, options="-c search_path=pg_catalog") as elsewhere:
            calls = [
                lambda: order_timeout.schedule(elsewhere, "7", deadline),
                lambda: order_timeout.move_deadline(elsewhere, "7", deadline),
                lambda: order_timeout.payment_received(elsewhere, "7", "stripe", "pi_1", 1, "EUR"),
            ]
            for call in calls:
                with self.refused("run `order-timeout setup`", "search_path"):
                    call()
                elsewhere.rollback()
            with self.refused("is not marked as handled", "run `CREATE TABLE handled_events"):
                order_timeout.first_delivery(elsewhere, str(uuid.uuid4()))
            with self.refused("roll it back first"):
                order_timeout.schedule(elsewhere, "7", deadline)
        with self.refused("is not scheduled", "connect again"):
            order_timeout.schedule(elsewhere, "7", deadline)
        for connection, module, advice in [
            (DATABASE, order_timeout, "is no connection"),
            (asyncpg.create_pool(DATABASE), aio, "is no connection"),
            (elsewhere, aio, "is for the functions of order_timeout;"),
        ]:
            with self.assertRaisesRegex(TypeError, advice):
                called = module.schedule(connection, "7", deadline)
                asyncio.run(called)


if __name__ == "__main__":
    unittest.main()
