-- Money that a provider says it has received: pays the order, or is written down as money that paid for nothing.
--
-- A payment callback calls payment_received in one statement (docs/PAYMENTS.md). These functions ask no provider and
-- refund nothing. Each is run once for a payment, however often and by however many sessions it is reported: the table
-- `received_payments` has one row for each (provider, reference).

-- Money that paid for nothing, or not for this order: recorded, announced, and in the order's history if it has one.
-- The caller has locked the order's row, if there is one. Not for callbacks.
CREATE OR REPLACE FUNCTION record_late_payment(
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
CREATE OR REPLACE FUNCTION late_payment_as_json(late late_payments) RETURNS jsonb LANGUAGE sql STABLE AS $$
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
CREATE OR REPLACE FUNCTION default_order_key(order_id text) RETURNS uuid LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE WHEN order_id ~ '^[0-9a-fA-F]{8}-([0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}$' THEN order_id::uuid END
$$;

-- A payment that was reported before: the answer of the first time.
CREATE OR REPLACE FUNCTION recorded_payment(
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
CREATE OR REPLACE FUNCTION payment_received(
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
    PERFORM release_excess(count_payment.order_id);
    -- If the order was being closed, nothing is left to do about it; a worker that has it finds its lease lost.
    DELETE FROM close_attempts c WHERE c.kind = 'order' AND c.order_id = count_payment.order_id::text;
    PERFORM consume_reserved(ARRAY[count_payment.order_id]);
END $$;

-- What paid orders have reserved is consumed: stock and then resources, each in the order of its key, as the close locks
-- them, so that no two sessions can deadlock. Not for callbacks.
CREATE OR REPLACE FUNCTION consume_reserved(order_ids uuid[]) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    UPDATE stock s SET reserved = s.reserved - r.quantity
    FROM (SELECT k.article_id, i.quantity
          FROM (SELECT t.article_id, sum(t.quantity)::bigint AS quantity FROM order_items t
                WHERE t.order_id = ANY (order_ids) GROUP BY t.article_id) i
          JOIN stock k ON k.article_id = i.article_id
          ORDER BY k.article_id FOR NO KEY UPDATE OF k) r
    WHERE s.article_id = r.article_id;
    UPDATE reserved_resources s SET reserved = s.reserved - r.quantity
    FROM (SELECT k.kind, k.id, i.quantity
          FROM (SELECT t.kind, t.resource_id, sum(t.quantity)::bigint AS quantity FROM order_resources t
                WHERE t.order_id = ANY (order_ids) GROUP BY t.kind, t.resource_id) i
          JOIN reserved_resources k ON k.kind = i.kind AND k.id = i.resource_id
          ORDER BY k.kind, k.id FOR NO KEY UPDATE OF k) r
    WHERE s.kind = r.kind AND s.id = r.id;
END $$;

-- What part payments have counted beyond the price, because the shop has lowered it since, becomes late money. The
-- caller has locked the order's row. Not for callbacks.
CREATE OR REPLACE FUNCTION release_excess(order_id uuid) RETURNS void LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    excess bigint;
    part received_payments;
    back bigint;
BEGIN
    UPDATE orders o SET received_minor = o.amount_minor
    FROM orders before
    WHERE o.id = release_excess.order_id AND before.id = o.id AND o.received_minor > o.amount_minor
    RETURNING before.received_minor - o.amount_minor INTO excess;
    FOR part IN
        SELECT * FROM received_payments p
        WHERE excess > 0 AND p.order_id = release_excess.order_id::text AND p.counted_minor > 0
        ORDER BY p.received_at DESC, p.provider, p.reference
        FOR NO KEY UPDATE
    LOOP
        back := least(part.counted_minor, excess);
        excess := excess - back;
        EXIT WHEN back = 0;
        UPDATE received_payments p SET counted_minor = p.counted_minor - back
        WHERE p.provider = part.provider AND p.reference = part.reference;
        PERFORM record_late_payment(part.order_id, part.provider, part.reference, back, part.currency, 'surplus');
    END LOOP;
END $$;

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
) RETURNS text LANGUAGE plpgsql SECURITY DEFINER AS $$
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
        SET status = 'paid', next_attempt_at = NULL, paid_at = clock_timestamp(),
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
LANGUAGE sql VOLATILE SECURITY DEFINER AS $$
    SELECT jsonb_agg(jsonb_build_object('provider', p.provider, 'reference', p.reference, 'amount_minor', p.amount_minor,
                                        'currency', p.currency) ORDER BY p.received_at, p.provider, p.reference),
           sum(p.amount_minor - p.counted_minor)::bigint,
           (SELECT o.expires_at FROM orders o WHERE o.id = default_order_key(paid_attempts.order_id))
    FROM received_payments p
    WHERE p.order_id = paid_attempts.order_id
$$;

-- A payment that did not pay an order of the shop's own table: the shop's own guarded update has found it closed. The
-- columns are those of payment_received; outcome is late, reason is not_open.
CREATE OR REPLACE FUNCTION late_payment_received(
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
    UPDATE payment_attempts a SET state = 'late'
    WHERE a.provider = late_payment_received.provider AND a.reference = late_payment_received.reference;
    PERFORM record_late_payment(
        late_payment_received.order_id, late_payment_received.provider, late_payment_received.reference,
        late_payment_received.amount_minor, late_payment_received.currency, 'not_open');
    RETURN QUERY SELECT 'late', 'not_open', 0::bigint, 0::bigint, true;
END $$;

-- The part payments of an order that was closed or cancelled become late money. The close calls it in its own
-- statement; a shop calls it where it cancels an order. Returns how many there were: none while the order is open or
-- paid, so that every role may call it.
CREATE OR REPLACE FUNCTION release_part_payments(order_id uuid) RETURNS bigint
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
