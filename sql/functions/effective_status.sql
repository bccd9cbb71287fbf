-- What readers and payers see of an order in the default table at this moment, whether or not a worker has come to it.
--
-- By the server's clock. They change nothing and decide nothing: the row decides, and the close changes it.

-- The status, and `expired` for an unpaid order whose deadline has passed: SELECT o.effective_status FROM orders o
CREATE OR REPLACE FUNCTION effective_status(orders) RETURNS text LANGUAGE sql STABLE AS $$
    SELECT CASE
        -- statement_timestamp(), not now(): a transaction may have begun before the deadline.
        WHEN $1.status = 'unpaid' AND $1.expires_at <= statement_timestamp() THEN 'expired'
        ELSE $1.status::text
    END
$$;

-- The time that is left to pay: never negative, 0 for an order that is not unpaid, NULL for one without a deadline,
-- which never expires.
CREATE OR REPLACE FUNCTION remaining(orders) RETURNS interval LANGUAGE sql STABLE AS $$
    SELECT CASE
        WHEN $1.status <> 'unpaid' THEN interval '0'
        -- greatest() takes no notice of NULL.
        WHEN $1.expires_at IS NOT NULL THEN greatest($1.expires_at - statement_timestamp(), interval '0')
    END
$$;

-- Both beside the columns that a reader needs. Not all columns: a view would keep later ones from being changed.
CREATE OR REPLACE VIEW orders_effective AS
SELECT o.id, o.status, effective_status(o) AS effective_status, o.expires_at, remaining(o) AS remaining
FROM orders o;
