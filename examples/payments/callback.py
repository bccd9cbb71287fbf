# Stripe's webhook: tells the database what Stripe has received. See docs/PAYMENTS.md.
import hashlib
import hmac
import json
import os
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import psycopg

from order_timeout import OrderTimeoutError, payment_received  # pip install ./clients/python "psycopg[binary]"

DATABASE = os.environ["DATABASE_URL"]
SECRET = os.environ["STRIPE_WEBHOOK_SECRET"].encode()  # whsec_…, from the endpoint's page


def is_signed(header, body):
    """docs.stripe.com/webhooks, "Verify manually": t=seconds,v1=HMAC of seconds.body, at most five minutes old."""
    parts = [part.partition("=")[::2] for part in header.split(",")]
    seconds = dict(parts).get("t", "")
    if not seconds.isdigit() or abs(time.time() - int(seconds)) > 300:
        return False
    expected = hmac.new(SECRET, seconds.encode() + b"." + body, hashlib.sha256).hexdigest()
    return any(name == "v1" and hmac.compare_digest(value, expected) for name, value in parts)


class Callback(BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if not is_signed(self.headers.get("Stripe-Signature", ""), body):
            return self.answer(400)
        event = json.loads(body)
        intent = event["data"]["object"]
        order = (intent.get("metadata") or {}).get("order_id")
        if event["type"] != "payment_intent.succeeded" or order is None:
            return self.answer(200)  # not a payment of an order
        currency = intent["currency"].upper()
        try:
            with psycopg.connect(DATABASE) as connection:
                paid = payment_received(connection, order, "stripe", intent["id"], intent["amount_received"], currency)
        except (OrderTimeoutError, psycopg.Error) as error:
            if getattr(error, "is_final", False):
                # What was reported can never be recorded: for an operator. A repetition is of no use.
                print("final, look at it:", error, flush=True)
                return self.answer(200)
            # Not 200: then Stripe calls again, and the payment is not lost.
            print("not recorded:", error, flush=True)
            return self.answer(503)
        if paid.is_new:
            print(order, paid.outcome, paid.reason or paid.missing_minor, flush=True)
        self.answer(200)

    def answer(self, status):
        self.send_response(status)
        self.end_headers()

    def log_message(self, *args):
        pass


server = ThreadingHTTPServer(("127.0.0.1", int(os.environ.get("PORT", "8080"))), Callback)
print("listening:", server.server_port, flush=True)
server.serve_forever()
