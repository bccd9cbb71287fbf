-- What an order's story asks both outboxes for. Partial: a close and a schedule write unsent rows, so they do not maintain
-- these indexes; the relays do, when they mark a row as sent. Hash: a lookup needs equality alone, and an entry has four
-- bytes instead of an order id.
CREATE INDEX event_outbox_sent_by_order ON event_outbox USING hash ((payload ->> 'order_id')) WHERE sent_at IS NOT NULL;
CREATE INDEX alarm_outbox_sent_by_order ON alarm_outbox USING hash (order_id) WHERE sent_at IS NOT NULL;
