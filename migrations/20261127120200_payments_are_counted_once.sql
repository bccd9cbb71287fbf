-- The functions of sql/payment_received.sql: word for word, then where they look for their tables and what calls them.

-- Money that a provider says it has received: pays the order, or is written down as money that paid for nothing.
--
-- A payment callback calls payment_received in one statement (docs/PAYMENTS.md). These functions ask no provider and
-- refund nothing. Each is run once for a payment, however often and by however many sessions it is reported: the table
-- `received_payments` has one row for each (provider, reference).

-- Money that paid for nothing, or not for this order: recorded, announced, and in the order's history if it has one.
-- The caller has locked the order's row, if there is one. Not for callbacks.
CREATE FUNCTION record_late_payment(
    order_id text, provider text, reference text, amount_minor bigint, currency text, reason text
) RETURNS void LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    late late_payments;
BEGIN
    INSERT INTO late_payments (order_id, provider, reference, amount_minor, currency, reason)
    VALUES (record_late_payment.order_id, record_late_payment.provider, record_late_payment.reference,
            record_late_payment.amount_minor, record_late_payment.currency, record_late_payment.reason)
    RETURNING * INTO late;
    INSERT INTO order_events (order_id, event, by, reason)
    SELECT o.id, 'payment_late', 'payment', late.reason || ': ' || late.provider || ' ' || late.reference
    FROM orders o
    WHERE o.id = default_order_key(late.order_id);
    INSERT INTO event_outbox (routing_key, type, payload)
    VALUES ('order.payment_late', 'order.payment_late.v1', late_payment_as_json(late));
END $$;

-- What listeners are told of money that paid for nothing.
CREATE FUNCTION late_payment_as_json(late late_payments) RETURNS jsonb LANGUAGE sql STABLE AS $$
    SELECT jsonb_build_object(
        'late_payment_id', late.id,
        'order_id', late.order_id,
        'provider', late.provider,
        'reference', late.reference,
        'amount_minor', late.amount_minor,
        'currency', late.currency,
        'reason', late.reason,
        'recorded_at', to_char(late.recorded_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'))
$$;

-- The key in the default table `orders`; NULL for a text that is none, so that such a payment is recorded all the same.
CREATE FUNCTION default_order_key(order_id text) RETURNS uuid LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE WHEN order_id ~ '^[0-9a-fA-F]{8}-([0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}$' THEN order_id::uuid END
$$;

-- A payment that was reported before: the answer of the first time.
CREATE FUNCTION recorded_payment(
    order_id text, provider text, reference text, amount_minor bigint, currency text
) RETURNS TABLE (outcome text, reason text, missing_minor bigint, surplus_minor bigint, is_new boolean)
LANGUAGE plpgsql AS $$
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
CREATE FUNCTION payment_received(
    order_id text, provider text, reference text, amount_minor bigint, currency text
) RETURNS TABLE (outcome text, reason text, missing_minor bigint, surplus_minor bigint, is_new boolean)
LANGUAGE plpgsql SECURITY DEFINER AS $$
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
        -- The closing protocol has settled this very attempt by the provider's answer.
        WHEN target.status = 'paid' AND attempt.state = 'paid' THEN NULL
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
        WHEN target.status <> 'paid' AND payment_received.amount_minor < missing THEN 'partial'
        ELSE 'paid'
    END;
    IF verdict = 'paid' AND target.status = 'paid' THEN
        counted := payment_received.amount_minor;
    ELSIF verdict <> 'late' THEN
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

    -- The money was taken, whatever becomes of it.
    UPDATE payment_attempts a SET state = 'paid'
    WHERE a.provider = payment_received.provider AND a.reference = payment_received.reference AND a.state <> 'paid';
    IF verdict = 'late' THEN
        PERFORM record_late_payment(id_text, payment_received.provider, payment_received.reference,
                                    payment_received.amount_minor, payment_received.currency, why);
    ELSIF target.status <> 'paid' THEN
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
CREATE FUNCTION count_payment(order_id uuid, counted bigint, pays boolean, provider text, reference text)
RETURNS void LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
    UPDATE orders o
    SET received_minor = coalesce(o.received_minor, 0) + counted,
        status = CASE WHEN pays THEN 'paid' ELSE o.status END,
        paid_at = CASE WHEN pays THEN clock_timestamp() END,
        next_attempt_at = CASE WHEN NOT pays THEN o.next_attempt_at END
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
    -- Stock and then resources, each in the order of its key, as the close locks them: no deadlock.
    UPDATE stock s SET reserved = s.reserved - r.quantity
    FROM (SELECT k.article_id, i.quantity
          FROM order_items i JOIN stock k ON k.article_id = i.article_id
          WHERE i.order_id = count_payment.order_id
          ORDER BY k.article_id FOR NO KEY UPDATE OF k) r
    WHERE s.article_id = r.article_id;
    UPDATE reserved_resources s SET reserved = s.reserved - r.quantity
    FROM (SELECT k.kind, k.id, i.quantity
          FROM order_resources i JOIN reserved_resources k ON k.kind = i.kind AND k.id = i.resource_id
          WHERE i.order_id = count_payment.order_id
          ORDER BY k.kind, k.id FOR NO KEY UPDATE OF k) r
    WHERE s.kind = r.kind AND s.id = r.id;
END $$;

-- A payment that did not pay an order of the shop's own table: the shop's own guarded update has found it closed. The
-- columns are those of payment_received; outcome is late, reason is not_open.
CREATE FUNCTION late_payment_received(
    order_id text, provider text, reference text, amount_minor bigint, currency text
) RETURNS TABLE (outcome text, reason text, missing_minor bigint, surplus_minor bigint, is_new boolean)
LANGUAGE plpgsql SECURITY DEFINER AS $$
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
    UPDATE payment_attempts a SET state = 'paid'
    WHERE a.provider = late_payment_received.provider AND a.reference = late_payment_received.reference
      AND a.state <> 'paid';
    PERFORM record_late_payment(
        late_payment_received.order_id, late_payment_received.provider, late_payment_received.reference,
        late_payment_received.amount_minor, late_payment_received.currency, 'not_open');
    RETURN QUERY SELECT 'late', 'not_open', 0::bigint, 0::bigint, true;
END $$;

-- The part payments of an order that was closed or cancelled become late money. The close calls it in its own
-- statement; a shop calls it where it cancels an order. Returns how many there were: none while the order is open or
-- paid, so that every role may call it.
CREATE FUNCTION release_part_payments(order_id uuid) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER AS $$
#variable_conflict use_column
DECLARE
    part received_payments;
    released bigint := 0;
BEGIN
    UPDATE orders o SET received_minor = NULL
    WHERE o.id = release_part_payments.order_id AND o.status NOT IN ('unpaid', 'closing', 'paid')
      AND o.received_minor IS NOT NULL;
    IF NOT FOUND THEN
        RETURN 0;
    END IF;
    FOR part IN
        SELECT * FROM received_payments p
        WHERE p.order_id = release_part_payments.order_id::text AND p.outcome = 'partial' AND p.counted_minor > 0
        ORDER BY p.received_at, p.provider, p.reference
        FOR NO KEY UPDATE
    LOOP
        UPDATE received_payments p SET counted_minor = 0 WHERE p.provider = part.provider AND p.reference = part.reference;
        PERFORM record_late_payment(part.order_id, part.provider, part.reference, part.counted_minor, part.currency,
                                    'part_payment');
        released := released + 1;
    END LOOP;
    RETURN released;
END $$;

-- They work on the tables of this schema, whatever search_path their caller has: a shop may have tables of the same
-- names. pg_temp last, so that no temporary table takes the place of one of ours.
DO $$
DECLARE
    ours text;
BEGIN
    FOREACH ours IN ARRAY ARRAY[
        'record_late_payment(text, text, text, bigint, text, text)',
        'recorded_payment(text, text, text, bigint, text)',
        'payment_received(text, text, text, bigint, text)',
        'count_payment(uuid, bigint, boolean, text, text)',
        'late_payment_received(text, text, text, bigint, text)',
        'release_part_payments(uuid)'
    ] LOOP
        EXECUTE format('ALTER FUNCTION %I.%s SET search_path = %1$I, pg_temp', current_schema(), ours);
    END LOOP;
END $$;

-- Every role may call a new function unless this is said. The callback's role is granted EXECUTE by the shop.
REVOKE ALL ON FUNCTION
    record_late_payment(text, text, text, bigint, text, text),
    recorded_payment(text, text, text, bigint, text),
    payment_received(text, text, text, bigint, text),
    count_payment(uuid, bigint, boolean, text, text),
    late_payment_received(text, text, text, bigint, text)
FROM PUBLIC;
