-- Money that a provider says it has received: pays the order, or is written down as money that paid for nothing.
--
-- A payment callback calls payment_received in one statement (docs/PAYMENTS.md). These functions ask no provider and
-- refund nothing. Each is run once for a payment, however often and by however many sessions it is reported: the table
-- `received_payments` has one row for each (provider, reference).

-- A payment that was reported before: the answer of the first time.
CREATE OR REPLACE FUNCTION recorded_payment(
    order_id text, provider text, reference text, amount_minor bigint, currency text
) RETURNS TABLE (outcome text, reason text, missing_minor bigint, surplus_minor bigint, is_new boolean)
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
    known received_payments;
BEGIN
    SELECT * INTO STRICT known FROM received_payments p
    WHERE p.provider = recorded_payment.provider AND p.reference = recorded_payment.reference;
    IF (known.order_id, known.amount_minor, known.currency)
        IS DISTINCT FROM (recorded_payment.order_id, recorded_payment.amount_minor, recorded_payment.currency) THEN
        RAISE 'payment % of % was recorded as % % for order %, and is now reported as % % for order %; give each payment a reference of its own',
            known.reference, known.provider, known.amount_minor, known.currency, known.order_id,
            recorded_payment.amount_minor, recorded_payment.currency, recorded_payment.order_id
            USING ERRCODE = 'unique_violation';
    END IF;
    RETURN QUERY SELECT known.outcome, known.reason, known.missing_minor, known.surplus_minor, false;
END $$;

-- A payment of an order in the default table `orders`.
--
--   outcome        paid: this payment has paid the order, or completed it.
--                  partial: recorded; the order is still open and lacks missing_minor.
--                  late: it pays for nothing. It is in `late_payments` with the reason, to be given back or used to
--                  reopen the order.
--   reason         why it is late: closed | cancelled | not_open | after_deadline | already_paid | other_currency |
--                  other_order | unknown_order; otherwise NULL
--   missing_minor  what the order still lacks, for partial; otherwise 0
--   surplus_minor  what was paid too much, which is in `late_payments` with the reason surplus; otherwise 0
--   is_new         false: it was reported before, and this is the answer of that time
--
-- SECURITY DEFINER: a callback's role needs EXECUTE on this function and no right on a table.
CREATE OR REPLACE FUNCTION payment_received(
    order_id text, provider text, reference text, amount_minor bigint, currency text
) RETURNS TABLE (outcome text, reason text, missing_minor bigint, surplus_minor bigint, is_new boolean)
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
    target orders;
    attempt payment_attempts;
    -- As the table prints it: the same order may be named in upper case.
    id_text text := coalesce(default_order_key(payment_received.order_id)::text, payment_received.order_id);
    verdict text;
    why text;
    counted bigint := 0;
    missing bigint;
BEGIN
    IF payment_received.amount_minor < 0 THEN
        RAISE 'a payment of % % was reported; report what was received, and give money back elsewhere',
            payment_received.amount_minor, payment_received.currency USING ERRCODE = 'invalid_parameter_value';
    END IF;
    -- The order's row first, as the close does: whatever decides is read behind this lock. It waits for a close that is
    -- being committed.
    SELECT * INTO target FROM orders o WHERE o.id = default_order_key(payment_received.order_id) FOR NO KEY UPDATE;
    SELECT * INTO attempt FROM payment_attempts a
    WHERE a.provider = payment_received.provider AND a.reference = payment_received.reference;

    why := CASE
        WHEN target.id IS NULL THEN 'unknown_order'
        -- The shop itself has written for which order the customer was sent to the provider.
        WHEN attempt.order_id <> id_text THEN 'other_order'
        WHEN target.status = 'paid' THEN 'already_paid'
        WHEN target.status = 'closed' THEN 'closed'
        WHEN target.status::text = 'cancelled' THEN 'cancelled'
        WHEN target.status NOT IN ('unpaid', 'closing') THEN 'not_open'
        -- While the close is being decided the provider's answer counts, and this is one.
        WHEN target.status = 'unpaid' AND target.expires_at <= clock_timestamp()
            AND NOT coalesce((SELECT s.pay_after_deadline FROM order_timeout_settings s), true) THEN 'after_deadline'
        -- Amounts of two currencies are never added up, even if the order does not say its own.
        WHEN target.currency <> payment_received.currency
            OR EXISTS (SELECT FROM received_payments p WHERE p.order_id = id_text AND p.counted_minor > 0
                       AND p.currency <> payment_received.currency) THEN 'other_currency'
    END;
    -- NULL if it is not known what the order costs: then any payment pays it.
    missing := target.amount_minor - coalesce(target.received_minor, 0);
    IF why IS NULL AND payment_received.amount_minor = 0 AND coalesce(missing, 1) > 0 THEN
        RAISE 'a payment of 0 was reported for order %, which costs more; report what was received', id_text
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    verdict := CASE
        WHEN why IS NOT NULL THEN 'late'
        WHEN payment_received.amount_minor < missing THEN 'partial'
        ELSE 'paid'
    END;
    IF verdict <> 'late' THEN
        -- 0 if the shop has lowered the price below what was received.
        counted := greatest(least(payment_received.amount_minor, missing), 0);
    END IF;

    INSERT INTO received_payments (provider, reference, order_id, amount_minor, currency, outcome, reason, counted_minor,
                          missing_minor, surplus_minor)
    VALUES (payment_received.provider, payment_received.reference, id_text, payment_received.amount_minor,
            payment_received.currency, verdict, why, counted,
            CASE WHEN verdict = 'partial' THEN missing - counted ELSE 0 END,
            CASE WHEN verdict = 'paid' THEN payment_received.amount_minor - counted ELSE 0 END)
    -- Another session's insert of the same payment is waited for. If it is rolled back, this one counts.
    ON CONFLICT DO NOTHING;
    IF NOT FOUND THEN
        RETURN QUERY SELECT * FROM recorded_payment(id_text, payment_received.provider, payment_received.reference,
                                                    payment_received.amount_minor, payment_received.currency);
        RETURN;
    END IF;

    -- The money was taken: nothing is asked about this attempt any more if it pays for nothing. That of another order is
    -- left alone, because only its provider knows what became of it.
    UPDATE payment_attempts a SET state = CASE WHEN verdict = 'late' THEN 'late' ELSE 'paid' END
    WHERE a.provider = payment_received.provider AND a.reference = payment_received.reference AND a.order_id = id_text;
    IF verdict = 'late' THEN
        PERFORM record_late_payment(id_text, payment_received.provider, payment_received.reference,
                                    payment_received.amount_minor, payment_received.currency, why);
    ELSE
        PERFORM count_payment(target.id, counted, verdict = 'paid', payment_received.provider,
                              payment_received.reference);
        IF payment_received.amount_minor > counted THEN
            PERFORM record_late_payment(id_text, payment_received.provider, payment_received.reference,
                                        payment_received.amount_minor - counted, payment_received.currency, 'surplus');
        END IF;
    END IF;
    RETURN QUERY SELECT p.outcome, p.reason, p.missing_minor, p.surplus_minor, true FROM received_payments p
    WHERE p.provider = payment_received.provider AND p.reference = payment_received.reference;
END $$;

-- Counts money toward an open order whose row the caller has locked; if that pays the order, what it has reserved is
-- consumed. Not for callbacks.
CREATE OR REPLACE FUNCTION count_payment(order_id uuid, counted bigint, pays boolean, provider text, reference text)
RETURNS void LANGUAGE plpgsql
SET search_path FROM CURRENT AS $$
#variable_conflict use_column
BEGIN
    UPDATE orders o
    SET received_minor = coalesce(o.received_minor, 0) + counted,
        status = CASE WHEN pays THEN 'paid' ELSE o.status END,
        paid_at = CASE WHEN pays THEN clock_timestamp() END
    WHERE o.id = count_payment.order_id;
    IF NOT FOUND THEN
        RAISE 'a trigger keeps order % unpaid; the payment is not recorded, so report it again', count_payment.order_id;
    END IF;
    INSERT INTO order_events (order_id, event, by, reason)
    VALUES (count_payment.order_id, CASE WHEN pays THEN 'paid' ELSE 'payment_received' END, 'payment',
            provider || ' ' || reference);
    IF NOT pays THEN
        RETURN;
    END IF;
    PERFORM release_excess(count_payment.order_id);
    -- If the order was being closed, nothing is left to do about it; a worker that has it finds its lease lost.
    DELETE FROM close_attempts c WHERE c.kind = 'order' AND c.order_id = count_payment.order_id::text;
    PERFORM consume_reserved(ARRAY[count_payment.order_id]);
END $$;

-- A payment that did not pay an order of the shop's own table: the shop's own guarded update has found it closed. The
-- columns are those of payment_received; outcome is late, reason is not_open.
CREATE OR REPLACE FUNCTION late_payment_received(
    order_id text, provider text, reference text, amount_minor bigint, currency text
) RETURNS TABLE (outcome text, reason text, missing_minor bigint, surplus_minor bigint, is_new boolean)
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
#variable_conflict use_column
BEGIN
    INSERT INTO received_payments (provider, reference, order_id, amount_minor, currency, outcome, reason)
    VALUES (late_payment_received.provider, late_payment_received.reference, late_payment_received.order_id,
            late_payment_received.amount_minor, late_payment_received.currency, 'late', 'not_open')
    ON CONFLICT DO NOTHING;
    IF NOT FOUND THEN
        RETURN QUERY SELECT * FROM recorded_payment(
            late_payment_received.order_id, late_payment_received.provider, late_payment_received.reference,
            late_payment_received.amount_minor, late_payment_received.currency);
        RETURN;
    END IF;
    UPDATE payment_attempts a SET state = 'late'
    WHERE a.provider = late_payment_received.provider AND a.reference = late_payment_received.reference;
    PERFORM record_late_payment(
        late_payment_received.order_id, late_payment_received.provider, late_payment_received.reference,
        late_payment_received.amount_minor, late_payment_received.currency, 'not_open');
    RETURN QUERY SELECT 'late', 'not_open', 0::bigint, 0::bigint, true;
END $$;

REVOKE ALL ON FUNCTION
    recorded_payment(text, text, text, bigint, text),
    payment_received(text, text, text, bigint, text),
    count_payment(uuid, bigint, boolean, text, text),
    late_payment_received(text, text, text, bigint, text)
FROM PUBLIC;
