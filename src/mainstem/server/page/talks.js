// The conversations of this tab, kept in its session storage, as far as there is room: a reload,
// Back and *New* do not lose them.
//
// A talk is {id, app, turns}. A turn is {role, content, app} of a user, or {role, content, state,
// note, earlier} of the assistant: its state is "open" while it streams, then "done", "stopped"
// (by the user) or "failed". While it is open, `earlier` is the answer that it replaces.

const NAME = "mainstem-talks";
const MAX_TALKS = 20;
const MAX_CHARS = 2_000_000; // browsers give 5 MB, at two bytes a character

/** A new conversation; the server keeps its token ids in a session with the same id. */
export function newTalk() {
  const numbers = crypto.getRandomValues(new Uint32Array(4));
  const id = `page-${[...numbers].map((number) => number.toString(16).padStart(8, "0")).join("")}`;
  return { id, app: "", turns: [] };
}

/** What the API gets: the turns before this one, without what only the page needs. */
export function messagesBefore(talk, turn) {
  const before = talk.turns.slice(0, talk.turns.indexOf(turn));
  return before.map(({ role, content }) => ({ role, content }));
}

/** End an answer. If it is empty, the answer that it was to replace stays. */
export function endTurn(turn, state, note) {
  turn.state = state;
  turn.note = note;
  if (!turn.content && turn.earlier) {
    turn.content = turn.earlier;
    turn.note += " \u00b7 this is the earlier answer";
  }
  turn.earlier = "";
}

/** Forget a last question that got no answer: the next one takes its place. */
export function dropUnanswered(talk) {
  const last = talk.turns.at(-1);
  if (last?.role === "assistant" && !last.content) talk.turns.pop();
  if (talk.turns.at(-1)?.role === "user") talk.turns.pop();
}

/** What stands between this turn and the one before: words if the app changed, else null. */
export function dividerBefore(talk, turn) {
  if (turn.role !== "user") return null;
  const earlier = talk.turns.slice(0, talk.turns.indexOf(turn));
  const before = earlier.findLast(({ role }) => role === "user");
  if (!before || before.app === turn.app) return null;
  return turn.app ? `App from here: ${turn.app}` : "No app from here";
}

/** What was kept: {talks, talk, draft}, talks begun last come first; null if nothing was kept. */
export function load(storage) {
  try {
    const { talks, id, draft } = JSON.parse(storage.getItem(NAME));
    for (const turn of talks.flatMap(({ turns }) => turns)) {
      if (typeof turn.content !== "string") return null;
      if (turn.state === "open") endTurn(turn, "stopped", "stopped when the page was left");
    }
    if (!talks.length) return null;
    return { talks, talk: talks.find((each) => each.id === id) ?? newTalk(), draft: draft ?? "" };
  } catch {
    return null; // nothing there, or written by another version of this page
  }
}

/**
 * Keep as many conversations as there is room for: `talk` first, then those begun last.
 * Returns false if `talk` is too long to be kept.
 */
export function save(storage, { talks, talk, draft }) {
  for (let room = MAX_CHARS; room > 1000; room /= 2) {
    const kept = fitting(talks, talk, room);
    try {
      storage.setItem(NAME, JSON.stringify({ talks: kept, id: talk.id, draft }));
      return kept.includes(talk);
    } catch {
      // this browser gives less room than most do: try again with half as much
    }
  }
  return false;
}

function fitting(talks, talk, room) {
  const kept = new Set();
  let left = room;
  for (const each of [talk, ...talks]) {
    if (kept.has(each) || kept.size === MAX_TALKS) continue;
    left -= JSON.stringify(each).length;
    if (left >= 0) kept.add(each);
    else if (each === talk) left = room; // it does not fit alone: keep the others
    else break;
  }
  return talks.filter((each) => kept.has(each));
}
