-- Closes those of the asked orders that are unpaid and due, and says of every one what it found.
--
--   $1 ids  text[]  order ids as they stand on the wire
--   $2 path text    which path closes them: alarm | sweep | manual (a statement that does not need it may leave it out)
--
--   order_id text, outcome text, deadline timestamptz
--   outcome: closed | paid | already_closed | closing | not_due | busy | malformed; no row: there is no such order.
--
-- One statement is one transaction: status, stock, history and event are committed together or not at all.
WITH asked AS (
    -- The pattern keeps a malformed id from failing the whole batch on the cast.
    SELECT text_id,
           CASE WHEN text_id ~* '^[0-9a-f]{8}-([0-9a-f]{4}-){3}[0-9a-f]{12}$' THEN text_id::uuid END AS id
    FROM (SELECT DISTINCT unnest($1::text[]) AS text_id) AS given
),
locked AS MATERIALIZED (
    -- By primary key and nothing else: a condition on the status would let the planner walk the deadline index, which
    -- on a table that was never analysed costs sixty times as much.
    -- In id order, so that two workers cannot deadlock. NO KEY, so that a foreign key's share lock is no obstacle.
    -- SKIP LOCKED: a payment in flight is not waited for.
    SELECT o.id, o.status, o.expires_at
    FROM orders o
    WHERE o.id = ANY (ARRAY(SELECT a.id FROM asked a WHERE a.id IS NOT NULL))
    ORDER BY o.id
    FOR NO KEY UPDATE SKIP LOCKED
),
closed AS (
    UPDATE orders o
    SET status = 'closed', closed_at = clock_timestamp(), closed_by = $2::text, close_reason = 'unpaid'
    -- clock_timestamp(), not now(): the transaction may have begun before the deadline.
    WHERE o.id = ANY (ARRAY(SELECT l.id FROM locked l WHERE l.status = 'unpaid' AND l.expires_at <= clock_timestamp()))
      -- The precondition once more, as text so that it cannot pull in the deadline index.
      AND o.status::text = 'unpaid'
    RETURNING o.id, o.expires_at, o.closed_at
),
given_back AS MATERIALIZED (
    SELECT i.article_id, sum(i.quantity)::bigint AS quantity
    FROM order_items i
    WHERE i.order_id = ANY (ARRAY(SELECT c.id FROM closed c))
    GROUP BY i.article_id
),
stock_locked AS MATERIALIZED (
    -- In article order, again so that two workers cannot deadlock.
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
    SELECT c.id, 'closed', c.closed_at, $2::text, 'unpaid' FROM closed c
),
event AS (
    INSERT INTO event_outbox (routing_key, type, payload)
    SELECT 'order.closed', 'order.closed.v1',
           jsonb_build_object(
               'order_id', c.id,
               'deadline', to_char(c.expires_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'),
               'closed_at', to_char(c.closed_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'),
               'closed_by', $2::text,
               'reason', 'unpaid')
    FROM closed c
)
SELECT a.text_id AS order_id,
       CASE
           WHEN a.id IS NULL THEN 'malformed'
           -- IN, not a join: the planner expects one row and would compare every order with every other.
           WHEN a.id IN (SELECT c.id FROM closed c) THEN 'closed'
           WHEN l.id IS NULL THEN 'busy'
           WHEN l.status = 'paid' THEN 'paid'
           WHEN l.status = 'closed' THEN 'already_closed'
           WHEN l.status = 'closing' THEN 'closing'
           ELSE 'not_due'
       END AS outcome,
       l.expires_at AS deadline
FROM asked a
LEFT JOIN locked l ON l.id = a.id
WHERE a.id IS NULL
   OR l.id IS NOT NULL
   -- Not locked by us but visible: somebody else holds it.
   OR EXISTS (SELECT FROM orders o WHERE o.id = a.id)
