import assert from "node:assert/strict";
import test from "node:test";

const { nameOf, stateWords, stepWords, waitWords } = await import(`${process.env.PAGE}/reading.js`);

const own = { id: "own", prompt_tokens: 3049, output_tokens: 0, state: "running" };
const live = (fields) => ({ recent: [{ id: "other", state: "running" }, { ...own, ...fields }] });

test("a prompt in progress is shown with its length and the computed share", () => {
  assert.equal(waitWords(live({ computed_tokens: 1024 }), "own"), "reading 3,049 tokens\u2026 34 %");
  assert.equal(waitWords(live({ computed_tokens: 0 }), "own"), "reading 3,049 tokens\u2026");
  assert.equal(waitWords(live({ computed_tokens: 3049 }), "own"), "reading 3,049 tokens\u2026");
  assert.equal(waitWords(live({ state: "waiting" }), "own"), "waiting for other requests\u2026");
  assert.equal(waitWords(live({ output_tokens: 1 }), "own"), "answering\u2026");
});

test("no share is shown without computed_tokens, an id or a reply of /live", () => {
  assert.equal(waitWords(live({}), "own"), "reading 3,049 tokens\u2026");
  assert.equal(waitWords(live({}), null), "reading\u2026");
  assert.equal(waitWords(live({}), "gone"), "reading\u2026");
  assert.equal(waitWords(null, "own"), "reading\u2026");
  assert.equal(waitWords({}, "own"), "reading\u2026");
});

test("an aborted request is shown as stopped, not as failed", () => {
  assert.equal(stateWords({ ...own, state: "aborted" }), "stopped");
  assert.equal(stateWords({ ...own, state: "failed" }), "failed");
});

test("a running request is shown as reading until its first token", () => {
  assert.equal(stateWords({ ...own, computed_tokens: 1024 }), "reading 34 %");
  assert.equal(stateWords({ ...own, computed_tokens: 1024, output_tokens: 2 }), "running");
  assert.equal(stateWords(own), "running");
  assert.equal(stateWords({ ...own, state: "waiting", computed_tokens: 0 }), "waiting");
});

test("only a long step is shown", () => {
  assert.equal(stepWords({ tokens: 2048, seconds: 3.2 }), "step of 2,048 tokens: 3.20 s");
  for (const step of [undefined, null, { tokens: 4, seconds: 0.02 }]) {
    assert.equal(stepWords(step), "");
  }
});

test("requests are named by API and number, which no other request has", () => {
  const name = (id) => nameOf({ id });
  assert.equal(name("chatcmpl-0123456789abcdef00000000"), "chat 1");
  assert.equal(name("score-fedcba987654321000000000"), "score 1");
  assert.equal(name("msg_0123456789abcdef0000000a"), "message 11");
  assert.equal(name(`resp_${"ab".repeat(23)}cd`), "response ababcd");
  assert.equal(name("<b>something</b>"), "hing</b>");
});
