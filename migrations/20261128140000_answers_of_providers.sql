-- What the brake compares with, of payment providers: about how many orders they were asked, each order once; how many of those
-- they said are paid, and about how many there was no usable answer.

ALTER TABLE closing_minutes
    ADD COLUMN asked         bigint NOT NULL DEFAULT 0,
    ADD COLUMN asked_paid    bigint NOT NULL DEFAULT 0,
    ADD COLUMN asked_unknown bigint NOT NULL DEFAULT 0;
