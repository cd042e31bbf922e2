import assert from "node:assert/strict";
import test from "node:test";

const { fetchOrSay, payloads, Unreachable } = await import(`${process.env.PAGE}/replies.js`);

async function read(...pieces) {
  const found = [];
  const body = ReadableStream.from(pieces.map((piece) => new TextEncoder().encode(piece)));
  for await (const payload of payloads(body)) found.push(payload);
  return found;
}

test("pings are ignored, wherever the network cuts the stream", async () => {
  const whole = ': ping\n\ndata: {"a":1}\n\n: ping\n\n: ping\n\ndata: {"a":2}\n\ndata: [DONE]\n\n';
  for (let cut = 0; cut <= whole.length; cut += 1) {
    assert.deepEqual(await read(whole.slice(0, cut), whole.slice(cut)), [{ a: 1 }, { a: 2 }]);
  }
});

test("a stream that breaks off is an error in words", async () => {
  await assert.rejects(read('data: {"a":1}\n\n'), Unreachable);
  const body = new ReadableStream({ start: (c) => c.error(new TypeError("network error")) });
  await assert.rejects(payloads(body).next(), /^Unreachable|connection to the server broke/);
  const nobody = "http://127.0.0.1:1/";
  await assert.rejects(fetchOrSay(nobody), /cannot be reached/);
  await assert.rejects(fetchOrSay(nobody, { signal: AbortSignal.abort() }), { name: "AbortError" });
});
