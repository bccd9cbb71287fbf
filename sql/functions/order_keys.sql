-- How an order of any kind is named, locked, paid, consumed, moved and reopened: by the functions of its kind.

-- A UUID from any spelling that Postgres reads, and with the prefix of RFC 9562; NULL for a text that is none, so that money for such
-- an order is recorded all the same.
CREATE OR REPLACE FUNCTION uuid_of(order_id text) RETURNS uuid LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE WHEN k.id ~ '^(([0-9a-f]{4}-?){7}[0-9a-f]{4}|\{([0-9a-f]{4}-?){7}[0-9a-f]{4}\})$' THEN k.id::uuid END
    FROM regexp_replace(lower(btrim(order_id, E' \t\r\n')), '^urn:uuid:', '') AS k (id)
$$;

-- Fails with this sentence, from within an expression. Not for callbacks.
CREATE OR REPLACE FUNCTION refuse(why text) RETURNS bigint LANGUAGE plpgsql AS $$
BEGIN
    RAISE '%', why;
END $$;

-- The function of a kind that does this: `id`, `order`, `close`, `move`, `pay`, `consume`, `reopen` or `attempts`. They are
-- rendered from the mapping of its table (`order-timeout adopt --install`); the kind `order` has those of the default tables until
-- there are others.
CREATE OR REPLACE FUNCTION function_of_kind(kind text, what text) RETURNS text LANGUAGE plpgsql STABLE
SET search_path FROM CURRENT AS $$
DECLARE
    mapped text := format('kind_%s_%s', kind, what);
BEGIN
    IF kind !~ '^[a-z][a-z0-9_]{0,39}$' THEN
        RAISE 'final: % is no name of a kind; name one of the settings', quote_literal(left(kind, 200))
            USING ERRCODE = 'invalid_parameter_value';
    ELSIF to_regproc(mapped) IS NOT NULL THEN
        RETURN mapped;
    ELSIF has_default_tables(kind) THEN
        RETURN 'default_' || what;
    END IF;
    RAISE 'final: the kind % lacks the function %; run order-timeout adopt --kind % --install', kind, mapped, kind
        USING ERRCODE = 'invalid_parameter_value';
END $$;

-- Whether orders of this kind are in the default tables.
CREATE OR REPLACE FUNCTION has_default_tables(kind text) RETURNS boolean LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
    SELECT kind = 'order' AND to_regproc('kind_order_close') IS NULL
$$;

-- The order's id as its table prints it; the text itself if it is no id of that table.
CREATE OR REPLACE FUNCTION order_id_of_kind(kind text, order_id text) RETURNS text LANGUAGE plpgsql STABLE STRICT
SET search_path FROM CURRENT AS $$
DECLARE
    printed text;
BEGIN
    EXECUTE format('SELECT %I($1)', function_of_kind(kind, 'id')) INTO printed USING order_id;
    RETURN coalesce(printed, order_id);
END $$;

-- The order with this id, as its table prints it, whose row is locked, and its state: open | closing | paid | closed |
-- cancelled | not_open; NULL if there is no such order; busy if another session holds it and this one does not wait. Not for
-- callbacks.
CREATE OR REPLACE FUNCTION locked_order(
    kind text, order_id text, waits boolean,
    OUT state text, OUT deadline timestamptz, OUT amount_minor bigint, OUT currency text
) LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
BEGIN
    -- It reads what was committed before it began: not the payments and attempts of a session for whose lock it waits.
    -- SERIALIZABLE does too, and fails then in the default tables, where each payment changes the order's row.
    IF current_setting('transaction_isolation') = 'repeatable read'
        OR current_setting('transaction_isolation') = 'serializable' AND NOT has_default_tables(kind) THEN
        RAISE 'this transaction is % and does not see payments that are reported meanwhile; begin it as READ COMMITTED, or ALTER ROLE % SET default_transaction_isolation = ''read committed''',
            upper(current_setting('transaction_isolation')), quote_ident(session_user) USING ERRCODE = 'invalid_transaction_state';
    END IF;
    EXECUTE format('SELECT * FROM %I($1, $2)', function_of_kind(kind, 'order'))
    INTO state, deadline, amount_minor, currency USING order_id, waits;
    IF waits THEN
        -- The claim next: what ends claims locks them before the attempts.
        PERFORM FROM close_attempts c WHERE c.order_id = locked_order.order_id AND c.kind = locked_order.kind FOR NO KEY UPDATE;
    ELSE
        PERFORM FROM close_attempts c WHERE c.order_id = locked_order.order_id AND c.kind = locked_order.kind;
    END IF;
    -- Claimed: a table without a status for it says no more than that the order is open.
    IF FOUND AND state = 'open' THEN
        state := 'closing';
    END IF;
END $$;

-- The same without waiting, for sql/settle_paid.sql. Not for callbacks.
CREATE OR REPLACE FUNCTION lock_free_order(kind text, order_id text, OUT state text, OUT deadline timestamptz)
LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT AS $$
    SELECT l.state, l.deadline FROM locked_order(kind, order_id, false) l
$$;

-- Money of an open order that is locked: with `pays` the order is paid by it; says whether its row has changed then. What counts is
-- in received_payments alone. `by`, `why` and `answers` are for the history, which the default tables have. Not for callbacks.
CREATE OR REPLACE FUNCTION count_for_order(kind text, order_id text, pays boolean, by text, why text, answers text)
RETURNS boolean LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    has_changed boolean := true;
BEGIN
    IF pays THEN
        EXECUTE format('SELECT %I($1)', function_of_kind(kind, 'pay')) INTO has_changed USING order_id;
    ELSIF has_default_tables(kind) THEN
        -- So that a transaction with an older snapshot, which does not see the payment, fails at this row.
        UPDATE orders o SET status = o.status WHERE o.id = uuid_of(count_for_order.order_id);
    END IF;
    IF has_changed AND has_default_tables(kind) THEN
        INSERT INTO order_events (order_id, event, by, reason, answers)
        VALUES (uuid_of(count_for_order.order_id), CASE WHEN pays THEN 'paid' ELSE 'payment_received' END, count_for_order.by, why,
                nullif(count_for_order.answers, ''));
    END IF;
    RETURN has_changed;
END $$;

-- What paid orders have reserved is consumed. Not for callbacks.
CREATE OR REPLACE FUNCTION consume_for_orders(kind text, order_ids text[]) RETURNS void LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT AS $$
BEGIN
    EXECUTE format('SELECT %I($1)', function_of_kind(kind, 'consume')) USING order_ids;
END $$;

-- Pays a closed order that is locked with money that came late: takes again what its close gave back, and consumes it. Or returns
-- the stock of which too little is left, and has changed nothing. Not for callbacks.
CREATE OR REPLACE FUNCTION reopen_order(kind text, order_id text)
RETURNS TABLE (stock text, key text, wanted text, available text) LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT AS $$
BEGIN
    RETURN QUERY EXECUTE format('SELECT * FROM %I($1)', function_of_kind(kind, 'reopen')) USING order_id;
END $$;

-- Attempts are found by the order's id as its table prints it, by the provider's name in the settings, and by a currency in
-- capital letters; a shop may write all three otherwise.
CREATE OR REPLACE FUNCTION canonical_attempt() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
DECLARE
    key uuid := uuid_of(NEW.order_id);
BEGIN
    NEW.order_id := CASE
        WHEN to_regproc(format('%I', 'kind_' || NEW.kind || '_id')) IS NOT NULL THEN order_id_of_kind(NEW.kind, NEW.order_id)
        -- A UUID without hyphens may be the key of a table behind statements of the shop's own: it is another spelling only if
        -- there is such an order.
        WHEN NEW.kind = 'order' AND (lower(NEW.order_id) = key::text OR EXISTS (SELECT FROM orders o WHERE o.id = key))
            THEN key::text
        ELSE NEW.order_id
    END;
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
        CREATE TRIGGER canonical_attempt BEFORE INSERT OR UPDATE OF order_id, kind, provider, currency ON payment_attempts
            FOR EACH ROW EXECUTE FUNCTION canonical_attempt();
    END IF;
END $$;

REVOKE ALL ON FUNCTION
    refuse(text),
    locked_order(text, text, boolean),
    lock_free_order(text, text),
    count_for_order(text, text, boolean, text, text, text),
    consume_for_orders(text, text[]),
    reopen_order(text, text)
FROM PUBLIC;
