-- The W3C trace context (`traceparent`) of the code that schedules an alarm: the relay sends it with the alarm, and later
-- with the event of the order's close. Its length is limited because it travels in a header. Null if there is none.

ALTER TABLE alarm_outbox
    ADD COLUMN traceparent text,
    ADD CONSTRAINT the_trace_context_of_an_alarm_is_short CHECK (octet_length(traceparent) <= 200);

ALTER TABLE event_outbox
    -- For a close statement of your own, which knows the trace context. Null: that of the order's last alarm.
    ADD COLUMN traceparent text,
    ADD CONSTRAINT the_trace_context_of_an_event_is_short CHECK (octet_length(traceparent) <= 200);

-- How the event relay finds it. Only rows with a trace context: without tracing, an alarm costs no more than before.
CREATE INDEX alarm_outbox_traced ON alarm_outbox (order_id, created_at) WHERE traceparent IS NOT NULL;
