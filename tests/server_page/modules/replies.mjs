import assert from "node:assert/strict";
import test from "node:test";

const { payloads } = await import(`${process.env.PAGE}/replies.js`);

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
