import time
import uuid


def test_unpaid_order_is_closed(database, clock):
    order_id = uuid.uuid4()     # your checkout instead
    database.execute("INSERT INTO orders (id, expires_at) VALUES (%s, now() + interval '30 min')", (order_id,))

    def status():
        return database.execute("SELECT status::text FROM orders WHERE id = %s", (order_id,)).fetchone()[0]

    clock(minutes=29)
    assert status() == "unpaid"
    clock(minutes=1)
    end = time.monotonic() + 10
    while status() != "closed":
        assert time.monotonic() < end, "in time"
        time.sleep(0.02)
