-- Money that was received for the closed order r, without what is in late payments. Late money may be open for a day.
CASE WHEN r.is_closed THEN (
    SELECT sum(p.amount_minor) - coalesce((
        SELECT sum(l.amount_minor) FROM late_payments l
        WHERE l.order_id = {id} AND l.kind = {kind}
          AND (l.state = 'refund_due' OR (l.state = 'open' AND l.recorded_at > statement_timestamp() - interval '1 day'))), 0)
    FROM received_payments p WHERE p.order_id = {id} AND p.kind = {kind}) END
