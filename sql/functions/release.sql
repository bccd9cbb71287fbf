-- A payment has failed for good, or its session has died: the order closes now instead of at its deadline.
--
-- A payment callback calls release in one statement (docs/PAYMENTS.md). It asks no provider, and never closes an order with an
-- attempt that may still bring money.
--
--   order_id  in any spelling that its table reads
--   reason    1 to 200 bytes, for the event and the history
--   kind      of the order, if it is not the default one
--
--   closed          by this call
--   already_closed  or cancelled, or not open for another reason
--   paid            nothing is left to do
--   closing         its provider is being asked: that decides
--   attempt_open    an attempt may bring money: set the state of the one that has failed to `closed`
--   paused          closing is paused: it closes at its deadline, after the pause
--   not_due         it has no deadline, with which it is never closed, or a trigger keeps it open
--   busy            its row cannot be deleted yet, because another session refers to it: call again
--   unknown, malformed
--
-- Errors that no repetition removes begin with `final:` and have the SQLSTATE 22023. Nothing has changed.
--
-- SECURITY DEFINER: a callback's role needs EXECUTE on this function and no right on a table.
-- Without sequential scans and compiled plans, as a worker closes.
CREATE OR REPLACE FUNCTION release(order_id text, reason text, kind text DEFAULT 'order') RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    of_kind text := release.kind;
    id_text text := order_id_of_kind(of_kind, release.order_id);
    -- Set back at the end. Not by a SET clause, which for a setting of our own needs a superuser from PostgreSQL 15.
    why_before text := coalesce(current_setting('order_timeout.why', true), '');
    was text;
    answer text;
BEGIN
    IF id_text IS NULL THEN
        RAISE 'final: the order id is NULL; name the order to release' USING ERRCODE = 'invalid_parameter_value';
    ELSIF (octet_length(release.reason) BETWEEN 1 AND 200 AND release.reason !~ '[\x01-\x1f\x7f-\u009f]') IS NOT TRUE THEN
        RAISE 'final: the reason % is not 1 to 200 bytes without control characters; say in a sentence why the order is released',
            coalesce(quote_literal(left(release.reason, 200)), 'NULL') USING ERRCODE = 'invalid_parameter_value';
    END IF;
    -- The order's row first, as a payment does, for which it waits: whatever decides is read behind this lock.
    SELECT l.state INTO was FROM locked_order(of_kind, id_text, true) l;
    IF was = 'open' AND EXISTS (SELECT FROM orders_to_ask_about(ARRAY[id_text], of_kind)) THEN
        RETURN 'attempt_open';
    ELSIF was IN ('open', 'closing') AND EXISTS (SELECT FROM closing_pauses p
                                                 WHERE p.resumed_at IS NULL AND coalesce(p.kind, of_kind) = of_kind) THEN
        RETURN 'paused';
    END IF;
    PERFORM set_config('order_timeout.why', release.reason, true);
    EXECUTE format('SELECT c.outcome FROM %I($1, $2, true, false) c', function_of_kind(of_kind, 'close'))
    INTO answer USING ARRAY[id_text], 'released';
    PERFORM set_config('order_timeout.why', why_before, true);
    RETURN coalesce(answer, 'unknown');
END $$;

REVOKE ALL ON FUNCTION release(text, text, text) FROM PUBLIC;
