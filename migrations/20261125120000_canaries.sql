-- Messages that a worker sends itself through the broker, to notice that alarms no longer arrive. One row for each path,
-- so the tables stay small by themselves. Unlogged: what a crash empties is written again within a minute.

CREATE UNLOGGED TABLE canaries (
    -- The delay queue, ring or exchange that it goes through.
    path          text PRIMARY KEY,
    id            uuid NOT NULL,
    -- The queue that it waits in, as an operator knows it.
    queue         text NOT NULL,
    sent_at       timestamptz NOT NULL,
    due_at        timestamptz NOT NULL,
    -- When the first canary in a row was due that did not arrive.
    waiting_since timestamptz NOT NULL,
    arrived_at    timestamptz
);

-- How many consumers read the processing queues and know a canary when they see one. A worker that does not would park
-- it, so none is sent while one may be there.
CREATE UNLOGGED TABLE canary_readers (
    worker    uuid PRIMARY KEY,
    namespace text NOT NULL,
    consumers integer NOT NULL,
    seen_at   timestamptz NOT NULL
);
