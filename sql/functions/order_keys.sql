-- How an order of the default table `orders` is named in tables that have the ids of any orders table.

-- The key in the default table `orders`, from any spelling of a UUID that Postgres reads, and with the prefix of RFC 9562;
-- NULL for a text that is none, so that money for such an order is recorded all the same.
CREATE OR REPLACE FUNCTION default_order_key(order_id text) RETURNS uuid LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE WHEN k.id ~ '^(([0-9a-f]{4}-?){7}[0-9a-f]{4}|\{([0-9a-f]{4}-?){7}[0-9a-f]{4}\})$' THEN k.id::uuid END
    FROM regexp_replace(lower(btrim(order_id, E' \t\r\n')), '^urn:uuid:', '') AS k (id)
$$;

-- Attempts are found by the order's id as the table prints it, by the provider's name in the settings, and by a currency in
-- capital letters; a shop may write all three otherwise. A UUID without hyphens may be the key of a table of the shop's own:
-- it is another spelling only if there is such an order.
CREATE OR REPLACE FUNCTION canonical_attempt() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
DECLARE
    key uuid := default_order_key(NEW.order_id);
BEGIN
    IF lower(NEW.order_id) = key::text OR EXISTS (SELECT FROM orders o WHERE o.id = key) THEN
        NEW.order_id := key::text;
    END IF;
    NEW.provider := canonical_provider(NEW.provider);
    NEW.currency := canonical_currency(NEW.currency);
    RETURN NEW;
END $$;

CREATE OR REPLACE FUNCTION canonical_provider(provider text) RETURNS text LANGUAGE sql IMMUTABLE AS $$
    SELECT lower(btrim(provider, E' \t\r\n'))
$$;

CREATE OR REPLACE FUNCTION canonical_currency(currency text) RETURNS text LANGUAGE sql IMMUTABLE AS $$
    SELECT upper(btrim(currency, E' \t\r\n'))
$$;

-- A payment of an order that is not there yet locks its number alone, and the transaction that creates the order shares it
-- while it commits: so one of the two sees the other. 256 numbers, so that a transaction with many orders needs no more.
CREATE OR REPLACE FUNCTION number_of_order(order_id uuid) RETURNS integer LANGUAGE sql IMMUTABLE AS $$
    SELECT hashtext(order_id::text) & 255
$$;

DO $$
BEGIN
    -- CREATE OR REPLACE TRIGGER needs PostgreSQL 14.
    IF NOT EXISTS (SELECT FROM pg_trigger t
                   WHERE t.tgrelid = 'payment_attempts'::regclass AND t.tgname = 'canonical_attempt') THEN
        CREATE TRIGGER canonical_attempt BEFORE INSERT OR UPDATE OF order_id, provider, currency ON payment_attempts
            FOR EACH ROW EXECUTE FUNCTION canonical_attempt();
    END IF;
END $$;
