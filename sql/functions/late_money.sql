-- Money that paid for nothing: records it, and makes late what an order no longer needs.

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
        -- As in an alarm: the default kind is not named.
        || CASE WHEN late.kind = 'order' THEN '{}' ELSE jsonb_build_object('kind', late.kind) END
$$;

-- Money that paid for nothing, or not for this order: recorded, announced, and in the order's history if it has one.
-- The caller has locked the order's row, if there is one. Not for callbacks.
CREATE OR REPLACE FUNCTION record_late_payment(
    kind text, order_id text, provider text, reference text, amount_minor bigint, currency text, reason text
) RETURNS void LANGUAGE plpgsql
SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
    late late_payments;
BEGIN
    INSERT INTO late_payments (kind, order_id, provider, reference, amount_minor, currency, reason)
    VALUES (record_late_payment.kind, record_late_payment.order_id, record_late_payment.provider, record_late_payment.reference,
            record_late_payment.amount_minor, record_late_payment.currency, record_late_payment.reason)
    RETURNING * INTO late;
    INSERT INTO order_events (order_id, event, by, reason)
    SELECT o.id, 'payment_late', 'payment', late.reason || ': ' || late.provider || ' ' || late.reference
    FROM orders o
    WHERE late.kind = 'order' AND o.id = uuid_of(late.order_id);
    INSERT INTO event_outbox (kind, routing_key, type, payload)
    VALUES (late.kind, 'order.payment_late', 'order.payment_late.v1', late_payment_as_json(late));
END $$;

-- The part payments of an order that was closed or cancelled become late money. A shop calls it where it cancels an
-- order. Returns how many there were: none while the order is open or paid, so that every role may call it.
CREATE OR REPLACE FUNCTION release_part_payments(order_id text, kind text DEFAULT 'order') RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
    id_text text := order_id_of_kind(release_part_payments.kind, release_part_payments.order_id);
    was text;
BEGIN
    SELECT l.state INTO was FROM locked_order(release_part_payments.kind, id_text, true) l;
    IF was IS NULL OR was IN ('open', 'closing', 'paid') THEN
        RETURN 0;
    END IF;
    RETURN release_counted_parts(release_part_payments.kind, id_text);
END $$;

-- The same for an order that is known to have ended. Not for callbacks.
CREATE OR REPLACE FUNCTION release_counted_parts(kind text, order_id text) RETURNS bigint LANGUAGE plpgsql
SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
    part received_payments;
    released bigint := 0;
BEGIN
    FOR part IN
        SELECT * FROM received_payments p
        WHERE p.order_id = release_counted_parts.order_id AND p.kind = release_counted_parts.kind
          AND p.outcome = 'partial' AND p.counted_minor > 0
        ORDER BY p.received_at, p.provider, p.reference
        FOR NO KEY UPDATE
    LOOP
        UPDATE received_payments p SET counted_minor = 0 WHERE p.provider = part.provider AND p.reference = part.reference;
        UPDATE payment_attempts a SET state = 'late'
        WHERE a.provider = part.provider AND a.reference = part.reference AND a.state = 'counted';
        PERFORM record_late_payment(part.kind, part.order_id, part.provider, part.reference, part.counted_minor,
                                    part.currency, 'part_payment');
        released := released + 1;
    END LOOP;
    RETURN released;
END $$;

-- The same for orders that were closed in this statement, which calls it: their rows may be gone. VOLATILE, so that it reads with a
-- snapshot of its own. Every role may call it, as the close does, so it leaves an order alone that is open or paid.
CREATE OR REPLACE FUNCTION release_parts_of(order_ids text[], of_kind text) RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT AS $$
BEGIN
    PERFORM release_counted_parts(of_kind, r.order_id) FROM (
        SELECT DISTINCT p.order_id FROM received_payments p
        -- As the index of parts says: it is small, and most shops have none.
        WHERE (SELECT EXISTS (SELECT FROM received_payments WHERE outcome = 'partial' AND counted_minor > 0))
          AND p.order_id = ANY (order_ids) AND p.kind = of_kind AND p.outcome = 'partial' AND p.counted_minor > 0
        ORDER BY p.order_id
    ) r
    WHERE (SELECT l.state IN ('open', 'closing', 'paid') FROM locked_order(of_kind, r.order_id, true) l) IS NOT TRUE;
END $$;

-- An order that is locked has been paid: what was counted beyond its price, because the shop has lowered it since, becomes
-- late money, and nothing is left of a close that was begun. Not for callbacks.
CREATE OR REPLACE FUNCTION release_excess(kind text, order_id text, price bigint) RETURNS void LANGUAGE plpgsql
SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
    excess bigint := (SELECT sum(p.counted_minor) FROM received_payments p
                      WHERE p.order_id = release_excess.order_id AND p.kind = release_excess.kind) - release_excess.price;
    part received_payments;
    back bigint;
BEGIN
    FOR part IN
        SELECT * FROM received_payments p
        WHERE excess > 0 AND p.order_id = release_excess.order_id AND p.kind = release_excess.kind AND p.counted_minor > 0
        ORDER BY p.received_at DESC, p.provider, p.reference
        FOR NO KEY UPDATE
    LOOP
        back := least(part.counted_minor, excess);
        excess := excess - back;
        EXIT WHEN back = 0;
        UPDATE received_payments p SET counted_minor = p.counted_minor - back
        WHERE p.provider = part.provider AND p.reference = part.reference;
        PERFORM record_late_payment(part.kind, part.order_id, part.provider, part.reference, back, part.currency, 'surplus');
    END LOOP;
END $$;

REVOKE ALL ON FUNCTION
    record_late_payment(text, text, text, text, bigint, text, text),
    release_counted_parts(text, text),
    release_excess(text, text, bigint)
FROM PUBLIC;
