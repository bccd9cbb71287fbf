-- What a plain poller runs: finds overdue orders by the deadline index and closes them, with the same work as
-- sql/close.sql: status, stock, history and event in one transaction. Takes the limit, returns how many it closed.
WITH due AS MATERIALIZED (
    SELECT o.id
    FROM orders o
    -- now(), not clock_timestamp(): only a stable function can be looked up in an index.
    WHERE o.status = 'unpaid' AND o.expires_at <= now()
    ORDER BY o.expires_at, o.id
    LIMIT $1
    FOR NO KEY UPDATE SKIP LOCKED
),
closed AS (
    UPDATE orders o
    SET status = 'closed', closed_at = clock_timestamp(), closed_by = 'sweep', close_reason = 'unpaid'
    WHERE o.id = ANY (ARRAY(SELECT d.id FROM due d))
    RETURNING o.id, o.expires_at, o.closed_at
),
given_back AS MATERIALIZED (
    SELECT i.article_id, sum(i.quantity)::bigint AS quantity
    FROM order_items i
    WHERE i.order_id = ANY (ARRAY(SELECT c.id FROM closed c))
    GROUP BY i.article_id
),
stock_locked AS MATERIALIZED (
    SELECT s.article_id
    FROM stock s
    WHERE s.article_id = ANY (ARRAY(SELECT g.article_id FROM given_back g))
    ORDER BY s.article_id
    FOR NO KEY UPDATE
),
stock_given_back AS (
    UPDATE stock s
    SET available = s.available + g.quantity, reserved = s.reserved - g.quantity
    FROM given_back g
    WHERE s.article_id = g.article_id
      AND s.article_id = ANY (ARRAY(SELECT l.article_id FROM stock_locked l))
),
history AS (
    INSERT INTO order_events (order_id, event, at, by, reason)
    SELECT c.id, 'closed', c.closed_at, 'sweep', 'unpaid' FROM closed c
),
event AS (
    INSERT INTO event_outbox (routing_key, type, payload)
    SELECT 'order.closed', 'order.closed.v1',
           jsonb_build_object(
               'order_id', c.id,
               'deadline', to_char(c.expires_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'),
               'closed_at', to_char(c.closed_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'),
               'closed_by', 'sweep',
               'reason', 'unpaid')
    FROM closed c
)
SELECT count(*) FROM closed
