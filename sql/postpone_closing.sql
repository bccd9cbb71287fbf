-- Writes down what claimed orders wait for, and gives their leases back; returns the orders whose lease was still held.
--
--   $1 kind text
--   $2 ids text[], $3 leases bigint[]  the orders
--   $4 steps text[]           claimed | in_progress | no_answer | unresolved
--   $5 reasons text[]         why an order is unresolved; otherwise NULL
--   $6 until timestamptz[]    not before this
--   $7 queues text[], $8 rounds integer[], $9 has_waited boolean[]  as in the table
--   $10 answers text[]        what the providers answered in this round; empty: nothing was asked
--   $11 attempt_orders text[], $12 providers text[], $13 references text[]  the attempts that are proved to be closed
--
--   order_id text
--
-- Touches no order: it stays as it is, and its stock stays reserved.
WITH asked AS MATERIALIZED (
    SELECT *
    FROM unnest($2::text[], $3::bigint[], $4::text[], $5::text[], $6::timestamptz[], $7::text[], $8::integer[],
                $9::boolean[], $10::text[])
         AS a (order_id, lease, step, reason, until, queue, rounds, has_waited, answers)
),
held AS MATERIALIZED (
    -- In one order, so that two sessions cannot deadlock. The lease is compared on the locked row.
    SELECT c.order_id
    FROM close_attempts c
    WHERE c.order_id = ANY ($2::text[]) AND (c.unresolved_at IS NULL) IS TRUE
      -- IS TRUE and kind || '': as in sql/hold_claimed.sql.
      AND c.kind || '' = $1::text
      AND ((c.order_id, c.lease) IN (SELECT a.order_id, a.lease FROM asked a)) IS TRUE
    ORDER BY c.order_id
    FOR NO KEY UPDATE OF c
),
written AS (
    UPDATE close_attempts c
    SET step = a.step, next_attempt_at = a.until, queue = a.queue, rounds = a.rounds, has_waited = a.has_waited,
        lease = NULL, last_answers = coalesce(nullif(a.answers, ''), c.last_answers),
        unresolved_reason = a.reason,
        unresolved_at = CASE WHEN a.step = 'unresolved' THEN clock_timestamp() END
    FROM asked a
    WHERE c.kind || '' = $1::text AND c.order_id = a.order_id
      AND (a.order_id IN (SELECT h.order_id FROM held h)) IS TRUE
    RETURNING c.order_id, c.step, c.unresolved_reason, c.unresolved_at, c.last_answers
),
attempts_closed AS (
    -- So that no attempt is asked about again that is proved to be closed.
    UPDATE payment_attempts p
    SET state = 'closed'
    FROM unnest($11::text[], $12::text[], $13::text[]) AS v (order_id, provider, reference)
    WHERE p.provider = v.provider AND p.reference = v.reference AND p.order_id = v.order_id
      AND p.kind = $1::text AND p.state = 'open'
      AND (v.order_id IN (SELECT h.order_id FROM held h)) IS TRUE
),
event AS (
    -- For the person who must look at it.
    INSERT INTO event_outbox (kind, routing_key, type, payload)
    SELECT $1::text, 'order.unresolved', 'order.unresolved.v1',
           jsonb_build_object(
               'order_id', w.order_id,
               'unresolved_at', to_char(w.unresolved_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'),
               'reason', w.unresolved_reason,
               'answers', w.last_answers)
           -- As in an alarm: the default kind is not named.
           || CASE WHEN $1::text = 'order' THEN '{}' ELSE jsonb_build_object('kind', $1::text) END
    FROM written w
    WHERE w.step = 'unresolved'
)
SELECT w.order_id FROM written w
