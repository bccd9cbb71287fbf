-- The workers that run on this schema, what they may do, and what they count.

-- Each worker writes its own row every few seconds and deletes it when it stops.
CREATE TABLE order_timeout_workers (
    -- Drawn anew at each start.
    id         uuid PRIMARY KEY,
    host       text NOT NULL,
    pid        integer NOT NULL,
    version    text NOT NULL,
    namespace  text NOT NULL,
    -- The settings that must be the same for all workers, as they are written in a configuration file: delay.strategy,
    -- delay.lanes and so on, by their names.
    delays     jsonb NOT NULL,
    -- By Postgres' own clock, also where tests move the database's.
    started_at timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp(),
    last_seen  timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp(),
    -- The workers of a kind share the orders that they read ahead.
    kinds      text[] NOT NULL,
    -- What its /readyz says that only a running worker can find, for `order-timeout doctor`.
    problems   jsonb NOT NULL DEFAULT '[]'
);

-- The orders tables on which a worker may close, even many orders that are overdue already. A worker that starts on a
-- table without a row here counts its overdue orders first.
CREATE TABLE order_timeout_adoption (
    -- 'orders' for the default table, 'statements' for statements in files, or the name of a mapped table.
    orders     text PRIMARY KEY,
    adopted_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    -- What allowed it: 'first start' or 'accepted'.
    by         text NOT NULL,
    -- How many were overdue then.
    overdue    bigint
);

-- What the settings say and functions in the database must know. The worker and `order-timeout setup` write it.
CREATE TABLE order_timeout_settings (
    is_the_only_row    boolean PRIMARY KEY DEFAULT true,
    -- orders.pay_after_deadline
    pay_after_deadline boolean NOT NULL DEFAULT true,
    -- kinds.NAME.extend_max by name, in seconds; a kind without it is left out.
    extend_max         jsonb NOT NULL DEFAULT '{}',

    CONSTRAINT there_is_one_row CHECK (is_the_only_row)
);
INSERT INTO order_timeout_settings DEFAULT VALUES;

-- Periods in which no order is closed, until `order-timeout resume`: because an operator asked for it, or because the
-- brake tripped. Every worker reads the table each second, and before its first close. Rows are kept as history.
CREATE TABLE closing_pauses (
    id            bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    -- NULL: every kind.
    kind          text,
    cause         text NOT NULL,
    reason        text NOT NULL,
    paused_by     text NOT NULL,
    paused_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    resumed_by    text,
    resume_reason text,
    -- NULL: it lasts.
    resumed_at    timestamptz,

    CONSTRAINT the_cause_is_known CHECK (cause IN ('operator', 'brake')),
    CONSTRAINT the_kind_is_a_name CHECK (kind ~ '^[a-z][a-z0-9_]{0,39}$'),
    CONSTRAINT an_end_says_who CHECK ((resumed_at IS NULL) = (resumed_by IS NULL))
);

-- One at a time for each kind: of two that begin at once, the second is refused.
CREATE UNIQUE INDEX a_kind_is_paused_once ON closing_pauses ((coalesce(kind, ''))) WHERE resumed_at IS NULL;
-- Until when orders were known to be due when closing was resumed.
CREATE INDEX closing_pauses_resumed ON closing_pauses (resumed_at) WHERE resumed_at IS NOT NULL;

-- What the brake compares with: how many orders all workers together closed in each minute, and how many were known to
-- fall due. Kept for a week.
CREATE TABLE closing_minutes (
    kind          text NOT NULL,
    -- Its begin.
    minute        timestamptz NOT NULL,
    -- Orders closed in it, and those among them that were not known to fall due.
    closed        bigint NOT NULL DEFAULT 0,
    unforeseen    bigint NOT NULL DEFAULT 0,
    -- Orders that an alarm woke in it: closed, and found paid.
    woken_closed  bigint NOT NULL DEFAULT 0,
    woken_paid    bigint NOT NULL DEFAULT 0,
    -- Unpaid orders that fall due in it, as they were counted some minutes before. NULL: they were not counted.
    foreseen      bigint,
    -- Orders that fall due in it and were closed, whenever.
    closed_of_due bigint NOT NULL DEFAULT 0,
    -- Orders that payment providers were asked about, each once; those that they said are paid, and those about which there
    -- was no usable answer.
    asked         bigint NOT NULL DEFAULT 0,
    asked_paid    bigint NOT NULL DEFAULT 0,
    asked_unknown bigint NOT NULL DEFAULT 0,

    PRIMARY KEY (kind, minute)
);
