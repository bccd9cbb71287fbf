// Prints each order that was closed, once. Needs amqplib: npm install amqplib
//
// Reads AMQP_URL, and ends after EVENTS of them if that is set.
const amqp = require("amqplib");

const QUEUE = "shop.order-closed";
const url = process.env.AMQP_URL ?? "amqp://guest:guest@localhost:5672/%2f";
const wanted = Number(process.env.EVENTS ?? Infinity);
// A real service keeps the ids in its database, in the transaction that handles the event.
const handled = new Set();

async function handle(event) {
  // Your code. If it throws, the event is delivered again.
  console.log(`closed: order ${event.order_id} by ${event.closed_by}`);
}

async function listen() {
  const connection = await amqp.connect(url);
  try {
    const channel = await connection.createChannel();
    // A queue of this service's own: it keeps the events while the service does not run.
    await channel.assertQueue(QUEUE, { durable: true, arguments: { "x-queue-type": "quorum" } });
    await channel.bindQueue(QUEUE, "order.events", "order.closed");
    await channel.prefetch(100);
    await new Promise((resolve, reject) => {
      connection.on("error", reject);
      connection.on("close", () => reject(new Error("the connection was closed")));
      channel.on("error", reject);
      channel.on("close", () => reject(new Error("the channel was closed")));
      // One event after the other, in the order of their delivery.
      let turn = Promise.resolve();
      const take = async (message) => {
        // The queue was deleted.
        if (message === null) throw new Error("the broker cancelled the consumer");
        // Events are delivered at least once, each under one message id.
        if (!handled.has(message.properties.messageId)) {
          await handle(JSON.parse(message.content.toString()));
          handled.add(message.properties.messageId);
        }
        // After the event has been handled, or it would be lost with this process.
        channel.ack(message);
        if (handled.size >= wanted) resolve(channel.close());
      };
      const consuming = channel.consume(QUEUE, (message) => {
        turn = turn.then(() => take(message)).catch(reject);
      });
      consuming.then(() => console.log(`listening: ${QUEUE}`), reject);
    });
  } finally {
    await connection.close().catch(() => {});
  }
}

async function main() {
  while (handled.size < wanted) {
    try {
      await listen();
    } catch (error) {
      // The broker restarts, the network fails, or the queue is deleted. The broker delivers again what was not
      // acknowledged.
      console.log(`connecting again in a second: ${error.message}`);
      await new Promise((resolve) => setTimeout(resolve, 1000));
    }
  }
}

main();
