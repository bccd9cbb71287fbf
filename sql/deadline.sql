-- Gives an unpaid order another deadline; an earlier one gets an alarm of its own.
--
--   $1 order_id text
--   $2 deadline timestamptz
--
--   status text, deadline timestamptz: as the order was before; moved_to timestamptz: the deadline that it has now, NULL
--   if it was not moved. No row: there is no such order.
--
-- For a later deadline the row is enough: the alarm that is under way finds the order not due and waits for the new one.
WITH found AS MATERIALIZED (
    SELECT o.id, o.status, o.expires_at
    FROM orders o
    WHERE o.id = $1::text::uuid
    FOR NO KEY UPDATE
),
moved AS (
    -- By the status that was found when the row was ours. The row's own would be read as it was when the statement began,
    -- and it may have waited for somebody who made the order unpaid.
    UPDATE orders o
    SET expires_at = $2::timestamptz
    WHERE o.id = (SELECT f.id FROM found f WHERE f.status = 'unpaid')
    -- What stands there now: a trigger may have refused it.
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
