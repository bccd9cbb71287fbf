-- Gives an unpaid order another deadline; an earlier one gets an alarm of its own.
--
--   $1 order_id text
--   $2 deadline timestamptz
--
--   status text, deadline timestamptz: as the order was before; no row: there is no such order.
--
-- For a later deadline the row is enough: the alarm that is under way finds the order not due and waits for the new one.
WITH found AS MATERIALIZED (
    SELECT o.id, o.status, o.expires_at
    FROM orders o
    WHERE o.id = $1::text::uuid
    FOR NO KEY UPDATE
),
moved AS (
    UPDATE orders o
    SET expires_at = $2::timestamptz
    WHERE o.id = (SELECT f.id FROM found f)
      AND o.status = 'unpaid'
),
alarm AS (
    -- In the same transaction: the alarm exists if, and only if, the new deadline does.
    INSERT INTO alarm_outbox (order_id, deadline)
    SELECT f.id::text, $2::timestamptz
    FROM found f
    WHERE f.status = 'unpaid' AND f.expires_at > $2::timestamptz
)
SELECT f.status::text AS status, f.expires_at AS deadline
FROM found f
