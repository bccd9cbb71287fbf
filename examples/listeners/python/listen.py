"""Prints each order that was closed, once. Needs pika, psycopg and the package in clients/python.

Reads AMQP_URL and DATABASE_URL, and ends after EVENTS of them if that is set.
"""

import logging
import os
import sys
import threading

import psycopg

from order_timeout import first_delivery
from order_timeout.broker import listen

DATABASE_URL = os.environ["DATABASE_URL"]
wanted = int(os.environ.get("EVENTS", sys.maxsize))
stop = threading.Event()


def handle(event):
    global wanted
    # One transaction: what is done about the event is committed with its id, or neither is.
    with psycopg.connect(DATABASE_URL) as connection:
        if not first_delivery(connection, event.id):
            return
        # Your code. What raises an exception here is tried again.
        print("closed: order", event.body["order_id"], "by", event.body["closed_by"], flush=True)
    wanted -= 1
    if wanted == 0:
        stop.set()


logging.basicConfig(stream=sys.stdout, format="%(message)s", level=logging.INFO)
logging.getLogger("pika").setLevel(logging.CRITICAL)
with psycopg.connect(DATABASE_URL) as connection:
    connection.execute("CREATE TABLE IF NOT EXISTS handled_events (id uuid PRIMARY KEY, handled_at timestamptz DEFAULT now())")
listen(os.environ["AMQP_URL"], "shop.order-closed", handle, stop=stop)
