// Starts the page: the key, the two views, and who asks the server for what.
//
// Nothing here builds HTML from text: whatever a model or a user wrote becomes a text node.

import { startChat } from "./chat.js";
import { startLive } from "./live.js";

const KEY_NAME = "mainstem-key";
const byId = (id) => document.getElementById(id);

/** Raised when the server wants a key, or another one. */
class KeyNeeded extends Error {}

let whenKeyed = [];

/** fetch with the key, if there is one; a 401 shows the key field and throws KeyNeeded. */
async function ask(path, options = {}) {
  const key = sessionStorage.getItem(KEY_NAME);
  const headers = { ...options.headers };
  if (key) headers.Authorization = `Bearer ${key}`;
  const reply = await fetch(path, { ...options, headers });
  if (reply.status === 401) {
    showKeyField(key ? "The server did not accept this key." : "This server asks for a key.");
    throw new KeyNeeded("an API key is needed");
  }
  return reply;
}

function showKeyField(hint) {
  byId("key-hint").textContent = hint;
  if (byId("key").hidden) {
    byId("key").hidden = false;
    byId("key-text").focus();
  }
}

function startKey() {
  byId("key").addEventListener("submit", (event) => {
    event.preventDefault();
    sessionStorage.setItem(KEY_NAME, byId("key-text").value.trim());
    byId("key-text").value = "";
    byId("key").hidden = true;
    const waiting = whenKeyed;
    whenKeyed = [];
    for (const wake of waiting) wake();
  });
}

/** Resolves when the user gave a key. */
const keyGiven = () => new Promise((wake) => whenKeyed.push(wake));

/** On a phone one view shows at a time; on a wide screen both do and the buttons are hidden. */
function startViews() {
  const buttons = [...document.querySelectorAll(".views button")];
  for (const button of buttons) {
    button.addEventListener("click", () => {
      document.body.dataset.view = button.dataset.view;
      for (const each of buttons) each.setAttribute("aria-pressed", String(each === button));
    });
  }
}

startKey();
startViews();
const server = { ask, keyGiven, KeyNeeded };
const chat = startChat(server);
startLive(server, { onApps: chat.setApps });
