-- orders.close_sql for public.purchases. Name your tables with their schema: the worker has its own search path.
--
-- One call closes many orders, up to worker.batch_size (800): your statement must be correct for several orders of the
-- same article.
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
    -- Orders that exist here but are not locked below are held by another session.
    SELECT p.id FROM public.purchases p WHERE p.id = ANY (ARRAY(SELECT a.id FROM asked a WHERE a.id IS NOT NULL))
),
locked AS MATERIALIZED (
    -- By primary key and in its order, skipping orders that another session holds, such as a payment.
    SELECT p.id, p.state, p.pay_until
    FROM public.purchases p
    WHERE p.id = ANY (ARRAY(SELECT t.id FROM there t))
    ORDER BY p.id
    FOR NO KEY UPDATE SKIP LOCKED
),
decided AS MATERIALIZED (
    -- Conditions outside the locked row are read after the lock, by a function that sees all commits so far.
    SELECT l.id, l.pay_until,
           CASE WHEN l.state = 'open' AND public.purchase_is_paid(l.id) THEN 'paid' ELSE l.state END AS state
    FROM locked l
),
closed AS (
    UPDATE public.purchases p
    SET state = 'expired', expired_at = clock_timestamp()
    WHERE p.id = ANY (ARRAY(SELECT d.id FROM decided d WHERE d.state = 'open' AND d.pay_until <= clock_timestamp()
                            -- No message can carry an earlier one, such as -infinity for a time that is not set.
                            AND d.pay_until >= '0001-01-01 00:00:00+00'))
      AND p.state = 'open'
    RETURNING p.id, p.pay_until, p.expired_at
),
event AS (
    -- Announced on order.events; leave it out if nothing listens. Times are in UTC, whatever the session's zone.
    INSERT INTO event_outbox (routing_key, type, payload)
    SELECT 'order.closed', 'order.closed.v1',
           jsonb_build_object(
               'order_id', c.id::text,
               'deadline', to_char(c.pay_until AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'),
               'closed_at', to_char(c.expired_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'),
               'closed_by', $2::text,
               'reason', 'unpaid')
    FROM closed c
    RETURNING 1
),
given_back AS MATERIALIZED (
    -- Summed: UPDATE … FROM changes each row only once, so of several lines for one article it would apply one and lose
    -- the others.
    SELECT i.article, sum(i.quantity)::bigint AS quantity
    FROM public.purchase_lines i
    WHERE i.purchase_id = ANY (ARRAY(SELECT c.id FROM closed c))
    GROUP BY i.article
),
stock AS (
    -- In the same statement, so that stock is returned with the close or not at all. Last, and in article order, so
    -- that two workers cannot deadlock.
    UPDATE public.inventory s
    SET available = s.available + g.quantity, reserved = s.reserved - g.quantity
    FROM (
        SELECT b.article, b.quantity FROM given_back b
        WHERE (SELECT count(*) FROM event) >= 0
        ORDER BY b.article
    ) g
    WHERE s.article = g.article
)
SELECT a.text_id AS order_id,
       CASE
           WHEN a.id IS NULL THEN 'malformed'
           WHEN a.id IN (SELECT c.id FROM closed c) THEN 'closed'
           WHEN d.id IS NULL THEN 'busy'
           WHEN d.state = 'paid' THEN 'paid'
           WHEN d.state = 'open' THEN 'not_due'
           ELSE 'already_closed'
       END AS outcome,
       d.pay_until AS deadline
FROM asked a
LEFT JOIN decided d ON d.id = a.id
WHERE a.id IS NULL OR a.id IN (SELECT t.id FROM there t)
