-- An order without a deadline is never closed: it is paid on delivery, by transfer or against an invoice. The deadline
-- index, the sweep and the close leave it out, because NULL is never before any time.

ALTER TABLE orders ALTER COLUMN expires_at DROP NOT NULL;
