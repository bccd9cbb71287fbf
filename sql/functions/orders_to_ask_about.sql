-- Takes the attempts of these orders over from the shop's own table, if its mapping names one (the kind's function `attempts`).
--
-- SECURITY DEFINER: the functions of a kind are their owner's alone.
CREATE OR REPLACE FUNCTION take_over_attempts(order_ids text[], of_kind text) RETURNS void LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT AS $$
BEGIN
    EXECUTE format('SELECT %I($1)', function_of_kind(of_kind, 'attempts')) USING order_ids;
END $$;

REVOKE ALL ON FUNCTION take_over_attempts(text[], text) FROM PUBLIC;

-- Which of these orders have an attempt that may bring money, and the provider of the newest one: such an order is never
-- closed without an answer of its provider, whatever the settings of the worker are that finds it due.
--
-- VOLATILE, so that it reads with a snapshot of its own: the close statement calls it after it has locked the orders, and an attempt
-- that was begun under the lock of the order's row is then visible. A shop without attempts pays for one look at an empty
-- index.
CREATE OR REPLACE FUNCTION orders_to_ask_about(order_ids text[], of_kind text DEFAULT 'order')
RETURNS TABLE (order_id text, provider text) LANGUAGE plpgsql VOLATILE ROWS 100 AS $$
#variable_conflict use_column
BEGIN
    IF cardinality(order_ids) > 0 AND to_regproc(format('%I', 'kind_' || of_kind || '_attempts')) IS NOT NULL THEN
        PERFORM take_over_attempts(order_ids, of_kind);
    END IF;
    RETURN QUERY
    SELECT DISTINCT ON (a.order_id) a.order_id, a.provider
    FROM payment_attempts a
    WHERE (SELECT EXISTS (SELECT FROM payment_attempts))
      AND a.order_id = ANY (order_ids) AND a.kind = of_kind AND a.state IN ('open', 'paid')
    ORDER BY a.order_id, a.created_at DESC, a.provider, a.reference;
END $$;
