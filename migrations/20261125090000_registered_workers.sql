-- The workers that run on this schema, and the settings that must be the same for all of them. Each worker writes its own
-- row every few seconds and deletes it when it stops.

CREATE TABLE order_timeout_workers (
    -- Drawn anew at each start.
    id         uuid PRIMARY KEY,
    host       text NOT NULL,
    pid        integer NOT NULL,
    version    text NOT NULL,
    namespace  text NOT NULL,
    -- The settings as they are written in a configuration file: delay.strategy, delay.lanes and so on, by their names.
    delays     jsonb NOT NULL,
    started_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    last_seen  timestamptz NOT NULL DEFAULT clock_timestamp()
);
