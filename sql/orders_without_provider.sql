-- Claimed orders that wait for a payment provider which no live worker has in its settings for their kind: lists them as
-- unresolved, announces them, and takes that back when a worker has it again.
--
--   queue text, orders bigint   how many wait, for each provider
--
-- Touches no order: it stays as it is, and its stock stays reserved.
WITH RECURSIVE served (kind, name) AS MATERIALIZED (
    SELECT k.kind, unnest(string_to_array(w.delays ->> ('kinds.' || k.kind || '.providers'), ', '))
    FROM order_timeout_workers w CROSS JOIN LATERAL unnest(w.kinds) AS k (kind)
    WHERE w.last_seen > pg_catalog.clock_timestamp() - interval '10 s'
),
queues (kind, name) AS (
    -- The names of all queues, one index lookup for each.
    (SELECT c.kind, c.queue FROM close_attempts c
     WHERE c.unresolved_at IS NULL ORDER BY c.kind, c.queue LIMIT 1)
    UNION ALL
    SELECT n.kind, n.queue
    FROM queues q
    CROSS JOIN LATERAL (
        SELECT c.kind, c.queue FROM close_attempts c
        WHERE c.unresolved_at IS NULL AND (c.kind, c.queue) > (q.kind, q.name) ORDER BY c.kind, c.queue LIMIT 1
    ) AS n
),
waiting AS MATERIALIZED (
    SELECT q.kind, d.order_id
    FROM queues q
    CROSS JOIN LATERAL (
        SELECT w.order_id
        FROM close_attempts w
        WHERE w.kind = q.kind AND w.queue = q.name AND w.unresolved_at IS NULL
          -- A worker that is just being replaced may have it.
          AND w.next_attempt_at <= statement_timestamp() - interval '5 s'
        ORDER BY w.next_attempt_at, w.order_id
        LIMIT 1000
        FOR NO KEY UPDATE SKIP LOCKED
    ) AS d
    WHERE q.name <> '' AND (q.kind, q.name) NOT IN (SELECT s.kind, s.name FROM served s)
      -- Workers that start together have registered by then.
      AND EXISTS (
          SELECT FROM order_timeout_workers v
          WHERE v.last_seen > pg_catalog.clock_timestamp() - interval '10 s'
            AND v.started_at < pg_catalog.clock_timestamp() - interval '5 s')
),
left_alone AS (
    UPDATE close_attempts c
    SET step = 'unresolved', unresolved_reason = 'no_provider', unresolved_at = clock_timestamp(), lease = NULL
    -- IS TRUE, so that the primary key is used, and not the index of what is due.
    WHERE c.order_id = ANY (ARRAY(SELECT d.order_id FROM waiting d))
      AND ((c.kind, c.order_id) IN (SELECT d.kind, d.order_id FROM waiting d)) IS TRUE
    RETURNING c.kind, c.order_id, c.queue, c.unresolved_at, c.last_answers
),
event AS (
    INSERT INTO event_outbox (kind, routing_key, type, payload)
    SELECT l.kind, 'order.unresolved', 'order.unresolved.v1',
           jsonb_build_object(
               'order_id', l.order_id,
               'unresolved_at', to_char(l.unresolved_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'),
               'reason', 'no_provider',
               'answers', l.last_answers)
           -- As in an alarm: the default kind is not named.
           || CASE WHEN l.kind = 'order' THEN '{}' ELSE jsonb_build_object('kind', l.kind) END
    FROM left_alone l
),
taken_back AS (
    UPDATE close_attempts c
    SET step = 'claimed', unresolved_reason = NULL, unresolved_at = NULL, next_attempt_at = clock_timestamp()
    WHERE c.unresolved_at IS NOT NULL AND c.unresolved_reason = 'no_provider'
      AND (c.kind, c.queue) IN (SELECT s.kind, s.name FROM served s)
)
SELECT n.queue, count(*) AS orders
FROM (
    SELECT l.queue FROM left_alone l
    UNION ALL
    SELECT c.queue FROM close_attempts c
    WHERE c.unresolved_at IS NOT NULL AND c.unresolved_reason = 'no_provider'
      AND (c.kind, c.queue) NOT IN (SELECT s.kind, s.name FROM served s)
) n
GROUP BY n.queue
ORDER BY n.queue
