// An answer as elements: Markdown, with code blocks that have a copy button.

import { copyButton } from "./copy.js";
import { blocksOf, plainText, safeLink } from "./markup.js";

const element = (name, className, ...inside) => {
  const made = document.createElement(name);
  if (className) made.className = className;
  made.append(...inside);
  return made;
};

// --- within a line ------------------------------------------------------------------------------

const inlines = {
  text: (token) => (token.tokens ? inlineOf(token.tokens) : [plainText(token.text)]),
  escape: ({ text }) => [text],
  html: ({ raw }) => [raw],
  br: () => [element("br")],
  codespan: ({ text }) => [element("code", "", text)],
  strong: ({ tokens }) => [element("strong", "", ...inlineOf(tokens))],
  em: ({ tokens }) => [element("em", "", ...inlineOf(tokens))],
  del: ({ tokens }) => [element("del", "", ...inlineOf(tokens))],
  checkbox: ({ checked }) => [checked ? "\u2611 " : "\u2610 "],
  link: ({ href, tokens, raw }) => linkOf(href, inlineOf(tokens), raw),
  image: ({ href, text, raw }) => linkOf(href, [text || "image"], raw), // nothing is fetched
};

function linkOf(address, inside, raw) {
  const href = safeLink(address);
  if (href === null) return [raw];
  const link = element("a", "", ...inside);
  link.href = href;
  link.title = href; // its words may name another site
  link.target = "_blank";
  link.rel = "noopener noreferrer nofollow";
  return [link];
}

const inlineOf = (tokens) =>
  tokens.flatMap((token) => (inlines[token.type] ?? (({ raw }) => [raw]))(token));

// --- blocks -------------------------------------------------------------------------------------

const blocks = {
  paragraph: ({ tokens }) => element("p", "text", ...inlineOf(tokens)),
  text: (token) => element("p", "text", ...inlines.text(token)),
  html: ({ raw }) => element("p", "text", raw.trimEnd()),
  // all of one level below the log's own heading: a model may leave levels out
  heading: ({ depth, tokens }) => {
    const made = element("p", `heading depth-${depth}`, ...inlineOf(tokens));
    made.role = "heading";
    made.ariaLevel = "3";
    return made;
  },
  hr: () => element("hr"),
  blockquote: ({ tokens }) => element("blockquote", "", ...tokens.flatMap(blockOf)),
  code: (token) => {
    const { node, set } = codeBlock();
    set(token);
    return node;
  },
  list: ({ ordered, start, items }) => {
    const list = element(ordered ? "ol" : "ul", "");
    if (ordered) list.start = start;
    const itemFor = ({ tokens, loose, task }) =>
      element("li", task ? "task" : "", ...itemOf(tokens, loose));
    list.append(...items.map(itemFor));
    return list;
  },
  table: ({ header, rows }) => {
    const cellOf = (name) => (cell) => {
      const made = element(name, cell.align ? `to-${cell.align}` : "", ...inlineOf(cell.tokens));
      if (name === "th") made.scope = "col";
      return made;
    };
    const head = element("tr", "", ...header.map(cellOf("th")));
    const body = rows.map((row) => element("tr", "", ...row.map(cellOf("td"))));
    const table = element("table", "", element("thead", "", head), element("tbody", "", ...body));
    const scroll = element("div", "scroll", table);
    scroll.tabIndex = 0; // so that it can be scrolled by keyboard
    scroll.role = "group";
    scroll.ariaLabel = "Table";
    return scroll;
  },
};

const INVISIBLE = ["space", "def"];
const blockOf = (token) => {
  if (INVISIBLE.includes(token.type)) return [];
  return [(blocks[token.type] ?? blocks.html)(token)];
};

/** A block, or its text as it was written if it is nested too deeply to be drawn. */
function safeBlock(token) {
  try {
    return blockOf(token)[0];
  } catch {
    return blocks.html(token);
  }
}

/** What is in a list item: in a tight list its text stands without a paragraph. */
const itemOf = (tokens, isLoose) =>
  tokens.flatMap((token) => {
    const isInline = token.type === "checkbox" || (token.type === "text" && !isLoose);
    return isInline ? inlines[token.type](token) : blockOf(token);
  });

/** An empty block of code: `node`, and `set`, which puts a token's content into it. */
function codeBlock() {
  const language = element("span", "language");
  const shown = document.createTextNode("");
  const bar = element("div", "code-bar", language, copyButton(() => shown.data, "Copy code"));
  const pre = element("pre", "", element("code", "", shown));
  pre.tabIndex = 0; // so that it can be scrolled by keyboard
  const set = ({ text, lang }) => {
    language.textContent = lang?.trim().split(/\s/)[0] || "code";
    shown.data = text;
  };
  return { node: element("div", "code", bar, pre), set };
}

/** Returns a function that draws a text into `said`; blocks that are drawn already are kept. */
export function drawer(said) {
  const drawn = []; // {raw, type, node, set}
  return (text) => {
    const tokens = blocksOf(text);
    while (drawn.length > tokens.length) drawn.pop().node.remove();
    tokens.forEach((token, index) => {
      const old = drawn[index];
      if (old?.type === token.type && old.raw === token.raw) return;
      if (old?.type === "code" && token.type === "code") {
        old.set(token); // keeps where it was scrolled to, and what is selected
        old.raw = token.raw;
        return;
      }
      const { raw, type } = token;
      const made = type === "code" ? codeBlock() : { node: safeBlock(token) };
      made.set?.(token);
      if (old) old.node.replaceWith(made.node);
      else said.append(made.node);
      drawn[index] = { raw, type, ...made };
    });
  };
}
