import assert from "node:assert/strict";
import test from "node:test";

const { blocksOf, plainText, safeLink } = await import(`${process.env.PAGE}/markup.js`);

const kinds = (text) => blocksOf(text).map(({ type }) => type);

test("an answer is cut into blocks, and nothing of it is lost", () => {
  const text = "# A\n\nsome *text*\n\n- one\n- two\n\n| a |\n|---|\n| 1 |\n\n> said\n\n---\n";
  const found = blocksOf(text);
  assert.deepEqual(kinds(text), ["heading", "paragraph", "list", "table", "blockquote", "hr"]);
  assert.equal(found.map(({ raw }) => raw.trim()).join("\n\n"), text.trim());
});

test("a stream can be drawn at any moment: an open fence runs to the end", () => {
  const text = "so:\n\n```python\nx = '<b>'\n```\n\nend `x` **y**";
  for (let end = 0; end <= text.length; end += 1) blocksOf(text.slice(0, end));
  const [said, code] = blocksOf(text.slice(0, 20));
  assert.deepEqual([said.type, code.type, code.lang, code.text], ["paragraph", "code", "python", "x = '"]);
});

test("HTML stays one piece of text", () => {
  const [block] = blocksOf("<div onclick='x'>\n<b>bold</b>\n</div>");
  assert.deepEqual([block.type, block.raw.trim()], ["html", "<div onclick='x'>\n<b>bold</b>\n</div>"]);
});

test("text that would take long, or is nested too deeply, is shown as it was written", () => {
  for (const text of [">".repeat(50_000), "- ".repeat(50_000), "1. ".repeat(5_000)]) {
    assert.deepEqual(blocksOf(text).map(({ raw }) => raw), [text]);
  }
  for (const text of ["[".repeat(20_000), "*".repeat(20_000), "_a ".repeat(7_000), "`".repeat(20_000),
    "|".repeat(20_000), "<a ".repeat(7_000), "![](".repeat(5_000)]) {
    blocksOf(text);
  }
});

test("references become characters, and unknown ones stay", () => {
  assert.equal(plainText("a &lt;b&gt; &amp;amp; &#65;&#x42; &none; &#0; &"), "a <b> &amp; AB &none; &#0; &");
});

test("links lead to the web or to mail, never to scripts or to this server", () => {
  assert.equal(safeLink("https://example.com/a?b=1&amp;c=2"), "https://example.com/a?b=1&c=2");
  assert.equal(safeLink("mailto:a@example.com"), "mailto:a@example.com");
  for (const wrong of ["javascript:alert(1)", "JavaScript:alert(1)", "&#106;avascript:alert(1)",
    "data:text/html,x", "java\nscript:x", "/metrics", "//example.com", "file:///etc/passwd", ""]) {
    assert.equal(safeLink(wrong), null, wrong);
  }
});
