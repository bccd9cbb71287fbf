"""Prints each order that was closed, once. Needs pika: pip install pika

Reads AMQP_URL, and ends after EVENTS of them if that is set.
"""

import json
import os
import time

import pika

QUEUE = "shop.order-closed"


def handle(event):
    # Your code. What raises an exception here is delivered again.
    print("closed: order", event["order_id"], "by", event["closed_by"], flush=True)


def listen(connection, handled, wanted):
    channel = connection.channel()
    # A queue of this service's own: it keeps the events while the service does not run.
    channel.queue_declare(QUEUE, durable=True, arguments={"x-queue-type": "quorum"})
    channel.queue_bind(QUEUE, exchange="order.events", routing_key="order.closed")
    channel.basic_qos(prefetch_count=100)
    print("listening:", QUEUE, flush=True)
    for method, properties, body in channel.consume(QUEUE, auto_ack=False):
        # Events are delivered at least once, each under one message id.
        if properties.message_id not in handled:
            handle(json.loads(body))
            handled.add(properties.message_id)
        # After the event has been handled, or it would be lost with this process.
        channel.basic_ack(method.delivery_tag)
        if wanted is not None and len(handled) >= wanted:
            return
    # The queue was deleted.
    raise pika.exceptions.AMQPError("the broker cancelled the consumer")


def main():
    parameters = pika.URLParameters(os.environ.get("AMQP_URL", "amqp://guest:guest@localhost:5672/%2f"))
    wanted = int(os.environ["EVENTS"]) if "EVENTS" in os.environ else None
    # A real service keeps the ids in its database, in the transaction that handles the event.
    handled = set()
    while wanted is None or len(handled) < wanted:
        try:
            with pika.BlockingConnection(parameters) as connection:
                listen(connection, handled, wanted)
        # The broker restarts, the network fails, or the queue is deleted. The broker delivers again what was not
        # acknowledged.
        except pika.exceptions.AMQPError as error:
            print("connecting again in a second:", repr(error), flush=True)
            time.sleep(1)


if __name__ == "__main__":
    main()
