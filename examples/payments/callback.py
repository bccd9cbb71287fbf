# A payment callback: tells the database what the provider has received. See docs/PAYMENTS.md.
import json
import os
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import psycopg  # pip install "psycopg[binary]"

DATABASE = os.environ["DATABASE_URL"]
CALL = "SELECT outcome, reason, missing_minor, is_new FROM payment_received(%s, %s, %s, %s, %s)"


class Callback(BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        # Verify the provider's signature of the body here, before anything else.
        paid = json.loads(body)
        payment = (paid["order_id"], "example", paid["reference"], paid["amount_minor"], paid["currency"])
        try:
            with psycopg.connect(DATABASE) as connection:
                outcome, reason, missing, is_new = connection.execute(CALL, payment).fetchone()
        except (psycopg.errors.InvalidParameterValue, psycopg.errors.UniqueViolation) as error:
            # What was reported can never be recorded: for an operator. A repetition is of no use.
            print("final, look at it:", error, flush=True)
            return self.answer(200)
        except psycopg.Error as error:
            # Not 200: then the provider calls again, and the payment is not lost.
            print("not recorded:", error, flush=True)
            return self.answer(503)
        if is_new:
            print(paid["order_id"], outcome, reason or missing, flush=True)
        self.answer(200)

    def answer(self, status):
        self.send_response(status)
        self.end_headers()

    def log_message(self, *args):
        pass


server = ThreadingHTTPServer(("127.0.0.1", int(os.environ.get("PORT", "8080"))), Callback)
print("listening:", server.server_port, flush=True)
server.serve_forever()
