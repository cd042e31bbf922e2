import assert from "node:assert/strict";
import test from "node:test";

const { blocksOf, partsOf } = await import(`${process.env.PAGE}/markup.js`);

const text = (words) => ({ kind: "text", text: words });
const code = (words, language = "") => ({ kind: "code", text: words, language });

test("text without code stays as it was written", () => {
  assert.deepEqual(blocksOf("one\n\n  two <b>"), [text("one\n\n  two <b>")]);
  assert.deepEqual(blocksOf(""), []);
  assert.deepEqual(blocksOf(" \n"), []);
});

test("fences make code blocks", () => {
  const answer = "Try:\n\n```python title\nx = `1`\n\ny\n```\n\nand\n~~~\n```\n~~~";
  assert.deepEqual(blocksOf(answer), [
    text("Try:"),
    code("x = `1`\n\ny", "python"),
    text("and"),
    code("```"),
  ]);
});

test("a longer fence holds a shorter one", () => {
  assert.deepEqual(blocksOf("````\n```js\n1\n```\n````"), [code("```js\n1\n```")]);
});

test("a block within a list loses the list's indent", () => {
  assert.deepEqual(blocksOf("1. so:\n   ```\n   if x:\n       y\n   ```\n2. done"), [
    text("1. so:"),
    code("if x:\n    y"),
    text("2. done"),
  ]);
});

test("an open fence runs to the end, and every beginning of an answer can be drawn", () => {
  assert.deepEqual(blocksOf("a\n```js\nlet x"), [text("a"), code("let x", "js")]);
  const whole = "a `b`\n\n```js\nlet `x`\n```\nend ``c`d``";
  for (let end = 0; end <= whole.length; end += 1) {
    for (const block of blocksOf(whole.slice(0, end))) partsOf(block.text);
  }
});

test("three backticks with others after them on the line are no fence", () => {
  assert.deepEqual(blocksOf("```x``` here"), [text("```x``` here")]);
});

test("code spans are closed by as many backticks on the same line", () => {
  const parts = (words) => partsOf(words).map((part) => (part.isCode ? [part.text] : part.text));
  assert.deepEqual(parts("use `a` and ``b`c``, or `` ` ``"), [
    "use ", ["a"], " and ", ["b`c"], ", or ", ["`"],
  ]);
  assert.deepEqual(parts("a ` alone\nand ` another"), ["a ` alone\nand ` another"]);
  assert.deepEqual(parts("``"), ["``"]);
  assert.deepEqual(parts("`a``b`"), [["a``b"]]);
});

test("very many backticks are read within two seconds", () => {
  const began = performance.now();
  partsOf("` `` ``` ".repeat(20_000));
  partsOf(Array.from({ length: 1000 }, (_, i) => "`".repeat(i + 1)).join(" "));
  blocksOf("```\n".repeat(20_000));
  blocksOf(" ".repeat(20_000) + "x");
  assert.ok(performance.now() - began < 2000);
});
