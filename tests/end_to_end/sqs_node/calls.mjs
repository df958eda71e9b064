// Calls SQS by the JavaScript SDK:
//
//   node calls.mjs ENDPOINT ACCESS_KEY_ID SECRET_ACCESS_KEY
//
// Each line of the standard input is a call: {"id": 1, "action": "SendMessage", "parameters": {…}}. Each line of the
// standard output is the answer to one: {"id": 1, "answer": {…}} or {"id": 1, "error": {…}}. Calls run at the same
// time. Bytes are written as {"$base64": "…"}.
import { createInterface } from "node:readline";
import * as sqs from "@aws-sdk/client-sqs";

const [endpoint, accessKeyId, secretAccessKey] = process.argv.slice(2);
const client = new sqs.SQSClient({
  endpoint,
  region: "us-east-1",
  credentials: { accessKeyId, secretAccessKey },
  maxAttempts: 1, // A call that is tried again would hide an error.
});

function revive(key, value) {
  return typeof value?.$base64 === "string" ? Uint8Array.from(Buffer.from(value.$base64, "base64")) : value;
}

function replace(key, value) {
  return value instanceof Uint8Array ? { $base64: Buffer.from(value).toString("base64") } : value;
}

async function answer({ id, action, parameters }) {
  try {
    const { $metadata, ...found } = await client.send(new sqs[`${action}Command`](parameters));
    return { id, answer: found, requestId: $metadata.requestId };
  } catch (error) {
    return {
      id,
      error: {
        name: error.name,
        code: error.Code ?? error.Error?.Code ?? error.name,
        isModelled: error instanceof sqs.SQSServiceException && error.constructor !== sqs.SQSServiceException,
        message: String(error.message),
        status: error.$metadata?.httpStatusCode ?? null,
        stack: error.stack,
      },
    };
  }
}

console.log("ready");
for await (const line of createInterface({ input: process.stdin })) {
  answer(JSON.parse(line, revive)).then((found) => console.log(JSON.stringify(found, replace)));
}
