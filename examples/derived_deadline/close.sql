-- orders.close_sql for public.bookings. One call closes many bookings, up to worker.batch_size (800).
WITH asked AS (
    -- A malformed id must not fail the whole batch on the cast. Accepts all of bigint, in the form that the table
    -- prints.
    SELECT text_id,
           CASE WHEN text_id ~ '^(0|-?[1-9][0-9]{0,18})$' THEN
               CASE WHEN text_id::numeric BETWEEN -9223372036854775808 AND 9223372036854775807 THEN text_id::bigint END
           END AS id
    FROM (SELECT DISTINCT unnest($1::text[]) AS text_id) AS given
),
there AS MATERIALIZED (
    -- Bookings that exist here but are not locked below are held by another session.
    SELECT b.id FROM public.bookings b WHERE b.id = ANY (ARRAY(SELECT a.id FROM asked a WHERE a.id IS NOT NULL))
),
locked AS MATERIALIZED (
    -- By primary key and in its order, skipping bookings that another session holds, such as a payment. The deadline is
    -- derived from the locked row: that is the one that counts.
    SELECT b.id, b.state, b.created_at + make_interval(mins => b.minutes_to_pay) AS deadline
    FROM public.bookings b
    WHERE b.id = ANY (ARRAY(SELECT t.id FROM there t))
    ORDER BY b.id
    FOR NO KEY UPDATE SKIP LOCKED
),
closed AS (
    UPDATE public.bookings b
    SET state = 'expired', expired_at = clock_timestamp()
    WHERE b.id = ANY (ARRAY(SELECT l.id FROM locked l WHERE l.state = 'open' AND l.deadline <= clock_timestamp()))
      AND b.state = 'open'
    RETURNING b.id, b.created_at + make_interval(mins => b.minutes_to_pay) AS deadline, b.expired_at
),
event AS (
    -- Announced on order.events; leave it out if nothing listens. Times are in UTC, whatever the session's zone.
    INSERT INTO event_outbox (routing_key, type, payload)
    SELECT 'order.closed', 'order.closed.v1',
           jsonb_build_object(
               'order_id', c.id::text,
               'deadline', to_char(c.deadline AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'),
               'closed_at', to_char(c.expired_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'),
               'closed_by', $2::text,
               'reason', 'unpaid')
    FROM closed c
    RETURNING 1
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
       l.deadline
FROM asked a
LEFT JOIN locked l ON l.id = a.id
WHERE a.id IS NULL OR a.id IN (SELECT t.id FROM there t)
