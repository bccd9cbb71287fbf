-- orders.close_sql for public.web_orders and public.phone_orders. One call closes many orders of both.
WITH asked AS MATERIALIZED (
    -- A malformed id must not fail the whole batch on the cast.
    SELECT g.text_id, split_part(g.text_id, '-', 1) AS source,
           CASE WHEN g.text_id ~ '^(web|phone)-[1-9][0-9]{0,17}$' THEN split_part(g.text_id, '-', 2)::bigint END AS id
    FROM (SELECT DISTINCT unnest($1::text[]) AS text_id) AS g
),
there AS MATERIALIZED (
    -- Orders that exist here but are not locked below are held by another session.
    SELECT 'web' AS source, w.id FROM public.web_orders w
    WHERE w.id = ANY (ARRAY(SELECT a.id FROM asked a WHERE a.source = 'web'))
    UNION ALL
    SELECT 'phone', p.id FROM public.phone_orders p
    WHERE p.id = ANY (ARRAY(SELECT a.id FROM asked a WHERE a.source = 'phone'))
),
locked_web AS MATERIALIZED (
    SELECT w.* FROM public.web_orders w
    WHERE w.id = ANY (ARRAY(SELECT t.id FROM there t WHERE t.source = 'web'))
    ORDER BY w.id
    FOR NO KEY UPDATE SKIP LOCKED
),
locked_phone AS MATERIALIZED (
    -- Behind those of the other table, always in this order.
    SELECT p.* FROM public.phone_orders p
    WHERE p.id = ANY (ARRAY(SELECT t.id FROM there t WHERE t.source = 'phone' AND (SELECT count(*) FROM locked_web) >= 0))
    ORDER BY p.id
    FOR NO KEY UPDATE SKIP LOCKED
),
locked AS MATERIALIZED (
    SELECT 'web' AS source, w.* FROM locked_web w UNION ALL SELECT 'phone', p.* FROM locked_phone p
),
moment AS MATERIALIZED (
    -- Read after the rows are locked.
    SELECT clock_timestamp() AS now WHERE (SELECT count(*) FROM locked) >= 0
),
due AS MATERIALIZED (
    -- No message can carry a deadline before the year 1, such as -infinity for a time that is not set.
    SELECT l.source, l.id FROM locked l, moment m
    WHERE l.state = 'open' AND l.pay_until <= m.now AND l.pay_until >= '0001-01-01 00:00:00+00'
),
closed_web AS (
    UPDATE public.web_orders w SET state = 'expired'
    WHERE w.id = ANY (ARRAY(SELECT d.id FROM due d WHERE d.source = 'web')) AND w.state = 'open'
    RETURNING 'web-' || w.id::text AS order_id, w.pay_until
),
closed_phone AS (
    UPDATE public.phone_orders p SET state = 'expired'
    WHERE p.id = ANY (ARRAY(SELECT d.id FROM due d WHERE d.source = 'phone')) AND p.state = 'open'
    RETURNING 'phone-' || p.id::text AS order_id, p.pay_until
),
closed AS MATERIALIZED (
    SELECT * FROM closed_web UNION ALL SELECT * FROM closed_phone
),
history AS (
    -- In the same statement, so that each close has its row or has not happened.
    INSERT INTO public.order_history (order_ref, at, old_state, new_state, by)
    SELECT c.order_id, m.now, 'open', 'expired', $2::text FROM closed c, moment m
),
event AS (
    -- Announced on order.events; leave it out if nothing listens. Times are in UTC, whatever the session's zone.
    INSERT INTO event_outbox (routing_key, type, payload)
    SELECT 'order.closed', 'order.closed.v1',
           jsonb_build_object(
               'order_id', c.order_id,
               'deadline', to_char(c.pay_until AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'),
               'closed_at', to_char(m.now AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'),
               'closed_by', $2::text,
               'reason', 'unpaid')
    FROM closed c, moment m
)
SELECT a.text_id AS order_id,
       CASE
           WHEN a.id IS NULL THEN 'malformed'
           WHEN a.text_id IN (SELECT c.order_id FROM closed c) THEN 'closed'
           WHEN l.id IS NULL THEN 'busy'
           WHEN l.state = 'paid' THEN 'paid'
           WHEN l.state = 'open' THEN 'not_due'
           ELSE 'already_closed'
       END AS outcome,
       l.pay_until AS deadline
FROM asked a
LEFT JOIN locked l ON l.source = a.source AND l.id = a.id
WHERE a.id IS NULL OR (a.source, a.id) IN (SELECT t.source, t.id FROM there t)
