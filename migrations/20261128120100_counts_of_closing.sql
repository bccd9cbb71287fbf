-- What the brake compares with: how many orders all workers together closed in each minute, and how many were known to fall
-- due. Kept for a week.

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

    PRIMARY KEY (kind, minute)
);
