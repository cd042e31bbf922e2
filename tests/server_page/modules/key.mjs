import assert from "node:assert/strict";
import test from "node:test";

const { refusal } = await import(`${process.env.PAGE}/key.js`);

test("a key that a header can carry is accepted", () => {
  for (const key of ["alice-key-0123456789", "with space", "sch\u00f6n"]) {
    assert.equal(refusal(key), null);
    new Headers({ Authorization: `Bearer ${key}` });
  }
});

test("a key that fetch cannot send is refused, and the message names the character", () => {
  for (const key of ["s\u0435cret", "se\u2013cret", "sec\u200bret", "se\ncret", "s\u{1f511}"]) {
    assert.match(refusal(key), /cannot be sent/);
    assert.throws(() => new Headers({ Authorization: `Bearer ${key}` }));
  }
  assert.match(refusal("s\u0435cret"), /\u201c\u0435\u201d \(U\+0435\)/);
  assert.match(refusal("sec\u200bret"), /character U\+200B/);
  assert.match(refusal("s\u{1f511}"), /U\+1F511/);
  assert.match(refusal(""), /empty/);
});
