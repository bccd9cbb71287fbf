-- Settles claimed orders as paid, because a provider says that at least one attempt is paid; returns for each what it
-- found.
--
--   $1 ids     text[]    order ids
--   $2 leases  bigint[]  the lease of each
--   $3 answers jsonb     order id -> what the providers answered, for the history
--   $4 attempt_orders text[], $5 providers text[], $6 references text[], $7 states text[]  attempts that are proved to be
--      `paid` or `closed`
--
--   order_id text, outcome text
--   outcome: settled | already_paid | already_closed | busy | amount_differs | lease_lost
--
-- One statement is one transaction: status, stock, history, event, attempts and the end of the claim are committed
-- together or not at all. Nothing happens without the lease.
WITH asked AS MATERIALIZED (
    SELECT a.id::uuid AS id, a.id AS text_id, a.lease FROM unnest($1::text[], $2::bigint[]) AS a (id, lease)
),
proved AS MATERIALIZED (
    SELECT p.order_id, p.provider, p.reference, p.state
    FROM unnest($4::text[], $5::text[], $6::text[], $7::text[]) AS p (order_id, provider, reference, state)
),
there AS MATERIALIZED (
    SELECT o.id FROM orders o WHERE o.id = ANY (ARRAY(SELECT a.id FROM asked a))
),
locked AS MATERIALIZED (
    -- The order's row first, as every payment does; in id order and without waiting, as in sql/close_claimed.sql.
    SELECT o.id, o.status, o.expires_at, o.amount_minor, o.currency
    FROM orders o
    WHERE o.id = ANY (ARRAY(SELECT t.id FROM there t))
    ORDER BY o.id
    FOR NO KEY UPDATE SKIP LOCKED
),
held AS MATERIALIZED (
    -- The lease is compared on the locked row.
    -- IS TRUE and kind || '': as in sql/close_claimed.sql.
    SELECT c.order_id::uuid AS id
    FROM close_attempts c
    WHERE c.order_id = ANY (ARRAY(SELECT l.id::text FROM locked l)) AND c.kind || '' = 'order'
      AND ((c.order_id, c.lease) IN (SELECT a.text_id, a.lease FROM asked a)) IS TRUE
      AND c.unresolved_at IS NULL
    ORDER BY c.order_id
    FOR NO KEY UPDATE OF c
),
moment AS MATERIALIZED (
    SELECT clock_timestamp() AS now WHERE (SELECT count(*) FROM held) >= 0
),
payable AS MATERIALIZED (
    SELECT l.id, l.expires_at, s.attempts, s.paid_minor - l.amount_minor AS surplus_minor
    FROM locked l
    CROSS JOIN LATERAL (
        -- What was paid, attempt by attempt. An attempt must belong to the order that it is to pay.
        SELECT sum(p.amount_minor)::bigint AS paid_minor, min(p.currency) AS currency, max(p.currency) AS other_currency,
               jsonb_agg(jsonb_build_object('provider', p.provider, 'reference', p.reference,
                                            'amount_minor', p.amount_minor, 'currency', p.currency)
                         ORDER BY p.provider, p.reference) AS attempts
        FROM payment_attempts p
        WHERE p.order_id = l.id::text
          AND ((p.order_id, p.provider, p.reference) IN (
              SELECT v.order_id, v.provider, v.reference FROM proved v WHERE v.state = 'paid')) IS TRUE
    ) AS s
    WHERE l.status = 'closing' AND (l.id IN (SELECT h.id FROM held h)) IS TRUE
      AND s.attempts IS NOT NULL
      -- Where the shop says what the order costs, a part of it never pays it.
      AND (l.amount_minor IS NULL OR s.paid_minor >= l.amount_minor)
      AND (l.currency IS NULL OR (s.currency = l.currency AND s.other_currency = l.currency))
),
paid AS (
    UPDATE orders o
    SET status = 'paid', next_attempt_at = NULL, paid_at = (SELECT m.now FROM moment m)
    WHERE o.id = ANY (ARRAY(SELECT p.id FROM payable p))
      -- The precondition again, as text so that the planner uses the primary key.
      AND o.status::text = 'closing'
    RETURNING o.id, o.paid_at
),
history AS (
    INSERT INTO order_events (order_id, event, at, by, reason, answers)
    SELECT p.id, 'paid', p.paid_at, 'provider', 'the provider had the money when the order was to be closed',
           nullif($3::jsonb ->> p.id::text, '')
    FROM paid p
    RETURNING 1
),
event AS (
    INSERT INTO event_outbox (routing_key, type, payload)
    SELECT 'order.paid_late_settled', 'order.paid_late_settled.v1',
           jsonb_build_object(
               'order_id', y.id,
               'deadline', to_char(y.expires_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'),
               'settled_at', (SELECT to_char(m.now AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"') FROM moment m),
               'attempts', y.attempts)
           -- More than the order costs: a customer who paid twice.
           || CASE WHEN y.surplus_minor > 0
                   THEN jsonb_build_object('surplus_minor', y.surplus_minor) ELSE '{}' END
    FROM payable y
    WHERE (y.id IN (SELECT p.id FROM paid p)) IS TRUE
    RETURNING 1
),
attempts_ended AS (
    -- What is proved is proved, whatever becomes of the order; but only under the lease.
    UPDATE payment_attempts p
    SET state = v.state
    FROM proved v
    WHERE p.provider = v.provider AND p.reference = v.reference AND p.order_id = v.order_id AND p.state = 'open'
      AND (v.order_id IN (SELECT h.id::text FROM held h)) IS TRUE
    RETURNING 1
),
finished AS (
    -- Paid by another session, or now. Money for an order that is closed stays, to be listed for a person.
    DELETE FROM close_attempts c
    WHERE c.kind || '' = 'order'
      AND c.order_id = ANY (ARRAY(
          SELECT p.id::text FROM paid p UNION ALL SELECT l.id::text FROM locked l WHERE l.status = 'paid'))
      AND ((c.order_id, c.lease) IN (SELECT a.text_id, a.lease FROM asked a)) IS TRUE
    RETURNING 1
),
consumed AS MATERIALIZED (
    SELECT i.article_id, sum(i.quantity)::bigint AS quantity
    FROM order_items i
    WHERE i.order_id = ANY (ARRAY(SELECT p.id FROM paid p))
    GROUP BY i.article_id
),
stock_consumed AS (
    -- As a payment does. Last, after all other writes, and in article order, as in sql/close.sql.
    UPDATE stock s
    SET reserved = s.reserved - g.quantity
    FROM (
        SELECT b.article_id, b.quantity FROM consumed b
        WHERE (SELECT count(*) FROM history) + (SELECT count(*) FROM event)
            + (SELECT count(*) FROM attempts_ended) + (SELECT count(*) FROM finished) >= 0
        ORDER BY b.article_id
    ) g
    WHERE s.article_id = g.article_id
)
SELECT a.text_id AS order_id,
       CASE
           WHEN a.id IN (SELECT p.id FROM paid p) THEN 'settled'
           WHEN l.id IS NULL AND a.id IN (SELECT t.id FROM there t) THEN 'busy'
           -- Deleted.
           WHEN l.id IS NULL THEN 'already_closed'
           WHEN a.id NOT IN (SELECT h.id FROM held h) THEN 'lease_lost'
           WHEN l.status = 'paid' THEN 'already_paid'
           WHEN l.status <> 'closing' THEN 'already_closed'
           ELSE 'amount_differs'
       END AS outcome
FROM asked a
LEFT JOIN locked l ON l.id = a.id
