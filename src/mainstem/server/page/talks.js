// The conversations of this browser, in its local storage, as far as there is room. All tabs have
// the same ones; which one a tab shows, and its draft, is kept in the tab's session storage.
//
// A talk is {id, app, system, turns, version, changed}. A turn is {role, content, app} of a user, or
// {role, content, state, note, earlier, tab} of the assistant: its state is "open" while it streams
// in that tab, then "done", "stopped" (by the user) or "failed". While it is open, `earlier` is the
// answer that it replaces.

const PREFIX = "mainstem-talk:";
const TAB = "mainstem-tab";
const MAX_TALKS = 100;
const MAX_CHARS = 4_000_000; // browsers give 5 million

const newId = () => {
  const numbers = crypto.getRandomValues(new Uint32Array(4));
  return [...numbers].map((number) => number.toString(16).padStart(8, "0")).join("");
};

/** A new conversation; the server keeps its token ids in a session with the same id. */
export const newTalk = (system = "") => ({
  id: `page-${newId()}`, app: "", system, turns: [], version: 0, changed: 0,
});

/** What the API gets: the system prompt and the turns before this one. */
export function messagesBefore(talk, turn) {
  const before = talk.turns.slice(0, talk.turns.indexOf(turn));
  const messages = before.map(({ role, content }) => ({ role, content }));
  return talk.system ? [{ role: "system", content: talk.system }, ...messages] : messages;
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

/** The name of a conversation in a list: its first words. */
export const titleOf = ({ turns }) =>
  (turns[0]?.content ?? "").trim().replace(/\s+/g, " ").slice(0, 80) || "New conversation";

// --- this tab -----------------------------------------------------------------------------------

/** What this tab showed when it was left: {tab, id, draft}; a new tab gets a name of its own. */
export function loadTab(storage) {
  try {
    const { tab, id, draft } = JSON.parse(storage.getItem(TAB));
    if (typeof tab === "string") return { tab, id, draft: draft ?? "" };
  } catch {
    // nothing there, or written by another version of this page
  }
  return { tab: newId(), id: null, draft: "" };
}

export function saveTab(storage, { tab, id, draft }) {
  try {
    storage.setItem(TAB, JSON.stringify({ tab, id, draft }));
  } catch {
    // a very long draft; it stays in the field
  }
}

// --- all tabs -----------------------------------------------------------------------------------

/** The id of the conversation that an entry of the storage holds, or null. */
export const idOf = (name) => (name?.startsWith(PREFIX) ? name.slice(PREFIX.length) : null);

/** A kept conversation, or null. An answer that this `tab` left open is stopped. */
export function load(storage, id, tab) {
  try {
    const talk = JSON.parse(storage.getItem(PREFIX + id));
    if (talk.turns.some(({ content }) => typeof content !== "string")) return null;
    for (const turn of talk.turns) {
      if (turn.state !== "open") continue;
      if (turn.tab === tab) endTurn(turn, "stopped", "stopped when the page was left");
      else turn.note = "being answered in another tab";
    }
    return talk;
  } catch {
    return null; // nothing there, or written by another version of this page
  }
}

/** All kept conversations, those that changed last first. */
export function loadAll(storage, tab) {
  const names = Array.from({ length: storage.length }, (_, index) => storage.key(index));
  const found = names.map(idOf).filter(Boolean).map((id) => load(storage, id, tab));
  return found.filter(Boolean).sort((a, b) => b.changed - a.changed);
}

/**
 * Keep a conversation; the oldest others go if there is no room. If another tab has changed it
 * since it was read here, this one goes on as a copy, with another id. Returns false if it is too
 * long to be kept.
 */
export function save(storage, talk, now = Date.now()) {
  const stored = load(storage, talk.id, null);
  if (stored && stored.version !== talk.version) talk.id = newTalk().id;
  const text = JSON.stringify({ ...talk, version: talk.version + 1, changed: now });
  if (text.length > MAX_CHARS) return false;
  const others = loadAll(storage, null).filter(({ id }) => id !== talk.id);
  const sizes = new Map(others.map((each) => [each, JSON.stringify(each).length]));
  let size = text.length + [...sizes.values()].reduce((sum, each) => sum + each, 0);
  for (;;) {
    if (others.length < MAX_TALKS && size <= MAX_CHARS) {
      try {
        storage.setItem(PREFIX + talk.id, text);
        talk.version += 1;
        talk.changed = now;
        return true;
      } catch {
        // this browser gives less room than most do
      }
    }
    const oldest = others.pop();
    if (!oldest) return false;
    size -= sizes.get(oldest);
    remove(storage, oldest.id);
  }
}

export const remove = (storage, id) => storage.removeItem(PREFIX + id);
