-- How an order of the default table `orders` is named in tables that have the ids of any orders table.

-- The key in the default table `orders`; NULL for a text that is none, so that such a payment is recorded all the same.
CREATE OR REPLACE FUNCTION default_order_key(order_id text) RETURNS uuid LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE WHEN order_id ~ '^[0-9a-fA-F]{8}-([0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}$' THEN order_id::uuid END
$$;

-- Attempts are found by the order's id as the table prints it; a shop may write it in upper case.
CREATE OR REPLACE FUNCTION canonical_order_id_of_attempt() RETURNS trigger LANGUAGE plpgsql
SET search_path FROM CURRENT AS $$
BEGIN
    NEW.order_id := coalesce(default_order_key(NEW.order_id)::text, NEW.order_id);
    RETURN NEW;
END $$;

DO $$
BEGIN
    -- CREATE OR REPLACE TRIGGER needs PostgreSQL 14.
    IF NOT EXISTS (SELECT FROM pg_trigger t
                   WHERE t.tgrelid = 'payment_attempts'::regclass AND t.tgname = 'canonical_order_id') THEN
        CREATE TRIGGER canonical_order_id BEFORE INSERT OR UPDATE OF order_id ON payment_attempts
            FOR EACH ROW EXECUTE FUNCTION canonical_order_id_of_attempt();
    END IF;
END $$;
