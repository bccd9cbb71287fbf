#!/usr/bin/env python3
# A payment service behind the contract that docs/PROVIDERS.md describes, with the standard library alone. Its attempts
# are in memory: replace `Attempts` with your own payments.
"""Answers POST /ask and POST /cancel of order-timeout. The environment sets PORT and HMAC_KEY."""

import hashlib
import hmac
import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock

KEY = os.environ.get("HMAC_KEY", "").encode()
# A request that was recorded and sent again later is refused.
LARGEST_CLOCK_DIFFERENCE_S = 300
LONGEST_BODY_BYTES = 10_000


class Attempts:
    """The payments. Both methods may be called at any time and any number of times."""

    def __init__(self):
        self.lock = Lock()
        self.states = {"att-open": "open", "att-paid": "paid", "att-refunded": "refunded"}

    def ask(self, reference):
        with self.lock:
            return self.states.get(reference, "absent")

    def cancel(self, reference):
        """Closes what is not paid. Under the lock that paying takes too: the answer is the verdict."""
        with self.lock:
            # An attempt that is not known yet is closed as well, so that it cannot be paid when it comes.
            if self.states.get(reference, "open") == "open":
                self.states[reference] = "closed"
            return self.states[reference]


ATTEMPTS = Attempts()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        length = int(self.headers.get("content-length", 0))
        if length > LONGEST_BODY_BYTES:
            self.close_connection = True
            return self.answer(413, {"error": "the request is too long"})
        body = self.rfile.read(length)
        if not self.is_signed(body):
            return self.answer(401, {"error": "the signature or its time is wrong"})
        call = {"/ask": ATTEMPTS.ask, "/cancel": ATTEMPTS.cancel}.get(self.path)
        if call is None:
            return self.answer(404, {"error": "no such call"})
        request = json.loads(body)
        state = call(request["reference"])
        answer = {"reference": request["reference"], "state": state}
        if state == "paid":
            # What was paid, from your own records; here it is what was to be paid.
            answer.update(amount_minor=request["amount_minor"], currency=request["currency"])
        return self.answer(200, answer)

    def is_signed(self, body):
        timestamp = self.headers.get("order-timeout-timestamp", "")
        if not timestamp.isdigit() or abs(time.time() - int(timestamp)) > LARGEST_CLOCK_DIFFERENCE_S:
            return False
        signed = f"{timestamp}\nPOST\n{self.path}\n".encode() + body
        expected = "v1=" + hmac.new(KEY, signed, hashlib.sha256).hexdigest()
        return hmac.compare_digest(expected, self.headers.get("order-timeout-signature", ""))

    def answer(self, status, content):
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass


if __name__ == "__main__":
    if len(KEY) < 32:
        sys.exit("HMAC_KEY has fewer than 32 characters; set it to the content of hmac_key_file")
    server = ThreadingHTTPServer(("127.0.0.1", int(os.environ.get("PORT", "8090"))), Handler)
    print(f"listening on http://127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()
