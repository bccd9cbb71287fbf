-- Several sorts of deadlines in one deployment: each alarm, each event and each parked alarm says which kind it is of. What
-- says nothing is of the kind 'order', as everything was before.
-- NOT VALID: the existing rows satisfy what is checked, so a large table need not be read under a lock.

ALTER TABLE alarm_outbox
    ADD COLUMN kind text NOT NULL DEFAULT 'order',
    -- What no setting can name is refused here, in the order's own transaction.
    ADD CONSTRAINT the_kind_of_an_alarm_is_a_name CHECK (kind ~ '^[a-z][a-z0-9_]{0,39}$') NOT VALID;

-- Orders of two kinds may have the same id, so an event finds its alarm by both.
ALTER TABLE event_outbox ADD COLUMN kind text NOT NULL DEFAULT 'order';

ALTER TABLE parked_alarms
    ADD COLUMN kind text NOT NULL DEFAULT 'order',
    DROP CONSTRAINT reason_is_known,
    ADD CONSTRAINT reason_is_known CHECK (reason IN
        ('unreadable', 'malformed_id', 'too_far', 'unknown_order', 'unknown_kind', 'close_failed', 'broker_gave_up'))
        NOT VALID;
