-- A customer may cancel an unpaid order: whoever looks for unpaid orders leaves it alone, as it does a paid one.
-- IF NOT EXISTS: a shop may have added the status itself.

ALTER TYPE order_status ADD VALUE IF NOT EXISTS 'cancelled';

-- NOT VALID: what stands there satisfied a narrower one, so a long history need not be read under a lock.
ALTER TABLE order_events
    DROP CONSTRAINT event_is_known,
    ADD CONSTRAINT event_is_known CHECK (event IN ('created', 'paid', 'extended', 'closed', 'cancelled')) NOT VALID;
