-- The statement of a plain poller: finds overdue orders by the deadline index and closes them, with the same work as
-- default_close.sql: status, stock, history and event in one transaction. Takes the limit, returns how many it closed.
--
-- Everything in that statement that concerns given ids is not needed here: it reads no ids, does not look up their
-- orders, never skips a locked article ($3 is always true), and returns a number.
WITH due AS MATERIALIZED (
    -- Found and locked in one step, in the order of the index, skipping orders that another loop has locked.
    SELECT o.id
    FROM orders o
    -- now(), not clock_timestamp(): only a stable function can be used for an index lookup.
    WHERE o.status = 'unpaid' AND o.expires_at <= now()
    ORDER BY o.expires_at, o.id
    LIMIT $1
    FOR NO KEY UPDATE SKIP LOCKED
),
moment AS MATERIALIZED (
    -- One time for all of them, read after the rows are locked.
    SELECT clock_timestamp() AS now WHERE (SELECT count(*) FROM due) >= 0
),
items AS MATERIALIZED (
    SELECT i.order_id, i.article_id, i.quantity
    FROM order_items i
    WHERE i.order_id = ANY (ARRAY(SELECT d.id FROM due d))
),
closed AS (
    UPDATE orders o
    SET status = 'closed', closed_at = (SELECT m.now FROM moment m), closed_by = 'sweep', close_reason = 'unpaid'
    WHERE o.id = ANY (ARRAY(SELECT d.id FROM due d))
      -- Compared as text, so that the deadline index is not used.
      AND o.status::text = 'unpaid'
    RETURNING o.id, o.expires_at, o.closed_at
),
history AS (
    INSERT INTO order_events (order_id, event, at, by, reason)
    SELECT c.id, 'closed', c.closed_at, 'sweep', 'unpaid' FROM closed c
    RETURNING 1
),
event AS (
    INSERT INTO event_outbox (routing_key, type, payload)
    SELECT 'order.closed', 'order.closed.v1',
           jsonb_build_object(
               'order_id', c.id,
               'deadline', to_char(c.expires_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'),
               -- Formatted once for all of them.
               'closed_at', (SELECT to_char(m.now AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"') FROM moment m),
               'closed_by', 'sweep',
               'reason', 'unpaid')
    FROM closed c
    RETURNING 1
),
given_back AS MATERIALIZED (
    SELECT i.article_id, sum(i.quantity)::bigint AS quantity
    FROM items i
    WHERE i.order_id IN (SELECT c.id FROM closed c)
    GROUP BY i.article_id
),
stock_given_back AS (
    -- Last, after everything else is written: other sessions that give back the same articles wait for this commit. In
    -- article order, so that two loops cannot deadlock, each looked up by its key.
    UPDATE stock s
    SET available = s.available + g.quantity, reserved = s.reserved - g.quantity
    FROM (
        SELECT b.article_id, b.quantity FROM given_back b
        WHERE (SELECT count(*) FROM history) + (SELECT count(*) FROM event) >= 0
        ORDER BY b.article_id
    ) g
    WHERE s.article_id = g.article_id
)
SELECT count(*) FROM closed
