-- One event that no broker takes would end the channel, and with it everything that is sent beside it, again and again.
-- RabbitMQ takes messages of up to 128 MiB, from 4.0 of up to 16; an event that says what has become of an order needs a
-- thousandth. Not checked for the rows that are there: that would read the whole table under a lock.

ALTER TABLE event_outbox
    ADD CONSTRAINT the_payload_fits_into_a_message CHECK (pg_column_size(payload) <= 1048576) NOT VALID;
