-- Settles claimed orders as paid, because a provider says that at least one attempt is paid; returns for each what it
-- found.
--
--   $1 ids     text[]    order ids
--   $2 leases  bigint[]  the lease of each
--   $3 wait    boolean   true: wait for a locked stock row, up to lock_timeout; false: report its orders as busy
--   $4 answers jsonb     order id -> what the providers answered, for the history
--   $5 attempt_orders text[], $6 providers text[], $7 references text[], $8 states text[]  attempts, and what the provider
--      said of each: `paid`; `closed`; `differs` (paid, but not what the attempt was to pay); `refunded`
--   $9 amounts bigint[], $10 currencies text[]  what was received of an attempt that differs; otherwise NULL
--
--   order_id text, outcome text, deadline timestamptz
--   outcome: those of the function settle_asked_order | busy | lease_lost
--
-- One statement is one transaction: status, money, stock, resources, history, event, attempts and the end of the claim
-- are committed together or not at all. Nothing happens without the lease.
--
-- A template: the line in braces is replaced by that part of sql/close.sql (src/effects/closing/statements.rs).
WITH asked AS MATERIALIZED (
    SELECT a.id::uuid AS id, a.id AS text_id, a.lease FROM unnest($1::text[], $2::bigint[]) AS a (id, lease)
),
proved AS MATERIALIZED (
    SELECT p.order_id, p.provider, p.reference, p.state, p.amount_minor, p.currency
    FROM unnest($5::text[], $6::text[], $7::text[], $8::text[], $9::bigint[], $10::text[])
         AS p (order_id, provider, reference, state, amount_minor, currency)
),
there AS MATERIALIZED (
    SELECT o.id FROM orders o WHERE o.id = ANY (ARRAY(SELECT a.id FROM asked a))
),
locked AS MATERIALIZED (
    -- The order's row first, as every payment does; in id order and without waiting, as in sql/close_claimed.sql.
    SELECT o.id, o.status, o.expires_at
    FROM orders o
    WHERE o.id = ANY (ARRAY(SELECT t.id FROM there t))
    ORDER BY o.id
    FOR NO KEY UPDATE SKIP LOCKED
),
mine AS MATERIALIZED (
    -- Locked, or deleted: then its money is late.
    SELECT l.id FROM locked l UNION ALL SELECT a.id FROM asked a WHERE a.id NOT IN (SELECT t.id FROM there t)
),
held AS MATERIALIZED (
    -- The lease is compared on the locked row.
    -- IS TRUE and kind || '': as in sql/close_claimed.sql.
    SELECT c.order_id::uuid AS id
    FROM close_attempts c
    WHERE c.order_id = ANY (ARRAY(SELECT m.id::text FROM mine m)) AND c.kind || '' = 'order'
      AND ((c.order_id, c.lease) IN (SELECT a.text_id, a.lease FROM asked a)) IS TRUE
      AND (c.unresolved_at IS NULL) IS TRUE
    ORDER BY c.order_id
    FOR NO KEY UPDATE OF c
),
due AS MATERIALIZED (
    SELECT l.id FROM locked l WHERE l.status = 'closing' AND (l.id IN (SELECT h.id FROM held h)) IS TRUE
),
{reservations of sql/close.sql}
money AS MATERIALIZED (
    -- What was received, attempt by attempt. An attempt must belong to the order that it is to pay.
    SELECT p.order_id, p.provider, p.reference, coalesce(v.amount_minor, p.amount_minor) AS amount_minor,
           coalesce(v.currency, p.currency) AS currency, v.state = 'paid' AS whole, p.created_at
    FROM proved v
    JOIN payment_attempts p ON p.provider = v.provider AND p.reference = v.reference AND p.order_id = v.order_id
    WHERE v.state IN ('paid', 'differs')
),
of_order AS MATERIALIZED (
    -- A row for each held order, also without money: a union and no join, because the planner would compare each order of
    -- a batch with every other.
    SELECT r.order_id,
           array_agg(r.provider ORDER BY r.created_at, r.provider, r.reference) FILTER (WHERE r.whole IS NOT NULL)
               AS providers,
           array_agg(r.reference ORDER BY r.created_at, r.provider, r.reference) FILTER (WHERE r.whole IS NOT NULL)
               AS refs,
           array_agg(r.amount_minor ORDER BY r.created_at, r.provider, r.reference) FILTER (WHERE r.whole IS NOT NULL)
               AS amounts,
           array_agg(r.currency ORDER BY r.created_at, r.provider, r.reference) FILTER (WHERE r.whole IS NOT NULL)
               AS currencies,
           array_agg(r.whole ORDER BY r.created_at, r.provider, r.reference) FILTER (WHERE r.whole IS NOT NULL) AS whole
    FROM (
        SELECT m.order_id, m.provider, m.reference, m.amount_minor, m.currency, m.whole, m.created_at
        FROM money m
        WHERE (m.order_id IN (SELECT h.id::text FROM held h)) IS TRUE
        UNION ALL
        SELECT h.id::text, NULL, NULL, NULL, NULL, NULL, NULL FROM held h
    ) r
    GROUP BY r.order_id
),
settled AS MATERIALIZED (
    SELECT f.order_id::uuid AS id,
           settle_asked_order(f.order_id, coalesce(f.providers, '{}'), coalesce(f.refs, '{}'),
                              coalesce(f.amounts, '{}'), coalesce(f.currencies, '{}'), coalesce(f.whole, '{}'),
                              $4::jsonb ->> f.order_id) AS outcome
    FROM of_order f
    WHERE f.order_id::uuid NOT IN (SELECT w.order_id FROM held_elsewhere w)
),
event AS (
    INSERT INTO event_outbox (routing_key, type, payload)
    SELECT 'order.paid_late_settled', 'order.paid_late_settled.v1',
           jsonb_build_object(
               'order_id', s.id,
               'deadline', to_char(f.deadline AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'),
               'settled_at', to_char(clock_timestamp() AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'),
               'attempts', f.attempts)
           -- More than the order costs: a customer who paid twice. It is late money.
           || CASE WHEN f.late_minor > 0 THEN jsonb_build_object('surplus_minor', f.late_minor) ELSE '{}' END
    FROM settled s
    CROSS JOIN LATERAL paid_attempts(s.id::text) AS f
    WHERE s.outcome = 'settled'
    RETURNING 1
),
attempts_ended AS (
    -- What is proved is proved, whatever becomes of the order; but only under the lease.
    UPDATE payment_attempts p
    SET state = v.state
    FROM proved v
    WHERE p.provider = v.provider AND p.reference = v.reference AND p.order_id = v.order_id
      AND v.state IN ('closed', 'refunded') AND p.state IN ('open', 'paid')
      AND (v.order_id IN (SELECT h.id::text FROM held h)) IS TRUE
    RETURNING p.order_id, p.provider, p.reference, p.state
),
refunds AS (
    -- The order is paid by another attempt, so that no person looks at it: it is in the history.
    INSERT INTO order_events (order_id, event, by, reason)
    SELECT e.order_id::uuid, 'payment_refunded', 'provider', e.provider || ' ' || e.reference
    FROM attempts_ended e
    WHERE e.state = 'refunded' AND (e.order_id IN (SELECT l.id::text FROM locked l)) IS TRUE
    RETURNING 1
),
finished AS (
    DELETE FROM close_attempts c
    WHERE c.kind || '' = 'order'
      AND c.order_id = ANY (ARRAY(
          SELECT s.id::text FROM settled s WHERE s.outcome NOT IN ('amount_differs', 'kept')))
      AND ((c.order_id, c.lease) IN (SELECT a.text_id, a.lease FROM asked a)) IS TRUE
    RETURNING 1
),
consumed AS MATERIALIZED (
    -- Last, after all other writes, as in sql/close.sql.
    SELECT consume_reserved(ARRAY(SELECT s.id FROM settled s WHERE s.outcome = 'settled'))
    WHERE (SELECT count(*) FROM event) + (SELECT count(*) FROM refunds) + (SELECT count(*) FROM finished) >= 0
)
SELECT a.text_id AS order_id,
       CASE
           WHEN s.id IS NOT NULL THEN s.outcome
           WHEN a.id NOT IN (SELECT m.id FROM mine m) OR a.id IN (SELECT w.order_id FROM held_elsewhere w) THEN 'busy'
           ELSE 'lease_lost'
       END AS outcome,
       -- An object, as $4, and no join.
       ((SELECT jsonb_object_agg(l.id::text, l.expires_at) FROM locked l) ->> a.text_id)::timestamptz AS deadline
FROM asked a
LEFT JOIN settled s ON s.id = a.id
WHERE (SELECT count(*) FROM consumed) >= 0
