-- Money that a provider says it has received: pays the order, or is written down as money that paid for nothing.
--
-- A payment callback calls payment_received in one statement (docs/PAYMENTS.md). These functions ask no provider and
-- refund nothing. A payment counts once, however often and by however many sessions it is reported: the table
-- `received_payments` has one row for each (provider, reference).

-- Refuses what no repetition makes valid. Not for callbacks.
CREATE OR REPLACE FUNCTION require_payment(
    order_id text, provider text, reference text, amount_minor bigint, currency text
) RETURNS void LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    what text := CASE
        WHEN num_nulls(order_id, provider, reference, amount_minor, currency) > 0
            THEN 'no argument may be NULL; report the order, the provider, the reference, the amount and the currency'
        WHEN octet_length(order_id) NOT BETWEEN 1 AND 200 OR order_id ~ '[\x01-\x1f\x7f-\u009f]'
            THEN format('the order id %L is not 1 to 200 bytes without control characters', left(order_id, 200))
        WHEN provider !~ '^[a-z][a-z0-9_-]{0,39}$'
            THEN format('the provider %L is not a letter and up to 39 of a-z, 0-9, _ and -; report its name in the settings',
                        left(provider, 200))
        WHEN octet_length(reference) NOT BETWEEN 1 AND 200 OR reference ~ '[\x01-\x1f\x7f-\u009f]'
            THEN format('the reference %L is not 1 to 200 bytes without control characters', left(reference, 200))
        WHEN currency !~ '^[A-Z]{3}$'
            THEN format('the currency %L is not three letters; report its ISO 4217 code', left(currency, 200))
        WHEN amount_minor < 0
            THEN format('the amount %s is negative; report what was received, and give money back elsewhere', amount_minor)
    END;
BEGIN
    IF what IS NOT NULL THEN
        RAISE 'final: %', what USING ERRCODE = 'invalid_parameter_value';
    END IF;
END $$;

-- A payment that was reported before, locked, or NULL. The same reference with another amount is refused, and so is one that
-- counts for another order or whose money is settled. Not for callbacks.
CREATE OR REPLACE FUNCTION recorded_payment(
    kind text, order_id text, provider text, reference text, amount_minor bigint, currency text
) RETURNS received_payments LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
    known received_payments;
BEGIN
    SELECT * INTO known FROM received_payments p
    WHERE p.provider = recorded_payment.provider AND p.reference = recorded_payment.reference
    FOR NO KEY UPDATE;
    IF (known.amount_minor, known.currency) IS DISTINCT FROM (recorded_payment.amount_minor, recorded_payment.currency)
        OR (known.kind, known.order_id) <> (recorded_payment.kind, recorded_payment.order_id)
            AND NOT is_open_late_money(known) THEN
        RAISE 'final: payment % of % was recorded as % % for order %, and is now reported as % % for order %; give each payment a reference of its own',
            known.reference, known.provider, known.amount_minor, known.currency, known.order_id,
            recorded_payment.amount_minor, recorded_payment.currency, recorded_payment.order_id
            USING ERRCODE = 'unique_violation';
    END IF;
    RETURN known;
END $$;

-- Whether nothing of the payment counts and all of it is still to be settled: then it may be judged again.
CREATE OR REPLACE FUNCTION is_open_late_money(payment received_payments) RETURNS boolean
LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
    SELECT payment.outcome = 'late' AND payment.counted_minor = 0 AND EXISTS (
        SELECT FROM late_payments l
        WHERE l.provider = payment.provider AND l.reference = payment.reference AND l.state = 'open'
          AND l.amount_minor = payment.amount_minor)
$$;

-- Open late money is judged again, for this order. What was announced of it stays in the table. Not for callbacks.
CREATE OR REPLACE FUNCTION take_late_money(provider text, reference text, order_id text, by text) RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
BEGIN
    UPDATE late_payments l
    SET state = 'reopened', settled_at = clock_timestamp(), settled_by = take_late_money.by,
        settled_why = 'judged again for order ' || take_late_money.order_id
    WHERE l.provider = take_late_money.provider AND l.reference = take_late_money.reference AND l.state = 'open';
    IF NOT FOUND THEN
        RAISE 'payment % of % was settled as late money at the same moment; report it again', reference, provider
            USING ERRCODE = 'serialization_failure';
    END IF;
END $$;

-- A payment of an order in the default tables, or in a mapped table whose functions are installed.
--
--   order_id       in any spelling that its table reads
--   provider       its name in the settings, and currency: in small or capital letters
--   kind           of the order, if it is not the default one
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
-- Late money that is not settled is judged again at each report: it pays an order that is open by then.
--
-- Errors that no repetition removes begin with `final:` and have the SQLSTATE 22023 or 23505. Nothing was recorded.
--
-- SECURITY DEFINER: a callback's role needs EXECUTE on this function and no right on a table.
CREATE OR REPLACE FUNCTION payment_received(
    order_id text, provider text, reference text, amount_minor bigint, currency text, kind text DEFAULT 'order'
) RETURNS TABLE (outcome text, reason text, missing_minor bigint, surplus_minor bigint, is_new boolean)
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
    target record;
    attempt payment_attempts;
    known received_payments;
    of_kind text := payment_received.kind;
    id_text text := order_id_of_kind(of_kind, payment_received.order_id);
    payer text := canonical_provider(payment_received.provider);
    money text := canonical_currency(payment_received.currency);
    verdict text;
    why text;
    -- What earlier payments have counted, and whether one of them was in another currency.
    received bigint;
    is_mixed boolean;
    counted bigint := 0;
    missing bigint;
BEGIN
    PERFORM require_payment(id_text, payer, payment_received.reference, payment_received.amount_minor, money);
    -- The order's row first, as the close does: whatever decides is read behind this lock. It waits for a close that is
    -- being committed.
    SELECT * INTO target FROM locked_order(of_kind, id_text, true);
    IF target.state IS NULL AND uuid_of(id_text) IS NOT NULL AND has_default_tables(of_kind) THEN
        -- It may be in a transaction that commits at this moment.
        PERFORM pg_advisory_xact_lock('orders'::regclass::oid::integer, number_of_order(uuid_of(id_text)));
        SELECT * INTO target FROM locked_order(of_kind, id_text, true);
    END IF;
    SELECT * INTO attempt FROM payment_attempts a WHERE a.provider = payer AND a.reference = payment_received.reference;
    SELECT coalesce(sum(p.counted_minor), 0), coalesce(bool_or(p.currency <> money), false) INTO received, is_mixed
    FROM received_payments p WHERE p.order_id = id_text AND p.kind = of_kind AND p.counted_minor > 0;

    why := CASE
        WHEN target.state IS NULL THEN 'unknown_order'
        -- The shop itself has written for which order the customer was sent to the provider.
        WHEN attempt.kind <> of_kind OR order_id_of_kind(of_kind, attempt.order_id) <> id_text THEN 'other_order'
        WHEN target.state = 'paid' THEN 'already_paid'
        WHEN target.state IN ('closed', 'cancelled') THEN target.state
        WHEN target.state NOT IN ('open', 'closing') THEN 'not_open'
        -- While the close is being decided the provider's answer counts, and this is one.
        WHEN target.state = 'open' AND target.deadline <= clock_timestamp()
            AND NOT coalesce((SELECT s.pay_after_deadline FROM order_timeout_settings s), true) THEN 'after_deadline'
        -- Amounts of two currencies are never added up, even if the order does not say its own.
        WHEN target.currency <> money OR is_mixed THEN 'other_currency'
    END;
    -- NULL if it is not known what the order costs: then any payment pays it.
    missing := target.amount_minor - received;
    IF why IS NULL AND payment_received.amount_minor = 0 AND coalesce(missing, 1) > 0 THEN
        RAISE 'final: a payment of 0 was reported for order %, which is not free; report what was received', id_text
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

    INSERT INTO received_payments (provider, reference, kind, order_id, amount_minor, currency, outcome, reason)
    VALUES (payer, payment_received.reference, of_kind, id_text, payment_received.amount_minor, money, 'late', 'unknown_order')
    -- Another session's insert of the same payment is waited for. If it is rolled back, this one counts.
    ON CONFLICT DO NOTHING;
    IF NOT FOUND THEN
        known := recorded_payment(of_kind, id_text, payer, payment_received.reference, payment_received.amount_minor, money);
        IF (known.kind, known.order_id) = (of_kind, id_text) AND (verdict = 'late' OR NOT is_open_late_money(known)) THEN
            RETURN QUERY SELECT known.outcome, known.reason, known.missing_minor, known.surplus_minor, false;
            RETURN;
        END IF;
        PERFORM take_late_money(payer, payment_received.reference, id_text, 'payment_received');
    END IF;
    UPDATE received_payments p
    SET kind = of_kind, order_id = id_text, outcome = verdict, reason = why, counted_minor = counted,
        missing_minor = CASE WHEN verdict = 'partial' THEN missing - counted ELSE 0 END,
        surplus_minor = CASE WHEN verdict = 'paid' THEN payment_received.amount_minor - counted ELSE 0 END
    WHERE p.provider = payer AND p.reference = payment_received.reference;

    -- The money was taken: nothing is asked about this attempt any more if it pays for nothing, or is a part that counts. That
    -- of another order is left alone, because only its provider knows what became of it.
    UPDATE payment_attempts a SET state = CASE verdict WHEN 'partial' THEN 'counted' ELSE verdict END
    WHERE a.provider = payer AND a.reference = payment_received.reference AND (a.kind, a.order_id) = (of_kind, id_text);
    IF verdict = 'late' THEN
        PERFORM record_late_payment(of_kind, id_text, payer, payment_received.reference, payment_received.amount_minor, money, why);
    ELSE
        PERFORM count_payment(of_kind, id_text, target.amount_minor, verdict = 'paid',
                              payer || ' ' || payment_received.reference);
        IF payment_received.amount_minor > counted THEN
            PERFORM record_late_payment(of_kind, id_text, payer, payment_received.reference,
                                        payment_received.amount_minor - counted, money, 'surplus');
        END IF;
    END IF;
    RETURN QUERY SELECT p.outcome, p.reason, p.missing_minor, p.surplus_minor, true FROM received_payments p
    WHERE p.provider = payer AND p.reference = payment_received.reference;
END $$;

-- Counts money toward an open order whose row the caller has locked; if that pays the order, what it has reserved is
-- consumed. Not for callbacks.
CREATE OR REPLACE FUNCTION count_payment(kind text, order_id text, price bigint, pays boolean, why text)
RETURNS void LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
#variable_conflict use_column
BEGIN
    IF NOT count_for_order(kind, order_id, pays, 'payment', why, NULL) THEN
        RAISE 'a trigger keeps order % unpaid; the payment is not recorded, so report it again', order_id;
    END IF;
    IF NOT pays THEN
        RETURN;
    END IF;
    PERFORM release_excess(kind, order_id, price);
    -- If the order was being closed, nothing is left to do about it; a worker that has it finds its lease lost.
    DELETE FROM close_attempts c WHERE c.kind = count_payment.kind AND c.order_id = count_payment.order_id;
    PERFORM consume_for_orders(kind, ARRAY[order_id]);
END $$;

-- A payment that did not pay an order behind statements of the shop's own: its guarded update has found it closed. The
-- columns and errors are those of payment_received; outcome is late, reason is not_open.
CREATE OR REPLACE FUNCTION late_payment_received(
    order_id text, provider text, reference text, amount_minor bigint, currency text, kind text DEFAULT 'order'
) RETURNS TABLE (outcome text, reason text, missing_minor bigint, surplus_minor bigint, is_new boolean)
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
    payer text := canonical_provider(late_payment_received.provider);
    money text := canonical_currency(late_payment_received.currency);
    known received_payments;
BEGIN
    PERFORM require_payment(late_payment_received.order_id, payer, late_payment_received.reference,
                            late_payment_received.amount_minor, money);
    INSERT INTO received_payments (provider, reference, kind, order_id, amount_minor, currency, outcome, reason)
    VALUES (payer, late_payment_received.reference, late_payment_received.kind, late_payment_received.order_id, late_payment_received.amount_minor,
            money, 'late', 'not_open')
    ON CONFLICT DO NOTHING;
    IF NOT FOUND THEN
        known := recorded_payment(late_payment_received.kind, late_payment_received.order_id, payer,
                                  late_payment_received.reference, late_payment_received.amount_minor, money);
        IF (known.kind, known.order_id) = (late_payment_received.kind, late_payment_received.order_id) THEN
            RETURN QUERY SELECT known.outcome, known.reason, known.missing_minor, known.surplus_minor, false;
            RETURN;
        END IF;
        -- It was reported for another order before.
        UPDATE received_payments p SET kind = late_payment_received.kind, order_id = late_payment_received.order_id
        WHERE p.provider = payer AND p.reference = late_payment_received.reference;
        PERFORM take_late_money(payer, late_payment_received.reference, late_payment_received.order_id, 'late_payment_received');
    END IF;
    UPDATE payment_attempts a SET state = 'late'
    WHERE a.provider = payer AND a.reference = late_payment_received.reference;
    PERFORM record_late_payment(late_payment_received.kind, late_payment_received.order_id, payer,
                                late_payment_received.reference, late_payment_received.amount_minor, money, 'not_open');
    RETURN QUERY SELECT 'late', 'not_open', 0::bigint, 0::bigint, true;
END $$;

REVOKE ALL ON FUNCTION
    require_payment(text, text, text, bigint, text),
    recorded_payment(text, text, text, text, bigint, text),
    is_open_late_money(received_payments),
    take_late_money(text, text, text, text),
    payment_received(text, text, text, bigint, text, text),
    count_payment(text, text, bigint, boolean, text),
    late_payment_received(text, text, text, bigint, text, text)
FROM PUBLIC;
