// Alarms, deadlines, payments and events of order-timeout, for an order service. What each does: index.d.ts.
export { firstDelivery, moveDeadline, paymentReceived, release, schedule } from "./database.js";
export { Publisher, listen } from "./broker.js";
export { OrderTimeoutError } from "./input.js";
