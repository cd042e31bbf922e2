// The list of conversations: go to one, delete one or all, and take a deletion back.

import { loadAll, remove, save, titleOf } from "./talks.js";

const byId = (id) => document.getElementById(id);
const today = new Intl.DateTimeFormat(undefined, { timeStyle: "short" });
const earlier = new Intl.DateTimeFormat(undefined, { dateStyle: "medium" });

function button(className, words, onClick) {
  const made = document.createElement("button");
  made.type = "button";
  made.className = className;
  made.textContent = words;
  made.addEventListener("click", onClick);
  return made;
}

/** The time of a change: of today the hour, else the day. */
function when(changed) {
  const date = new Date(changed);
  const isToday = date.toDateString() === new Date().toDateString();
  return (isToday ? today : earlier).format(date);
}

/**
 * `shown()` is the conversation that the tab shows. `onChoose` gets one to go to, `onDelete` those
 * that were deleted. Returns functions to draw the list again and to close it.
 */
export function startHistory({ tab, shown, onChoose, onDelete }) {
  const panel = byId("history");
  const opener = byId("history-button");
  let deleted = []; // by the last deletion

  function open(isOpen) {
    panel.hidden = !isOpen;
    opener.setAttribute("aria-expanded", String(isOpen));
    if (isOpen) draw();
  }

  function draw() {
    if (panel.hidden) return;
    const talks = loadAll(localStorage, tab);
    byId("history-empty").hidden = talks.length > 0;
    byId("history-clear").hidden = talks.length === 0;
    byId("history-list").replaceChildren(...talks.map(entryOf));
    byId("history-undo").hidden = deleted.length === 0;
    const what = deleted.length === 1 ? `\u201c${titleOf(deleted[0])}\u201d` : `${deleted.length} conversations`;
    byId("history-deleted").textContent = deleted.length ? `Deleted ${what}.` : "";
  }

  function entryOf(talk) {
    const entry = document.createElement("li");
    const title = button("title", titleOf(talk), () => {
      open(false);
      onChoose(talk.id);
    });
    if (talk.id === shown().id) title.setAttribute("aria-current", "true");
    const time = document.createElement("span");
    time.className = "quiet";
    time.textContent = when(talk.changed);
    const gone = button("delete", "Delete", () => forget([talk]));
    gone.setAttribute("aria-label", `Delete ${titleOf(talk)}`);
    entry.append(title, time, gone);
    return entry;
  }

  function forget(talks) {
    deleted = talks;
    for (const { id } of talks) remove(localStorage, id);
    onDelete(talks.map(({ id }) => id));
    draw();
    byId("history-undo").focus(); // the button that was pressed is gone
  }

  opener.addEventListener("click", () => open(panel.hidden));
  byId("history-clear").addEventListener("click", () => forget(loadAll(localStorage, tab)));
  byId("history-undo").addEventListener("click", () => {
    for (const talk of deleted) save(localStorage, talk, talk.changed);
    deleted = [];
    draw();
    opener.focus();
  });
  return { draw, close: () => open(false) };
}
