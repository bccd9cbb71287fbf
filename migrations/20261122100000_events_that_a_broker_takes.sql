-- One event that no broker takes would end the channel, and with it everything that is sent beside it, again and again.
-- RabbitMQ takes messages of up to 128 MiB, from 4.0 of up to 16; an event that says what has become of an order needs a
-- thousandth. Not checked for the rows that are there: that would read the whole table under a lock. And not when a row
-- is marked as sent: what a broker has taken fits.

ALTER TABLE event_outbox
    ADD CONSTRAINT the_payload_fits_into_a_message CHECK (sent_at IS NOT NULL OR octet_length(payload::text) <= 1048576)
        NOT VALID;
