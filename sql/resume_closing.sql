-- Takes over claimed orders whose time has come: for the first time, after a pause, or because the worker that had them
-- is gone and its lease is over. Renews the leases of orders that this worker goes on with.
--
--   $1 kind    text
--   $2 lease   float8    seconds until another worker may take them over
--   $3 queues  text[]    the queues that this worker serves and has room for; other orders are left to other workers
--   $4 limits  bigint[]  how many orders of each
--   $5 ids text[], $6 leases bigint[]  the orders whose leases are renewed
--
--   order_id text, lease bigint, queue text, rounds integer, has_waited boolean, was_judged boolean,
--   provider text, reference text, amount_minor bigint, currency text, state text, created_at timestamptz,
--   payable_until timestamptz
--   One row for each attempt that is not decided; an order without any has one row with NULLs.
WITH renewed AS (
    -- kind || '': so that the primary key is used and not the index of what is due.
    UPDATE close_attempts c
    SET next_attempt_at = clock_timestamp() + make_interval(secs => $2::float8)
    WHERE c.kind || '' = $1::text
      AND c.order_id = ANY (ARRAY(
          -- In one order, so that two sessions cannot deadlock.
          SELECT r.order_id FROM close_attempts r
          WHERE r.kind || '' = $1::text AND r.order_id = ANY ($5::text[])
            AND ((r.order_id, r.lease) IN (SELECT * FROM unnest($5::text[], $6::bigint[]))) IS TRUE
            AND (r.unresolved_at IS NULL) IS TRUE
          ORDER BY r.order_id
          FOR NO KEY UPDATE SKIP LOCKED))
),
due AS MATERIALIZED (
    SELECT d.order_id
    FROM unnest($3::text[], $4::bigint[]) AS f (queue, free)
    CROSS JOIN LATERAL (
        SELECT c.order_id
        FROM close_attempts c
        WHERE c.kind = $1::text AND c.queue = f.queue AND c.unresolved_at IS NULL
          -- statement_timestamp(), so that it can bound the index scan.
          AND c.next_attempt_at <= statement_timestamp()
          -- Renewed above, and not seen by this snapshot.
          AND c.order_id <> ALL ($5::text[])
        ORDER BY c.next_attempt_at, c.order_id
        LIMIT f.free
        -- So that one worker works on one order. SKIP LOCKED: what another session has at this moment is not due.
        FOR NO KEY UPDATE SKIP LOCKED
    ) AS d
),
leased AS (
    UPDATE close_attempts c
    -- 64 random bits: a lease is compared with another of the same order only.
    SET lease = hashtextextended(gen_random_uuid()::text, 0), next_attempt_at = clock_timestamp() + make_interval(secs => $2::float8)
    WHERE c.kind || '' = $1::text AND c.order_id = ANY (ARRAY(SELECT d.order_id FROM due d))
    RETURNING c.order_id, c.lease, c.queue, c.rounds, c.has_waited, c.step <> 'claimed' AS was_judged
)
SELECT l.order_id, l.lease, l.queue, l.rounds, l.has_waited, l.was_judged,
       p.provider, p.reference, p.amount_minor, p.currency, p.state, p.created_at, p.payable_until
FROM leased l
-- Every attempt, not only the last: a verdict on one is none on the order.
LEFT JOIN payment_attempts p ON p.order_id = l.order_id AND p.kind = $1::text AND p.state IN ('open', 'paid')
ORDER BY l.order_id, p.created_at, p.provider, p.reference
