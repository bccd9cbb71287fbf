-- Orders that are paid at the end of a transaction of the shop, without a report: by money that came before the order, or
-- because a lower price leaves nothing to pay.
--
-- Both wait for the end of the transaction, when the order's items and its price are there.

-- What listeners are told of such an order: as of one that a provider said is paid (sql/settle_paid.sql). Not for callbacks.
CREATE OR REPLACE FUNCTION announce_paid(order_id uuid) RETURNS void LANGUAGE sql SET search_path FROM CURRENT AS $$
    INSERT INTO event_outbox (routing_key, type, payload)
    SELECT 'order.paid_late_settled', 'order.paid_late_settled.v1',
           jsonb_build_object(
               'order_id', announce_paid.order_id,
               'deadline', to_char(f.deadline AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'),
               'settled_at', to_char(clock_timestamp() AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'),
               'attempts', f.attempts)
           || CASE WHEN f.late_minor > 0 THEN jsonb_build_object('surplus_minor', f.late_minor) ELSE '{}' END
    FROM paid_attempts(announce_paid.order_id::text) AS f
$$;

-- Money that was reported before its order was there.
CREATE OR REPLACE FUNCTION money_before_order() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
DECLARE
    early record;
    became text;
    has_paid boolean := false;
BEGIN
    PERFORM pg_advisory_xact_lock_shared('orders'::regclass::oid::integer, number_of_order(NEW.id));
    FOR early IN
        SELECT p.provider, p.reference, p.amount_minor, p.currency
        FROM late_payments l
        JOIN received_payments p ON p.provider = l.provider AND p.reference = l.reference
        WHERE l.order_id = NEW.id::text AND l.state = 'open' AND l.reason = 'unknown_order' AND p.amount_minor > 0
        ORDER BY l.id
    LOOP
        BEGIN
            SELECT r.outcome INTO became
            FROM payment_received(NEW.id::text, early.provider, early.reference, early.amount_minor, early.currency) AS r;
            has_paid := has_paid OR became = 'paid';
        EXCEPTION WHEN OTHERS THEN
            -- No order may fail for its money, which stays late.
            RAISE WARNING 'payment % of % was not counted for order %: %', early.reference, early.provider, NEW.id, SQLERRM;
        END;
    END LOOP;
    IF has_paid THEN
        PERFORM announce_paid(NEW.id);
    END IF;
    RETURN NULL;
END $$;

-- A price that is no more than what was received.
CREATE OR REPLACE FUNCTION nothing_left_to_pay() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
DECLARE
    target orders;
BEGIN
    SELECT * INTO target FROM orders o WHERE o.id = NEW.id FOR NO KEY UPDATE;
    IF target.status IN ('unpaid', 'closing') AND target.received_minor >= target.amount_minor THEN
        PERFORM count_payment(target.id, 0, true, 'price lowered to', target.amount_minor::text);
        PERFORM announce_paid(target.id);
    END IF;
    RETURN NULL;
END $$;

DO $$
BEGIN
    IF NOT EXISTS (SELECT FROM pg_trigger t WHERE t.tgrelid = 'orders'::regclass AND t.tgname = 'money_before_order') THEN
        CREATE CONSTRAINT TRIGGER money_before_order AFTER INSERT ON orders
            DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION money_before_order();
    END IF;
    IF NOT EXISTS (SELECT FROM pg_trigger t WHERE t.tgrelid = 'orders'::regclass AND t.tgname = 'nothing_left_to_pay') THEN
        CREATE CONSTRAINT TRIGGER nothing_left_to_pay AFTER UPDATE OF amount_minor ON orders
            DEFERRABLE INITIALLY DEFERRED FOR EACH ROW
            WHEN (NEW.status IN ('unpaid', 'closing') AND NEW.received_minor >= NEW.amount_minor)
            EXECUTE FUNCTION nothing_left_to_pay();
    END IF;
END $$;

REVOKE ALL ON FUNCTION announce_paid(uuid) FROM PUBLIC;
