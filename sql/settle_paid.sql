-- Settles claimed orders as paid, because a provider says that at least one attempt is paid; returns for each what it
-- found.
--
--   $1 kind    text
--   $2 ids     text[]    order ids as the orders table prints them
--   $3 leases  bigint[]  the lease of each
--   $4 answers jsonb     order id -> what the providers answered, for the history; an object, because the planner joins
--                        two lists of unknown length by comparing each with every other
--   $5 attempt_orders text[], $6 providers text[], $7 references text[], $8 states text[]  attempts, and what the provider
--      said of each: `paid`; `closed`; `differs` (paid, but not what the attempt was to pay); `refunded`
--   $9 amounts bigint[], $10 currencies text[]  what was received of an attempt that differs; otherwise NULL
--
--   order_id text, outcome text, deadline timestamptz
--   outcome: those of the function settle_asked_order | busy | lease_lost
--
-- One statement is one transaction: status, money, stock, resources, history, event, attempts and the end of the claim
-- are committed together or not at all. Nothing happens without the lease.
WITH asked AS MATERIALIZED (
    SELECT a.order_id, a.lease FROM unnest($2::text[], $3::bigint[]) AS a (order_id, lease)
),
proved AS MATERIALIZED (
    SELECT p.order_id, p.provider, p.reference, p.state, p.amount_minor, p.currency
    FROM unnest($5::text[], $6::text[], $7::text[], $8::text[], $9::bigint[], $10::text[])
         AS p (order_id, provider, reference, state, amount_minor, currency)
),
locked AS MATERIALIZED (
    -- The order's row first, as every payment does, without waiting for one payment in flight; an order that is deleted has
    -- none. In one order, so that two workers cannot deadlock.
    SELECT o.order_id, l.state, l.deadline
    FROM (SELECT a.order_id FROM asked a ORDER BY a.order_id) o
    CROSS JOIN LATERAL lock_free_order($1::text, o.order_id) l
),
held AS MATERIALIZED (
    -- The lease is compared on the locked row. IS TRUE and kind || '': as in sql/hold_claimed.sql.
    SELECT c.order_id
    FROM close_attempts c
    WHERE c.order_id = ANY (ARRAY(SELECT l.order_id FROM locked l WHERE l.state IS DISTINCT FROM 'busy'))
      AND c.kind || '' = $1::text
      AND ((c.order_id, c.lease) IN (SELECT a.order_id, a.lease FROM asked a)) IS TRUE
      AND (c.unresolved_at IS NULL) IS TRUE
    ORDER BY c.order_id
    FOR NO KEY UPDATE OF c
),
money AS MATERIALIZED (
    -- What was received, attempt by attempt. An attempt must belong to the order that it is to pay.
    SELECT p.order_id, p.provider, p.reference, coalesce(v.amount_minor, p.amount_minor) AS amount_minor,
           coalesce(v.currency, p.currency) AS currency, v.state = 'paid' AS whole, p.created_at
    FROM proved v
    JOIN payment_attempts p ON p.provider = v.provider AND p.reference = v.reference AND p.order_id = v.order_id
    WHERE v.state IN ('paid', 'differs') AND p.kind = $1::text
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
        WHERE (m.order_id IN (SELECT h.order_id FROM held h)) IS TRUE
        UNION ALL
        SELECT h.order_id, NULL, NULL, NULL, NULL, NULL, NULL FROM held h
    ) r
    GROUP BY r.order_id
),
settled AS MATERIALIZED (
    SELECT f.order_id,
           settle_asked_order($1::text, f.order_id, coalesce(f.providers, '{}'), coalesce(f.refs, '{}'),
                              coalesce(f.amounts, '{}'), coalesce(f.currencies, '{}'), coalesce(f.whole, '{}'),
                              $4::jsonb ->> f.order_id) AS outcome
    FROM of_order f
),
attempts_ended AS (
    -- What is proved is proved, whatever becomes of the order; but only under the lease.
    UPDATE payment_attempts p
    SET state = v.state
    FROM proved v
    WHERE p.provider = v.provider AND p.reference = v.reference AND p.order_id = v.order_id AND p.kind = $1::text
      AND v.state IN ('closed', 'refunded') AND p.state IN ('open', 'paid')
      AND (v.order_id IN (SELECT h.order_id FROM held h)) IS TRUE
    RETURNING p.order_id, p.provider, p.reference, p.state
),
refunds AS (
    -- The order is paid by another attempt, so that no person looks at it: it is in the history, which a mapped table has not.
    INSERT INTO order_events (order_id, event, by, reason)
    SELECT o.id, 'payment_refunded', 'provider', e.provider || ' ' || e.reference
    FROM attempts_ended e JOIN orders o ON o.id = uuid_of(e.order_id)
    WHERE e.state = 'refunded' AND $1::text = 'order'
      AND (e.order_id IN (SELECT l.order_id FROM locked l WHERE l.state <> 'busy')) IS TRUE
    RETURNING 1
),
finished AS (
    DELETE FROM close_attempts c
    WHERE c.kind || '' = $1::text
      AND c.order_id = ANY (ARRAY(
          SELECT s.order_id FROM settled s WHERE s.outcome NOT IN ('amount_differs', 'kept')))
      AND ((c.order_id, c.lease) IN (SELECT a.order_id, a.lease FROM asked a)) IS TRUE
    RETURNING 1
),
consumed AS MATERIALIZED (
    -- Last, after all other writes, as in the close statement.
    SELECT consume_for_orders($1::text, ARRAY(SELECT s.order_id FROM settled s WHERE s.outcome = 'settled'))
    WHERE (SELECT count(*) FROM refunds) + (SELECT count(*) FROM finished) >= 0
)
SELECT a.order_id,
       CASE
           WHEN s.outcome IS NOT NULL THEN s.outcome
           WHEN a.order_id IN (SELECT l.order_id FROM locked l WHERE l.state = 'busy') THEN 'busy'
           ELSE 'lease_lost'
       END AS outcome,
       -- An object, as $4, and no join.
       ((SELECT jsonb_object_agg(l.order_id, l.deadline) FROM locked l) ->> a.order_id)::timestamptz AS deadline
FROM asked a
LEFT JOIN settled s ON s.order_id = a.order_id
WHERE (SELECT count(*) FROM consumed) >= 0
