// An answer's Markdown as data: said.js makes elements of it, from text nodes only.
//
// Only marked's lexer is used, never its HTML: what a model wrote as HTML stays text, and a link
// leads only to addresses that `safeLink` accepts.

import { Lexer } from "./marked.js";

const OPTIONS = { gfm: true, breaks: true };
const INVISIBLE = new Set(["space", "def"]);
const NAMED = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0" };
const MAX_NESTED = 100; // levels of quotes and lists; deeper text is shown as it was written

/**
 * The blocks of an answer, in order, as marked's tokens. A block that is not complete yet runs to
 * the end, so that a stream can be drawn.
 */
export function blocksOf(text) {
  if (isTooDeep(text)) return [plain(text)];
  try {
    return new Lexer(OPTIONS).lex(text).filter(({ type }) => !INVISIBLE.has(type));
  } catch {
    return [plain(text)];
  }
}

const plain = (text) => ({ type: "text", raw: text, text });

/** marked reads nested quotes and lists by recursion. */
function isTooDeep(text) {
  return text.split("\n").some((line) => {
    const marks = /^(?:\s*(?:>|[-*+]\s|\d+[.)]\s))*/.exec(line)[0];
    return marks.replace(/\s|\d/g, "").length > MAX_NESTED;
  });
}

/** A text token's characters: marked leaves references such as &lt; as they are. */
export function plainText(text) {
  return text.replace(/&(?:#(\d{1,7})|#[xX]([0-9a-fA-F]{1,6})|(\w+));/g, (all, tens, hex, name) => {
    if (name) return NAMED[name] ?? all;
    const code = tens ? Number(tens) : parseInt(hex, 16);
    return code > 0 && code <= 0x10ffff ? String.fromCodePoint(code) : all;
  });
}

/** The address that a link may lead to, or null: only the web and mail, never a script. */
export function safeLink(address) {
  try {
    const url = new URL(plainText(address));
    return ["http:", "https:", "mailto:"].includes(url.protocol) ? url.href : null;
  } catch {
    return null; // relative, or not an address
  }
}
