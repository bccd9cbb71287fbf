-- Orders that are paid at the end of a transaction of the shop, without a report: by money that came before the order, or
-- because a lower price leaves nothing to pay.
--
-- Both wait for the end of the transaction, when the order's items and its price are there.

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
        WHERE l.order_id = NEW.id::text AND l.kind = 'order' AND l.state = 'open' AND l.reason = 'unknown_order' AND p.amount_minor > 0
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
        PERFORM announce_paid('order', NEW.id::text, NEW.expires_at);
    END IF;
    RETURN NULL;
END $$;

-- A price that is no more than what was received.
CREATE OR REPLACE FUNCTION nothing_left_to_pay() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
DECLARE
    target orders;
    received bigint := (SELECT sum(p.counted_minor) FROM received_payments p
                        WHERE p.order_id = NEW.id::text AND p.kind = 'order' AND p.counted_minor > 0);
BEGIN
    SELECT * INTO target FROM orders o WHERE o.id = NEW.id AND received > 0 FOR NO KEY UPDATE;
    IF target.status IN ('unpaid', 'closing') AND received >= target.amount_minor THEN
        PERFORM count_payment('order', target.id::text, target.amount_minor, true, 'price lowered to ' || target.amount_minor);
        PERFORM announce_paid('order', target.id::text, target.expires_at);
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
            WHEN (NEW.status IN ('unpaid', 'closing') AND NEW.amount_minor IS DISTINCT FROM OLD.amount_minor)
            EXECUTE FUNCTION nothing_left_to_pay();
    END IF;
END $$;
