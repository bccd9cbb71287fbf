-- Periods in which no order is closed, until `order-timeout resume`: because a person asked for it, or because the brake
-- tripped. Every worker reads the table each second, and before its first close. Rows are kept as history.

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
