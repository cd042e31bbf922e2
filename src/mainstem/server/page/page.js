// Starts the page: the key, views and tabs, and the parts that ask the server.
//
// Nothing here builds HTML from text: whatever a model or a user wrote becomes a text node.

import { startChat } from "./chat.js";
import { refusal } from "./key.js";
import { startLive } from "./live.js";
import { startMetrics } from "./metrics.js";
import { fetchOrSay } from "./replies.js";
import { startScoring } from "./scoring.js";

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
  const reply = await fetchOrSay(path, { ...options, headers });
  if (reply.status === 401) {
    showChangeKey();
    if (key === sessionStorage.getItem(KEY_NAME)) {
      byId("key-cancel").hidden = true; // nothing works without a key
      showKeyField(key ? "The server did not accept this key." : "This server asks for a key.");
    }
    throw new KeyNeeded("an API key is needed");
  }
  return reply;
}

/** Without a key that was given or asked for there is none to change. */
const showChangeKey = () => { byId("change-key").hidden = false; };

function showKeyField(hint) {
  byId("key-hint").textContent = hint;
  if (byId("key").hidden) {
    byId("key").hidden = false;
    byId("key-text").focus();
  }
}

function hideKeyField() {
  byId("key-text").value = "";
  byId("key").hidden = true;
}

function startKey() {
  const stored = sessionStorage.getItem(KEY_NAME);
  if (stored !== null && refusal(stored)) sessionStorage.removeItem(KEY_NAME);
  else if (stored !== null) showChangeKey();
  byId("key").addEventListener("submit", (event) => {
    event.preventDefault();
    const key = byId("key-text").value.trim();
    const why = refusal(key);
    if (why) {
      byId("key-hint").textContent = why;
      byId("key-text").select();
      return;
    }
    sessionStorage.setItem(KEY_NAME, key);
    showChangeKey();
    hideKeyField();
    const waiting = whenKeyed;
    whenKeyed = [];
    for (const wake of waiting) wake();
  });
  byId("change-key").addEventListener("click", () => {
    byId("key-cancel").hidden = whenKeyed.length > 0;
    showKeyField("Replaces the key of this tab.");
    byId("key-text").focus();
  });
  byId("key-cancel").addEventListener("click", hideKeyField);
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

/** One panel shows, that of the selected tab; arrow keys go from tab to tab. */
function startTabs() {
  const tabs = [...document.querySelectorAll("[role=tab]")];
  const panelOf = (tab) => byId(tab.getAttribute("aria-controls"));
  const select = (chosen) => {
    for (const tab of tabs) {
      tab.setAttribute("aria-selected", String(tab === chosen));
      tab.tabIndex = tab === chosen ? 0 : -1;
      panelOf(tab).hidden = tab !== chosen;
    }
    for (const control of document.querySelectorAll("[data-tab]")) {
      control.classList.toggle("elsewhere", control.dataset.tab !== chosen.id);
    }
  };
  tabs.forEach((tab, index) => {
    tab.addEventListener("click", () => select(tab));
    tab.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      event.preventDefault();
      const next = tabs[(index + step + tabs.length) % tabs.length];
      select(next);
      next.focus();
    });
  });
}

startKey();
startViews();
startTabs();
const server = { ask, keyGiven, KeyNeeded };
const chat = startChat(server);
startScoring(server);
startLive(server, { onLook: chat.look });
startMetrics(server);
