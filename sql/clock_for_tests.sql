-- Makes this database one for tests: its clock can be moved. `order-timeout setup --for-tests` runs it, before there is any
-- other object of ours, whose statements then read these functions instead of those of Postgres.

CREATE SCHEMA order_timeout_clock;
GRANT USAGE ON SCHEMA order_timeout_clock TO PUBLIC;

-- How far the clock is ahead, in microseconds. A sequence, because it belongs to no transaction: a test that advances the clock
-- within one need not commit.
CREATE SEQUENCE order_timeout_clock.ahead_us MINVALUE 0 START 0;
GRANT SELECT, UPDATE ON order_timeout_clock.ahead_us TO PUBLIC;

CREATE FUNCTION order_timeout_clock.clock_timestamp() RETURNS timestamptz LANGUAGE sql VOLATILE PARALLEL SAFE
AS $$ SELECT pg_catalog.clock_timestamp() + last_value * interval '1 microsecond' FROM order_timeout_clock.ahead_us $$;

-- Stable as Postgres' own, so that they can bound an index scan.
CREATE FUNCTION order_timeout_clock.statement_timestamp() RETURNS timestamptz LANGUAGE sql STABLE PARALLEL SAFE
AS $$ SELECT pg_catalog.statement_timestamp() + last_value * interval '1 microsecond' FROM order_timeout_clock.ahead_us $$;

CREATE FUNCTION order_timeout_clock.transaction_timestamp() RETURNS timestamptz LANGUAGE sql STABLE PARALLEL SAFE
AS $$ SELECT pg_catalog.transaction_timestamp() + last_value * interval '1 microsecond' FROM order_timeout_clock.ahead_us $$;

CREATE FUNCTION order_timeout_clock.now() RETURNS timestamptz LANGUAGE sql STABLE PARALLEL SAFE
AS $$ SELECT pg_catalog.now() + last_value * interval '1 microsecond' FROM order_timeout_clock.ahead_us $$;

-- Moves the clock, and returns what it says then. Everything that fell due meanwhile is overdue.
CREATE FUNCTION order_timeout_clock.advance(step interval) RETURNS timestamptz LANGUAGE plpgsql AS $$
BEGIN
    IF step IS NULL OR step < interval '0' OR step > interval '100 years' THEN
        RAISE 'final: the clock cannot be moved by %; give a time from 0 to 100 years', coalesce(step::text, 'NULL')
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    -- Two sessions that advance it at once move it by both.
    PERFORM pg_advisory_lock(hashtextextended('order_timeout_clock', 0));
    PERFORM setval('order_timeout_clock.ahead_us', last_value + (extract(epoch FROM step) * 1000000)::bigint)
    FROM order_timeout_clock.ahead_us;
    PERFORM pg_advisory_unlock(hashtextextended('order_timeout_clock', 0));
    RETURN order_timeout_clock.clock_timestamp();
END $$;
