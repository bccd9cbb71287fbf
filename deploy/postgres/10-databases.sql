-- Run once, by the postgres image, when its volume is created. It creates no tables:
-- `order-timeout setup` does.
--
-- The password is a DEVELOPMENT PASSWORD unless the environment has ORDER_DATABASE_PASSWORD (docker-compose.yml passes
-- it on). To change it later:
--   docker compose exec postgres psql -U postgres -c '\password order_timeout'
-- and the same in ORDER_DATABASE_PASSWORD.
\set password 'order-timeout-dev'
\getenv password ORDER_DATABASE_PASSWORD

-- A separate role, because the image makes POSTGRES_USER a superuser, and a worker that runs as a
-- superuser hides every missing right until production.
CREATE ROLE order_timeout LOGIN PASSWORD :'password';

-- A superuser can run programs and read files as the server's account, and the port is open to every user of the
-- machine: without a password it can only log in through the container's socket
-- (docker compose exec postgres psql -U postgres).
ALTER ROLE CURRENT_USER PASSWORD NULL;

-- The owner may create objects in schema public (PostgreSQL 15 and later), which is all that a migration needs.
CREATE DATABASE orders OWNER order_timeout;

-- The profile `plugin` runs a second worker against a second broker. In the same database both
-- would sweep the same orders, and neither would show the effect of its own broker.
CREATE DATABASE orders_plugin OWNER order_timeout;
