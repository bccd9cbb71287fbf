-- Holds the claims of orders that this worker ends, and writes down which of their attempts are proved to be closed.
--
--   $1 kind    text
--   $2 ids     text[]    order ids as the orders table prints them
--   $3 leases  bigint[]  the lease of each
--   $4 attempt_orders text[], $5 providers text[], $6 references text[]  the attempts that are proved to be closed
--
--   order_id text, claimed_by text: the claims whose lease this worker still has
--
-- The first statement of a transaction that closes the orders (the close statement) and ends their claims (the function end_claims).
-- It waits for no order's row, and the close skips those that are locked: so a payment, which locks the order, then its claim
-- and then its attempt, cannot deadlock with it.
WITH held AS MATERIALIZED (
    -- In one order, so that two sessions cannot deadlock. The lease is compared on the locked row. IS TRUE, so that the list is
    -- looked up in a hash table: a join would be planned for one row, and would compare each row of a batch with every other.
    -- kind || '' and (… IS NULL) IS TRUE, so that the primary key is used and not the index of what is due, which holds every
    -- claimed order.
    SELECT c.order_id, c.claimed_by
    FROM close_attempts c
    WHERE c.order_id = ANY ($2::text[]) AND c.kind || '' = $1::text
      AND ((c.order_id, c.lease) IN (SELECT * FROM unnest($2::text[], $3::bigint[]))) IS TRUE
      AND (c.unresolved_at IS NULL) IS TRUE
    ORDER BY c.order_id
    FOR NO KEY UPDATE OF c
),
attempts_closed AS (
    -- What is proved is proved, whatever becomes of the order; but only under the lease.
    UPDATE payment_attempts p
    SET state = 'closed'
    FROM unnest($4::text[], $5::text[], $6::text[]) AS v (order_id, provider, reference)
    WHERE p.provider = v.provider AND p.reference = v.reference AND p.order_id = v.order_id AND p.kind = $1::text
      AND p.state IN ('open', 'paid') AND (v.order_id IN (SELECT h.order_id FROM held h)) IS TRUE
)
SELECT h.order_id, h.claimed_by FROM held h
