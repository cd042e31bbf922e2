// Code in an answer: fenced blocks and inline spans. Everything else stays as it was written.
//
// Pure functions from text to data; said.js makes elements of it, from text nodes only.

const FENCE = /^([ \t]*)(`{3,}|~{3,})(.*)$/;

/**
 * The blocks of an answer, in order: {kind: "text", text} and {kind: "code", text, language}.
 * A block whose closing fence has not come yet runs to the end, so that a stream can be drawn.
 */
export function blocksOf(text) {
  const blocks = [];
  let lines = [];
  let fence = null; // of the open code block: {indent, marks, language}
  const close = () => {
    const joined = lines.join("\n");
    lines = [];
    if (fence) blocks.push({ kind: "code", text: joined, language: fence.language });
    else if (joined.trim()) blocks.push({ kind: "text", text: joined.replace(/^\n+/, "").trimEnd() });
  };
  for (const line of text.split("\n")) {
    const [, indent, marks, info] = FENCE.exec(line) ?? [];
    const isFence = marks !== undefined && !(marks[0] === "`" && info.includes("`"));
    if (!fence && isFence) {
      close();
      fence = { indent, marks, language: info.trim().split(/\s/)[0] };
    } else if (fence && isFence && marks.startsWith(fence.marks) && !info.trim()) {
      close();
      fence = null;
    } else if (fence && line.startsWith(fence.indent)) {
      lines.push(line.slice(fence.indent.length)); // a block within a list is indented as a whole
    } else {
      lines.push(line);
    }
  }
  close();
  return blocks;
}

/**
 * A text in parts {isCode, text}: a code span is closed by as many backticks as opened it, on
 * the same line. Backticks without a partner stay text.
 */
export function partsOf(text) {
  const parts = [];
  const add = (isCode, piece) => {
    const last = parts.at(-1);
    if (last && last.isCode === isCode && !isCode) last.text += piece;
    else if (piece) parts.push({ isCode, text: piece });
  };
  text.split("\n").forEach((line, index) => {
    if (index) add(false, "\n");
    let end = 0; // the line is added up to here
    for (const [open, close] of spans(line)) {
      add(false, line.slice(end, open.index));
      const inside = line.slice(open.index + open[0].length, close.index);
      add(true, /^ .*[^ ].* $/.test(inside) ? inside.slice(1, -1) : inside);
      end = close.index + close[0].length;
    }
    add(false, line.slice(end));
  });
  return parts;
}

/** The pairs of backtick runs that enclose code, in one pass over the line's runs. */
function spans(line) {
  const runs = [...line.matchAll(/`+/g)];
  const partner = new Map(); // a run's index -> the next run of the same length
  const nextOfLength = new Map();
  for (let i = runs.length - 1; i >= 0; i -= 1) {
    partner.set(i, nextOfLength.get(runs[i][0].length));
    nextOfLength.set(runs[i][0].length, i);
  }
  const found = [];
  for (let i = 0; i < runs.length; i += 1) {
    const close = partner.get(i);
    if (close === undefined) continue;
    found.push([runs[i], runs[close]]);
    i = close;
  }
  return found;
}
