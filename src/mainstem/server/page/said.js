// An answer as elements: paragraphs with code spans, code blocks with a copy button.

import { copyButton } from "./copy.js";
import { blocksOf, partsOf } from "./markup.js";

const element = (name, className, ...inside) => {
  const made = document.createElement(name);
  made.className = className;
  made.append(...inside);
  return made;
};

/** By kind, a maker of empty blocks: `node`, and `set`, which puts a block's content into it. */
const makers = {
  text: () => {
    const node = element("p", "text");
    const part = ({ isCode, text }) => (isCode ? element("code", "", text) : text);
    return { node, set: ({ text }) => node.replaceChildren(...partsOf(text).map(part)) };
  },
  code: () => {
    const language = element("span", "language");
    const shown = document.createTextNode("");
    const bar = element("div", "code-bar", language, copyButton(() => shown.data, "Copy code"));
    const pre = element("pre", "", element("code", "", shown));
    pre.tabIndex = 0; // so that it can be scrolled by keyboard
    const set = (block) => {
      language.textContent = block.language || "code";
      shown.data = block.text;
    };
    return { node: element("div", "code", bar, pre), set };
  },
};

/** Returns a function that draws a text into `said`; blocks that are drawn already are kept. */
export function drawer(said) {
  const drawn = []; // {block, node, set}
  return (text) => {
    const blocks = blocksOf(text);
    while (drawn.length > blocks.length) drawn.pop().node.remove();
    blocks.forEach((block, index) => {
      const old = drawn[index]?.block;
      if (old?.kind !== block.kind) {
        const made = makers[block.kind]();
        if (old) drawn[index].node.replaceWith(made.node);
        else said.append(made.node);
        drawn[index] = made;
      } else if (old.text === block.text && old.language === block.language) {
        return;
      }
      drawn[index].block = block;
      drawn[index].set(block);
    });
  };
}
