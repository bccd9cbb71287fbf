-- What the broker refuses waits in its outbox with a pause of its own, which grows with each refusal.
-- Not CONCURRENTLY: an outbox holds what announce.keep says, a day by default, and a million rows are read in a second.
-- An index that was left half built would have to be found and dropped by hand.

ALTER TABLE event_outbox
    ADD COLUMN refusals integer NOT NULL DEFAULT 0,
    -- Not before this moment. A row that was never refused has '-infinity', so that one index serves both kinds.
    ADD COLUMN next_attempt_at timestamptz NOT NULL DEFAULT '-infinity';

-- New rows by age, and refused ones by when they are due, however many wait. In the place of the former index, so that
-- a close writes no more than before. A worker of the version before reads the same rows out of it, and sorts them.
CREATE INDEX event_outbox_due ON event_outbox (next_attempt_at, created_at, id) WHERE sent_at IS NULL;
DROP INDEX event_outbox_unsent;
-- How many are refused, and how old the oldest is. A row that was never refused is not in it.
CREATE INDEX event_outbox_refused ON event_outbox (created_at) WHERE sent_at IS NULL AND refusals > 0;

ALTER TABLE alarm_outbox
    ADD COLUMN refusals integer NOT NULL DEFAULT 0,
    ADD COLUMN next_attempt_at timestamptz NOT NULL DEFAULT '-infinity';

CREATE INDEX alarm_outbox_due ON alarm_outbox (next_attempt_at, created_at, id) WHERE sent_at IS NULL;
DROP INDEX alarm_outbox_unsent;
CREATE INDEX alarm_outbox_refused ON alarm_outbox (created_at) WHERE sent_at IS NULL AND refusals > 0;
