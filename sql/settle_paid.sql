-- Settles claimed orders as paid, because a provider says that at least one attempt is paid; returns for each what it
-- found.
--
--   $1 ids     text[]    order ids
--   $2 leases  bigint[]  the lease of each
--   $3 answers text[]    what the providers answered, for the history
--   $4 attempt_orders text[], $5 providers text[], $6 references text[], $7 states text[]  attempts that are proved to be
--      `paid` or `closed`
--
--   order_id text, outcome text
--   outcome: settled | already_paid | already_closed | busy | amount_differs | lease_lost
--
-- One statement is one transaction: status, stock, history, event, attempts and the end of the claim are committed
-- together or not at all. Nothing happens without the lease.
WITH asked AS MATERIALIZED (
    SELECT a.id::uuid AS id, a.id AS text_id, a.lease, a.answers
    FROM unnest($1::text[], $2::bigint[], $3::text[]) AS a (id, lease, answers)
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
    SELECT a.id, a.text_id, a.answers
    FROM close_attempts c
    JOIN asked a ON a.text_id = c.order_id
    WHERE c.kind = 'order' AND c.order_id = ANY ($1::text[]) AND c.lease = a.lease AND c.unresolved_at IS NULL
      AND (a.id IN (SELECT l.id FROM locked l) OR a.id NOT IN (SELECT t.id FROM there t))
    ORDER BY c.order_id
    FOR NO KEY UPDATE OF c
),
moment AS MATERIALIZED (
    SELECT clock_timestamp() AS now WHERE (SELECT count(*) FROM held) >= 0
),
paid_attempts AS MATERIALIZED (
    -- What was paid, attempt by attempt. An attempt must belong to the order that it is to pay.
    SELECT p.order_id, p.provider, p.reference, p.amount_minor, p.currency
    FROM payment_attempts p
    JOIN proved v ON v.provider = p.provider AND v.reference = p.reference AND v.order_id = p.order_id
    WHERE v.state = 'paid'
),
sums AS MATERIALIZED (
    SELECT h.id, sum(p.amount_minor)::bigint AS paid_minor, min(p.currency) AS currency,
           jsonb_agg(jsonb_build_object('provider', p.provider, 'reference', p.reference,
                                        'amount_minor', p.amount_minor, 'currency', p.currency)
                     ORDER BY p.provider, p.reference) AS attempts,
           min(p.currency) = max(p.currency) AS is_one_currency
    FROM held h
    JOIN paid_attempts p ON p.order_id = h.text_id
    GROUP BY h.id
),
payable AS MATERIALIZED (
    -- Where the shop says what the order costs, a part of it never pays it.
    SELECT l.id, s.paid_minor, s.currency, s.attempts, s.paid_minor - l.amount_minor AS surplus_minor
    FROM locked l
    JOIN sums s ON s.id = l.id
    WHERE l.status = 'closing'
      AND (l.amount_minor IS NULL OR s.paid_minor >= l.amount_minor)
      AND (l.currency IS NULL OR (s.is_one_currency AND s.currency = l.currency))
),
paid AS (
    UPDATE orders o
    SET status = 'paid', next_attempt_at = NULL, paid_at = (SELECT m.now FROM moment m)
    WHERE o.id = ANY (ARRAY(SELECT p.id FROM payable p))
      -- The precondition again, as text so that the planner uses the primary key.
      AND o.status::text = 'closing'
    RETURNING o.id, o.expires_at, o.paid_at
),
history AS (
    INSERT INTO order_events (order_id, event, at, by, reason, answers)
    SELECT p.id, 'paid', p.paid_at, 'provider', 'the provider had the money when the order was to be closed',
           nullif(h.answers, '')
    FROM paid p
    JOIN held h ON h.id = p.id
    RETURNING 1
),
event AS (
    INSERT INTO event_outbox (routing_key, type, payload)
    SELECT 'order.paid_late_settled', 'order.paid_late_settled.v1',
           jsonb_build_object(
               'order_id', p.id,
               'deadline', to_char(p.expires_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'),
               'settled_at', to_char(p.paid_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'),
               'attempts', y.attempts)
           -- More than the order costs: a customer who paid twice.
           || CASE WHEN y.surplus_minor > 0
                   THEN jsonb_build_object('surplus_minor', y.surplus_minor) ELSE '{}' END
    FROM paid p
    JOIN payable y ON y.id = p.id
    RETURNING 1
),
attempts_ended AS (
    -- What is proved is proved, whatever becomes of the order; but only under the lease.
    UPDATE payment_attempts p
    SET state = v.state
    FROM proved v
    WHERE p.provider = v.provider AND p.reference = v.reference AND p.order_id = v.order_id AND p.state = 'open'
      AND v.order_id IN (SELECT h.text_id FROM held h)
    RETURNING 1
),
finished AS (
    -- Paid by another session, or now. Money for an order that is closed stays, to be listed for a person.
    DELETE FROM close_attempts c
    USING held h
    JOIN locked l ON l.id = h.id
    WHERE c.kind = 'order' AND c.order_id = h.text_id
      AND (h.id IN (SELECT o.id FROM paid o) OR l.status = 'paid')
    RETURNING 1
),
consumed AS MATERIALIZED (
    SELECT i.article_id, sum(i.quantity)::bigint AS quantity
    FROM order_items i
    WHERE i.order_id IN (SELECT p.id FROM paid p)
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
           WHEN a.id NOT IN (SELECT h.id FROM held h) THEN 'lease_lost'
           WHEN l.status = 'paid' THEN 'already_paid'
           WHEN l.id IS NULL OR l.status <> 'closing' THEN 'already_closed'
           ELSE 'amount_differs'
       END AS outcome
FROM asked a
LEFT JOIN locked l ON l.id = a.id
