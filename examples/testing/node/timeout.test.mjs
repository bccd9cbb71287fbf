// A shop's test with Node's test runner, and what moves the clock that the worker reads. DATABASE_URL says where.
import assert from "node:assert/strict";
import { randomUUID } from "node:crypto";
import { after, before, test } from "node:test";
import { setTimeout as sleep } from "node:timers/promises";

import { advance } from "order-timeout/testing";
import pg from "pg";

const MINUTE = 60_000;
const client = new pg.Client({ connectionString: process.env.DATABASE_URL });
before(() => client.connect());
after(() => client.end());

test("an unpaid order is closed", async () => {
  const id = randomUUID(); // your checkout instead
  await client.query("INSERT INTO orders (id, expires_at) VALUES ($1, now() + interval '30 min')", [id]);
  const status = async () =>
    (await client.query("SELECT status::text FROM orders WHERE id = $1", [id])).rows[0].status;

  await advance(client, 29 * MINUTE);
  assert.equal(await status(), "unpaid");
  await advance(client, MINUTE);
  const end = Date.now() + 10_000;
  while ((await status()) !== "closed") {
    assert(Date.now() < end, "in time");
    await sleep(20);
  }
});
