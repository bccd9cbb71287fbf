-- What the functions of payments do with an order of the default tables: like those that are rendered for a mapped table, which
-- the default tables have as well where they are not here (src/mapping/render/functions.rs).

-- Its id as the table prints it, from any spelling; NULL for a text that is no id.
CREATE OR REPLACE FUNCTION default_id(order_id text) RETURNS text LANGUAGE sql IMMUTABLE SET search_path FROM CURRENT AS $$
    SELECT default_order_key(order_id)::text
$$;

-- See locked_order.
CREATE OR REPLACE FUNCTION default_order(
    order_id text, waits boolean, OUT state text, OUT deadline timestamptz, OUT amount_minor bigint, OUT currency text
) LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    key uuid := default_order_key(order_id);
    target orders;
BEGIN
    IF waits THEN
        SELECT * INTO target FROM orders o WHERE o.id = key FOR NO KEY UPDATE;
        IF target.id IS NULL AND key IS NOT NULL THEN
            -- It may be in a transaction that commits at this moment.
            PERFORM pg_advisory_xact_lock('orders'::regclass::oid::integer, number_of_order(key));
            SELECT * INTO target FROM orders o WHERE o.id = key FOR NO KEY UPDATE;
        END IF;
    ELSE
        SELECT * INTO target FROM orders o WHERE o.id = key FOR NO KEY UPDATE SKIP LOCKED;
        IF target.id IS NULL AND EXISTS (SELECT FROM orders o WHERE o.id = key) THEN
            state := 'busy';
            RETURN;
        END IF;
    END IF;
    state := CASE WHEN target.status::text IN ('closing', 'paid', 'closed', 'cancelled') THEN target.status::text
                  WHEN target.status = 'unpaid' THEN 'open'
                  WHEN target.id IS NOT NULL THEN 'not_open' END;
    deadline := target.expires_at;
    amount_minor := target.amount_minor;
    currency := target.currency;
END $$;

-- See count_for_order.
CREATE OR REPLACE FUNCTION default_count(
    order_id text, counted bigint, pays boolean, by text, why text, answers text
) RETURNS boolean LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
    key uuid := default_order_key(default_count.order_id);
BEGIN
    UPDATE orders o
    SET received_minor = coalesce(o.received_minor, 0) + default_count.counted,
        status = CASE WHEN default_count.pays THEN 'paid' ELSE o.status END,
        paid_at = CASE WHEN default_count.pays THEN clock_timestamp() ELSE o.paid_at END
    WHERE o.id = key;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    INSERT INTO order_events (order_id, event, by, reason, answers)
    VALUES (key, CASE WHEN pays THEN 'paid' ELSE 'payment_received' END, default_count.by, why,
            nullif(default_count.answers, ''));
    RETURN true;
END $$;

REVOKE ALL ON FUNCTION
    default_order(text, boolean),
    default_count(text, bigint, boolean, text, text, text)
FROM PUBLIC;
