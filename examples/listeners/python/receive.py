"""Receives the events of a worker without a broker, and prints each order that was closed, once.

Needs nothing but Python. Reads WEBHOOK_KEY_FILE and PORT, and ends after EVENTS of them if that is set.
"""

import base64
import hashlib
import hmac
import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Lock

# An older request is one that was recorded and is sent again by another than the worker.
TOLERANCE_S = 300
LONGEST_BODY_BYTES = 16 * 1024 * 1024

with open(os.environ["WEBHOOK_KEY_FILE"]) as file:
    KEY = base64.b64decode(file.read().strip().removeprefix("whsec_"))
WANTED = int(os.environ.get("EVENTS", sys.maxsize))
# A real service keeps the ids in its database, in the transaction that handles the event.
handled = set()
lock = Lock()
finished = Event()


def handle(event):
    # Your code. What raises an exception here is answered with 500, and sent again.
    print("closed: order", event["order_id"], "by", event["closed_by"], flush=True)


def is_signed(headers, body):
    timestamp = headers.get("webhook-timestamp", "")
    if not timestamp.isdigit() or abs(time.time() - int(timestamp)) > TOLERANCE_S:
        return False
    # The bytes as they came: JSON that is written anew is other bytes.
    signed = f"{headers.get('webhook-id', '')}.{timestamp}.".encode() + body
    expected = "v1," + base64.b64encode(hmac.new(KEY, signed, hashlib.sha256).digest()).decode()
    # Several, separated by spaces, while a key is replaced.
    given = headers.get("webhook-signature", "").split(" ")
    return any(hmac.compare_digest(expected.encode(), one.encode()) for one in given)


class Receiver(BaseHTTPRequestHandler):
    # So that the worker can use a connection again.
    protocol_version = "HTTP/1.1"
    timeout = 60

    def do_POST(self):
        length = int(self.headers.get("content-length", 0))
        if length > LONGEST_BODY_BYTES:
            self.close_connection = True
            return self.answer(413)
        body = self.rfile.read(length)
        if not is_signed(self.headers, body):
            return self.answer(401)
        # One at a time: an event that is sent again while it is handled must not be handled twice.
        with lock:
            # Events are delivered at least once, each under one id.
            if self.headers["webhook-id"] not in handled:
                try:
                    # Other events come to this address as well, such as order.expiring.
                    if self.headers["order-timeout-key"] == "order.closed":
                        handle(json.loads(body))
                except Exception as error:
                    print("sent again later:", repr(error), flush=True)
                    return self.answer(500)
                handled.add(self.headers["webhook-id"])
        # After the event has been handled, or it would be lost with this process.
        self.answer(204)
        if len(handled) >= WANTED:
            finished.set()

    def answer(self, status):
        self.send_response(status)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass


def main():
    server = ThreadingHTTPServer(("127.0.0.1", int(os.environ.get("PORT", "8080"))), Receiver)
    print(f"listening: {server.server_port}", flush=True)
    server.timeout = 1
    while not finished.is_set():
        server.handle_request()
    server.server_close()


if __name__ == "__main__":
    main()
