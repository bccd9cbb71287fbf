-- Counts the money of orders whose providers were asked, for sql/settle_paid.sql.

-- Writes down what a provider says it has received for an order, when it was asked because the order was to be closed:
-- pays an order that is `closing`, and records what does not count as late money. The caller has locked the order's row
-- if there is one, and consumes what a settled order has reserved (sql/settle_paid.sql). Not for callbacks.
--
--   references, with the provider of each, what was received, and whether that is what the attempt was to pay
--
--   settled        the order is paid by this
--   already_paid   it was paid before; money of which nothing was known is late now
--   paid_late      it is closed, cancelled or deleted: the money is late
--   not_claimed    it is unpaid: it is claimed and asked about again
--   amount_differs what was received does not cover what the order costs; nothing was written
--   kept           a trigger keeps the order as it is; nothing was written
CREATE OR REPLACE FUNCTION settle_asked_order(
    order_id text, providers text[], refs text[], amounts bigint[], currencies text[], whole boolean[], answers text
) RETURNS text LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
    target orders;
    -- Whether a payment was not reported before: then it has counted already, or was late.
    fresh boolean[] := '{}';
    -- The currency that counts.
    money text;
    -- What the order lacks; NULL: the next amount pays it, whatever that is.
    missing bigint;
    counted bigint[] := '{}';
    total bigint := 0;
    verdict text;
    why text := 'already_paid';
    late_as text;
    result text;
BEGIN
    SELECT * INTO target FROM orders o WHERE o.id = default_order_key(settle_asked_order.order_id);
    IF target.status = 'unpaid' THEN
        RETURN 'not_claimed';
    END IF;
    money := target.currency;
    IF money IS NULL AND target.received_minor IS NOT NULL THEN
        SELECT p.currency INTO money FROM received_payments p
        WHERE p.order_id = settle_asked_order.order_id AND p.counted_minor > 0 LIMIT 1;
    END IF;
    money := coalesce(money, currencies[array_position(whole, true)]);
    missing := target.amount_minor - coalesce(target.received_minor, 0);
    IF target.status = 'closing' THEN
        result := 'settled';
    ELSIF target.status = 'paid' THEN
        result := 'already_paid';
        IF target.received_minor IS NOT NULL THEN
            missing := 0;
        END IF;
    ELSE
        result := 'paid_late';
        why := CASE WHEN target.id IS NULL THEN 'unknown_order'
                    WHEN target.status::text IN ('closed', 'cancelled') THEN target.status::text
                    ELSE 'not_open' END;
        missing := 0;
    END IF;
    -- What each payment counts. One that differs from its attempt counts for nothing.
    FOR n IN 1 .. cardinality(refs) LOOP
        fresh[n] := NOT EXISTS (SELECT FROM received_payments p WHERE p.provider = providers[n] AND p.reference = refs[n]);
        counted[n] := 0;
        IF fresh[n] AND whole[n] AND currencies[n] = money THEN
            counted[n] := greatest(least(amounts[n], missing - total), 0);
            IF missing IS NULL THEN
                missing := counted[n];
            END IF;
            total := total + counted[n];
        END IF;
    END LOOP;
    IF result = 'settled' AND (missing IS NULL OR total < missing) THEN
        -- Where the shop says what the order costs, a part of it never pays it.
        RETURN 'amount_differs';
    END IF;
    IF result = 'settled' THEN
        UPDATE orders o
        SET status = 'paid', paid_at = clock_timestamp(),
            received_minor = coalesce(o.received_minor, 0) + total
        WHERE o.id = target.id;
        IF NOT FOUND THEN
            RETURN 'kept';
        END IF;
        INSERT INTO order_events (order_id, event, by, reason, answers)
        VALUES (target.id, 'paid', 'provider', 'the provider had the money when the order was to be closed',
                nullif(settle_asked_order.answers, ''));
    ELSIF total > 0 THEN
        UPDATE orders o SET received_minor = coalesce(o.received_minor, 0) + total WHERE o.id = target.id;
    END IF;
    missing := greatest(missing, 0);
    FOR n IN 1 .. cardinality(refs) LOOP
        CONTINUE WHEN NOT fresh[n];
        missing := missing - counted[n];
        verdict := CASE WHEN counted[n] = 0 THEN 'late' WHEN missing > 0 THEN 'partial' ELSE 'paid' END;
        late_as := CASE WHEN verdict <> 'late' THEN 'surplus'
                        WHEN currencies[n] <> money AND result = 'settled' THEN 'other_currency' ELSE why END;
        INSERT INTO received_payments (provider, reference, order_id, amount_minor, currency, outcome, reason,
                                       counted_minor, missing_minor, surplus_minor)
        VALUES (providers[n], refs[n], settle_asked_order.order_id, amounts[n], currencies[n], verdict,
                CASE WHEN verdict = 'late' THEN late_as END, counted[n],
                CASE WHEN verdict = 'partial' THEN missing ELSE 0 END,
                CASE WHEN verdict <> 'late' THEN amounts[n] - counted[n] ELSE 0 END)
        ON CONFLICT DO NOTHING;
        IF NOT FOUND THEN
            RAISE 'payment % of % was reported at the same moment', refs[n], providers[n]
                USING ERRCODE = 'serialization_failure';
        END IF;
        UPDATE payment_attempts a SET state = CASE WHEN verdict = 'late' THEN 'late' ELSE 'paid' END
        WHERE a.provider = providers[n] AND a.reference = refs[n];
        IF amounts[n] > counted[n] THEN
            PERFORM record_late_payment(settle_asked_order.order_id, providers[n], refs[n], amounts[n] - counted[n],
                                        currencies[n], late_as);
        END IF;
    END LOOP;
    IF result = 'settled' AND coalesce(target.received_minor, 0) > target.amount_minor THEN
        PERFORM release_excess(target.id);
    END IF;
    RETURN result;
END $$;

-- The money that is recorded for an order, for the event of its settlement; how much of it is late; and the deadline.
CREATE OR REPLACE FUNCTION paid_attempts(order_id text)
RETURNS TABLE (attempts jsonb, late_minor bigint, deadline timestamptz)
LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT AS $$
    SELECT jsonb_agg(jsonb_build_object('provider', p.provider, 'reference', p.reference, 'amount_minor', p.amount_minor,
                                        'currency', p.currency) ORDER BY p.received_at, p.provider, p.reference),
           sum(p.amount_minor - p.counted_minor)::bigint,
           (SELECT o.expires_at FROM orders o WHERE o.id = default_order_key(paid_attempts.order_id))
    FROM received_payments p
    WHERE p.order_id = paid_attempts.order_id
$$;

REVOKE ALL ON FUNCTION
    settle_asked_order(text, text[], text[], bigint[], text[], boolean[], text),
    paid_attempts(text)
FROM PUBLIC;
