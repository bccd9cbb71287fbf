-- Changes the deadline of an unpaid order; an earlier deadline, and the first of an order without one, gets its own alarm.
--
--   $1 order_id text
--   $2 deadline timestamptz
--
--   status text, deadline timestamptz: the order's values before, infinity if it had no deadline; moved_to timestamptz: its deadline now, NULL if it
--   was not moved. No row: the order does not exist.
--
-- A later deadline needs no alarm: the alarm in flight finds that the order is not due, and waits for the new deadline.
WITH found AS MATERIALIZED (
    SELECT o.id, o.status, o.expires_at
    FROM orders o
    WHERE o.id = $1::text::uuid
    FOR NO KEY UPDATE
),
moved AS (
    -- Uses the status that was read with the row lock. The status of the row itself would be the one from the
    -- statement's start, and the lock may have waited for a session that made the order unpaid.
    UPDATE orders o
    SET expires_at = $2::timestamptz
    WHERE o.id = (SELECT f.id FROM found f WHERE f.status = 'unpaid')
    -- The value that was stored: a trigger may have refused the change.
    RETURNING o.expires_at
),
alarm AS (
    -- In the same transaction: the alarm exists if and only if the new deadline does.
    INSERT INTO alarm_outbox (order_id, deadline)
    SELECT f.id::text, m.expires_at
    FROM found f, moved m
    WHERE f.expires_at IS NULL OR m.expires_at < f.expires_at
)
SELECT f.status::text AS status, coalesce(f.expires_at, 'infinity') AS deadline, (SELECT m.expires_at FROM moved m) AS moved_to
FROM found f
