// What a request is doing, in words, from its entry in /live.

import { count, percent, seconds } from "./numbers.js";

/** The share of a prompt that is computed, as "34 %"; "" if it is all, none or not reported. */
function readShare({ prompt_tokens: prompt, computed_tokens: computed }) {
  return computed > 0 && computed < prompt ? percent(computed / prompt) : "";
}

/** What the user waits for until the first token; `id` is null until the server has sent it. */
export function waitWords(live, id) {
  const own = id && live?.recent?.find((request) => request.id === id);
  if (!own) return "reading\u2026";
  if (own.state === "waiting") return "waiting for other requests\u2026";
  if (own.output_tokens > 0) return "answering\u2026";
  const tokens = own.prompt_tokens === 1 ? "token" : "tokens";
  return `reading ${count(own.prompt_tokens)} ${tokens}\u2026 ${readShare(own)}`.trim();
}

const KINDS = {
  chatcmpl: "chat", cmpl: "completion", msg: "message", resp: "response", score: "score",
};

/** A short name of a request: its API and its number there, or the end of another id. */
export function nameOf({ id }) {
  const [, prefix, number] = /^([a-z]+)[-_][0-9a-f]{16}([0-9a-f]{8})$/.exec(id) ?? [];
  if (KINDS[prefix]) return `${KINDS[prefix]} ${parseInt(number, 16) + 1}`;
  const kind = KINDS[/^[a-z]+(?=[-_])/.exec(id)?.[0]];
  return kind ? `${kind} ${id.slice(-6)}` : id.slice(-8);
}

/** The state of a request in the list. A client that left is no failure: its user stopped it. */
export function stateWords(request) {
  if (request.state === "aborted") return "stopped";
  const share = request.output_tokens ? "" : readShare(request);
  return request.state === "running" && share ? `reading ${share}` : request.state;
}

/** A step that has run for at least a second, in words; "" for others and without data. */
export function stepWords(step) {
  if (!(step?.seconds >= 1)) return "";
  return `step of ${count(step.tokens)} tokens: ${seconds(step.seconds)}`;
}
