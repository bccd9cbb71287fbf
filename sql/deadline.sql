-- Moves the deadline of an unpaid order; for an earlier deadline it also writes an alarm.
--
--   $1 order_id text
--   $2 deadline timestamptz
--
--   status text, deadline timestamptz: the order before the change; moved_to timestamptz: its new deadline, NULL if it was
--   not moved. No row: there is no such order.
--
-- For a later deadline the row is enough: the existing alarm finds the order not due and waits for the new deadline.
WITH found AS MATERIALIZED (
    SELECT o.id, o.status, o.expires_at
    FROM orders o
    WHERE o.id = $1::text::uuid
    FOR NO KEY UPDATE
),
moved AS (
    -- By the status that was read after the row was locked. The row's own status is that of the statement's start, and
    -- the statement may have waited for a session that made the order unpaid.
    UPDATE orders o
    SET expires_at = $2::timestamptz
    WHERE o.id = (SELECT f.id FROM found f WHERE f.status = 'unpaid')
    -- The stored deadline: a trigger may have changed or refused it.
    RETURNING o.expires_at
),
alarm AS (
    -- In the same transaction: the alarm exists if, and only if, the new deadline does.
    INSERT INTO alarm_outbox (order_id, deadline)
    SELECT f.id::text, m.expires_at
    FROM found f, moved m
    WHERE m.expires_at < f.expires_at
)
SELECT f.status::text AS status, f.expires_at AS deadline, (SELECT m.expires_at FROM moved m) AS moved_to
FROM found f
