-- Counts the money of orders whose providers were asked, for sql/settle_paid.sql, and ends claims.

-- Writes down what a provider says it has received for an order, when it was asked because the order was to be closed:
-- pays an order that is being closed, announces that, and records what does not count as late money. The caller has locked
-- the order's row if there is one, and consumes what a settled order has reserved (sql/settle_paid.sql). Not for callbacks.
--
--   references, with the provider of each, what was received, and whether that is what the attempt was to pay
--
--   settled        the order is paid by this
--   already_paid   it was paid before; money of which nothing was known is late now
--   paid_late      it is closed, cancelled or deleted: the money is late
--   amount_differs what was received does not cover what the order costs; nothing was written
--   kept           a trigger keeps the order as it is; nothing was written
CREATE OR REPLACE FUNCTION settle_asked_order(
    kind text, order_id text, providers text[], refs text[], amounts bigint[], currencies text[], whole boolean[],
    answers text
) RETURNS text LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
    target record;
    of_kind text := settle_asked_order.kind;
    -- Whether a payment was not reported before: then it has counted already, or was late.
    fresh boolean[] := '{}';
    -- The currency that counts.
    money text;
    -- What earlier payments have counted; NULL if there were none.
    received bigint;
    -- What the order lacks; NULL: the next amount pays it, whatever that is.
    missing bigint;
    counted bigint[] := '{}';
    total bigint := 0;
    verdict text;
    why text := 'already_paid';
    late_as text;
    result text;
BEGIN
    SELECT * INTO target FROM locked_order(of_kind, settle_asked_order.order_id, true);
    SELECT sum(p.counted_minor), coalesce(target.currency, min(p.currency)) INTO received, money
    FROM received_payments p
    WHERE p.order_id = settle_asked_order.order_id AND p.kind = of_kind AND (p.counted_minor > 0 OR p.outcome = 'paid');
    money := coalesce(money, currencies[array_position(whole, true)]);
    missing := target.amount_minor - coalesce(received, 0);
    IF target.state IN ('open', 'closing') THEN
        result := 'settled';
    ELSIF target.state = 'paid' THEN
        result := 'already_paid';
        IF received IS NOT NULL THEN
            missing := 0;
        END IF;
    ELSE
        result := 'paid_late';
        why := CASE WHEN target.state IS NULL THEN 'unknown_order' ELSE target.state END;
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
        IF NOT count_for_order(of_kind, settle_asked_order.order_id, true, 'provider',
                               'the provider had the money when the order was to be closed', answers) THEN
            RETURN 'kept';
        END IF;
    END IF;
    missing := greatest(missing, 0);
    FOR n IN 1 .. cardinality(refs) LOOP
        CONTINUE WHEN NOT fresh[n];
        missing := missing - counted[n];
        verdict := CASE WHEN counted[n] = 0 THEN 'late' WHEN missing > 0 THEN 'partial' ELSE 'paid' END;
        late_as := CASE WHEN verdict <> 'late' THEN 'surplus'
                        WHEN currencies[n] <> money AND result = 'settled' THEN 'other_currency' ELSE why END;
        INSERT INTO received_payments (provider, reference, kind, order_id, amount_minor, currency, outcome, reason,
                                       counted_minor, missing_minor, surplus_minor)
        VALUES (providers[n], refs[n], of_kind, settle_asked_order.order_id, amounts[n], currencies[n], verdict,
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
            PERFORM record_late_payment(of_kind, settle_asked_order.order_id, providers[n], refs[n], amounts[n] - counted[n],
                                        currencies[n], late_as);
        END IF;
    END LOOP;
    IF result = 'settled' THEN
        PERFORM release_excess(of_kind, settle_asked_order.order_id, target.amount_minor);
        PERFORM announce_paid(of_kind, settle_asked_order.order_id, target.deadline);
    END IF;
    RETURN result;
END $$;

-- What listeners are told of an order that is paid without a report of the shop. Not for callbacks.
CREATE OR REPLACE FUNCTION announce_paid(kind text, order_id text, deadline timestamptz) RETURNS void LANGUAGE sql
SET search_path FROM CURRENT AS $$
    INSERT INTO event_outbox (kind, routing_key, type, payload)
    SELECT announce_paid.kind, 'order.paid_late_settled', 'order.paid_late_settled.v1',
           jsonb_build_object(
               'order_id', announce_paid.order_id,
               'deadline', to_char(announce_paid.deadline AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'),
               'settled_at', to_char(clock_timestamp() AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'),
               'attempts', jsonb_agg(jsonb_build_object(
                   'provider', p.provider, 'reference', p.reference, 'amount_minor', p.amount_minor, 'currency', p.currency)
                   ORDER BY p.received_at, p.provider, p.reference))
           -- As in an alarm: the default kind is not named.
           || CASE WHEN announce_paid.kind = 'order' THEN '{}' ELSE jsonb_build_object('kind', announce_paid.kind) END
           -- More than the order costs: a customer who paid twice. It is late money.
           || CASE WHEN sum(p.amount_minor - p.counted_minor) > 0
                   THEN jsonb_build_object('surplus_minor', sum(p.amount_minor - p.counted_minor)) ELSE '{}' END
           -- Only if an operator has decided it.
           || jsonb_strip_nulls(jsonb_build_object('why', nullif(current_setting('order_timeout.why', true), '')))
    FROM received_payments p
    WHERE p.order_id = announce_paid.order_id AND p.kind = announce_paid.kind
$$;

-- Ends the claims of orders that are closed, or about which nothing is left to do, in the transaction of their close.
--
--   order_ids  orders whose claims this transaction holds (sql/hold_claimed.sql)
--   closed     those among them that it has closed
--   answers    order id -> what the providers answered, for the history
--
-- A worker's role needs no right to change the history. Not for callbacks.
CREATE OR REPLACE FUNCTION end_claims(of_kind text, order_ids text[], closed text[], answers jsonb) RETURNS void
LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT AS $$
    WITH ended AS (
        DELETE FROM close_attempts c
        -- kind || '': so that the primary key is used.
        WHERE c.kind || '' = of_kind AND c.order_id = ANY (order_ids)
        RETURNING c.order_id, c.who, c.why, c.rounds, c.last_answers
    )
    -- The claim ends here, and with it what it knows. A mapped table has no history of ours.
    UPDATE order_events e
    SET who = n.who, why = n.why,
        answers = nullif(concat_ws('; ',
            CASE WHEN n.rounds > 0 THEN concat('rounds without an answer: ', n.rounds, ', the last: ', n.last_answers) END,
            nullif(end_claims.answers ->> n.order_id, '')), '')
    FROM ended n
    WHERE of_kind = 'order' AND e.event = 'closed' AND e.order_id = uuid_of(n.order_id) AND n.order_id = ANY (closed)
$$;

REVOKE ALL ON FUNCTION
    settle_asked_order(text, text, text[], text[], bigint[], text[], boolean[], text),
    announce_paid(text, text, timestamptz),
    end_claims(text, text[], text[], jsonb)
FROM PUBLIC;
