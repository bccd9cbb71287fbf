-- Which operator asked for a change, why, and in which run of a command. NULL for what a worker or the shop did.
-- Added as nullable: the workers of the version before go on writing their rows without them.

ALTER TABLE order_events
    ADD COLUMN who text,
    ADD COLUMN why text,
    -- One command may change many orders; a run that was interrupted is resumed by what it has already written.
    ADD COLUMN run uuid;
