-- orders.close_sql for public.purchases. Tables of yours by schema and name: the worker's own search path is its own.
WITH asked AS (
    -- The pattern keeps an id of another form from failing the whole batch on the cast.
    SELECT text_id, CASE WHEN text_id ~ '^(0|[1-9][0-9]{0,17})$' THEN text_id::bigint END AS id
    FROM (SELECT DISTINCT unnest($1::text[]) AS text_id) AS given
),
there AS MATERIALIZED (
    -- What is there and not locked below is held by somebody else.
    SELECT p.id FROM public.purchases p WHERE p.id = ANY (ARRAY(SELECT a.id FROM asked a WHERE a.id IS NOT NULL))
),
locked AS MATERIALIZED (
    -- By primary key, in its order, and past what somebody else holds.
    SELECT p.id, p.state, p.pay_until
    FROM public.purchases p
    WHERE p.id = ANY (ARRAY(SELECT t.id FROM there t))
    ORDER BY p.id
    FOR NO KEY UPDATE SKIP LOCKED
),
closed AS (
    UPDATE public.purchases p
    SET state = 'expired', expired_at = clock_timestamp()
    WHERE p.id = ANY (ARRAY(SELECT l.id FROM locked l WHERE l.state = 'open' AND l.pay_until <= clock_timestamp()))
      AND p.state = 'open'
    RETURNING p.id, p.pay_until, p.expired_at
),
-- Give stock back and write your history here, in the same statement: with the close or not at all.
event AS (
    -- Announced on order.events; leave it out if nobody listens.
    INSERT INTO event_outbox (routing_key, type, payload)
    SELECT 'order.closed', 'order.closed.v1',
           jsonb_build_object('order_id', c.id::text, 'deadline', c.pay_until, 'closed_at', c.expired_at,
                              'closed_by', $2::text, 'reason', 'unpaid')
    FROM closed c
)
SELECT a.text_id AS order_id,
       CASE
           WHEN a.id IS NULL THEN 'malformed'
           WHEN a.id IN (SELECT c.id FROM closed c) THEN 'closed'
           WHEN l.id IS NULL THEN 'busy'
           WHEN l.state = 'paid' THEN 'paid'
           WHEN l.state = 'open' THEN 'not_due'
           ELSE 'already_closed'
       END AS outcome,
       l.pay_until AS deadline
FROM asked a
LEFT JOIN locked l ON l.id = a.id
WHERE a.id IS NULL OR a.id IN (SELECT t.id FROM there t)
