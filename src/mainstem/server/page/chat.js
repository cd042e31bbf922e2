// The conversation: what was said, the answer as it streams, and what it cost.

import { copyButton } from "./copy.js";
import { startHistory } from "./history.js";
import { count, rate, seconds } from "./numbers.js";
import { waitWords } from "./reading.js";
import { payloads, reasonOf } from "./replies.js";
import { drawer } from "./said.js";
import { startSettings } from "./settings.js";
import {
  dividerBefore, dropUnanswered, endTurn, idOf, load, loadTab, messagesBefore, newTalk, save,
  saveTab,
} from "./talks.js";

const byId = (id) => document.getElementById(id);

export function startChat(server) {
  const log = byId("log");
  const text = byId("text");
  const settings = startSettings({ onSystem: (prompt) => { talk.system = prompt; } });
  const { tab, id: lastId, draft } = loadTab(sessionStorage);
  let talk = load(localStorage, lastId, tab) ?? newTalk(settings.system());
  const deleted = new Set(); // ids; they are kept again only if a question is asked
  const history = startHistory({
    tab,
    shown: () => talk,
    onChoose: (id) => {
      const chosen = id === talk.id ? null : load(localStorage, id, tab);
      if (chosen) goTo(chosen);
    },
    onDelete: (ids) => {
      for (const id of ids) deleted.add(id);
      if (ids.includes(talk.id)) startOver();
    },
  });
  let model = null;
  let live = null; // what /live answered last
  let running = null; // the AbortController of the answer in progress
  let drawWait = () => {}; // says what the answer in progress waits for

  /** Keep the conversation, after a change. */
  function keep() {
    const isKept = !talk.turns.length || deleted.has(talk.id) || save(localStorage, talk);
    byId("not-kept").hidden = isKept;
    history.draw();
    keepTab();
  }

  const keepTab = () => saveTab(sessionStorage, { tab, id: talk.id, draft: text.value });

  // --- what is shown ---------------------------------------------------------------------------

  /** Add a turn to the log; the caller draws the content of an answer. */
  function addTurn({ role, content }) {
    byId("empty").hidden = true;
    for (const old of log.querySelectorAll(".again")) old.remove(); // only the last answer has one
    const shown = document.createElement("article");
    shown.className = `turn ${role}`;
    shown.setAttribute("aria-label", role === "user" ? "You" : "Answer");
    const said = document.createElement("div");
    said.className = "said";
    const note = document.createElement("p");
    note.className = "note";
    shown.append(said, note);
    if (role === "user") said.textContent = content;
    log.append(shown);
    return { shown, said, note };
  }

  function addDivider(words) {
    const divider = document.createElement("p");
    divider.className = "divider";
    divider.textContent = words;
    log.append(divider);
  }

  /** Add a question, after a divider if it goes to another app than the last. */
  function addQuestion(turn) {
    const words = dividerBefore(talk, turn);
    if (words) addDivider(words);
    addTurn(turn);
  }

  /** Show how an answer ended, and buttons for what can be done with it. */
  function showEnd({ shown, note }, turn) {
    shown.classList.toggle("failed", turn.state === "failed");
    note.textContent = turn.note;
    const actions = document.createElement("p");
    actions.className = "actions";
    if (turn.content) actions.append(copyButton(() => turn.content, "Copy answer"));
    if (turn === talk.turns.at(-1)) {
      const again = document.createElement("button");
      again.type = "button";
      again.className = "again";
      const isWhole = turn.content && turn.state !== "failed";
      again.textContent = isWhole ? "Regenerate" : "Try again";
      again.addEventListener("click", () => answerAgain(turn));
      actions.append(again);
    }
    shown.append(actions);
  }

  function drawTalk() {
    for (const old of log.querySelectorAll(".turn, .divider")) old.remove();
    byId("empty").hidden = talk.turns.length > 0;
    for (const turn of talk.turns) {
      if (turn.role === "user") {
        addQuestion(turn);
      } else {
        const parts = addTurn(turn);
        drawer(parts.said)(turn.content);
        showEnd(parts, turn);
      }
    }
    toEnd();
  }

  const isAtEnd = () => log.scrollHeight - log.scrollTop - log.clientHeight < 48;
  const toEnd = () => { log.scrollTop = log.scrollHeight; };

  function setRunning(controller) {
    running = controller;
    byId("send").hidden = controller !== null;
    byId("stop").hidden = controller === null;
  }

  function fitText() {
    text.style.height = "auto";
    text.style.height = `${Math.min(text.scrollHeight + 2, 180)}px`;
  }

  // --- what is asked ---------------------------------------------------------------------------

  async function findModel(signal) {
    if (model) return model;
    const reply = await server.ask("/v1/models", { signal });
    if (!reply.ok) throw new Error(await reasonOf(reply));
    const { data } = await reply.json();
    model = data[0].id;
    return model;
  }

  /** The chosen app; until the server has listed its apps, the one the conversation had. */
  const chosenApp = () => (byId("app").options.length ? byId("app").value : talk.app);

  async function requestBody(messages, signal) {
    const app = chosenApp();
    const sessionId = talk.id;
    const base = await findModel(signal);
    return {
      model: app ? `${base}:${app}` : base,
      session_id: sessionId,
      messages,
      ...settings.chosen(),
      stream: true,
      stream_options: { include_usage: true },
    };
  }

  /**
   * Stream one answer into the log, in place of the answer `earlier` if that is not empty. Resolves
   * when the new answer has ended or was stopped by the user.
   */
  async function answer(earlier = "") {
    const turn = { role: "assistant", content: "", state: "open", note: "", earlier, tab };
    const answered = talk; // another one may be shown when the answer ends
    talk.turns.push(turn);
    const messages = messagesBefore(talk, turn);
    keep();
    const parts = addTurn(turn);
    const { shown, said, note } = parts;
    shown.classList.add("streaming");
    const controller = new AbortController();
    const { signal } = controller;
    setRunning(controller);

    const drawSaid = drawer(said);
    let isDrawing = false;
    const draw = () => {
      isDrawing = false;
      const follow = isAtEnd();
      drawSaid(turn.content);
      if (follow) toEnd();
    };
    const began = performance.now();
    let id = null;
    let first = null;
    let last = null;
    let usage = null;
    let finish = null;
    let failure = null;
    let isThinking = null; // until the first token
    const drawOwnWait = () => {
      if (first === null) note.textContent = waitWords(live, id);
    };
    drawWait = drawOwnWait;
    drawWait();
    toEnd();
    try {
      const body = JSON.stringify(await requestBody(messages, signal));
      const headers = { "Content-Type": "application/json" };
      const reply = await server.ask("/v1/chat/completions", {
        method: "POST",
        headers,
        body,
        signal,
      });
      if (!reply.ok) throw new Error(await reasonOf(reply));
      for await (const chunk of payloads(reply.body)) {
        if (chunk.error) throw new Error(chunk.error.message ?? "the answer failed");
        id ??= chunk.id ?? null;
        if (chunk.usage) usage = chunk.usage;
        const choice = chunk.choices?.[0];
        if (!choice) continue;
        const thought = choice.delta?.reasoning_content;
        if (thought || choice.delta?.content) {
          last = performance.now();
          first ??= last;
          if (isThinking !== Boolean(thought)) {
            isThinking = Boolean(thought);
            note.textContent = isThinking ? "Thinking\u2026" : describe({ began, first });
          }
          turn.content += choice.delta.content ?? "";
          if (!isDrawing) {
            isDrawing = true;
            requestAnimationFrame(draw);
          }
        }
        finish = choice.finish_reason ?? finish;
      }
    } catch (error) {
      failure = error;
    }
    if (drawWait === drawOwnWait) drawWait = () => {};
    const wasStopped = signal.aborted;
    const isFailed = failure && !wasStopped;
    const words = isFailed
      ? failure.message || "The answer failed."
      : describe({ began, first, last, usage, finish, wasStopped });
    endTurn(turn, wasStopped ? "stopped" : isFailed ? "failed" : "done", words);
    draw();
    const follow = isAtEnd();
    shown.classList.remove("streaming");
    if (running === controller) setRunning(null);
    if (answered !== talk) return; // it was kept when the user went to another one
    keep();
    showEnd(parts, turn);
    if (follow) toEnd();
    byId("announce").textContent = isFailed ? turn.note : turn.content;
    if (failure instanceof server.KeyNeeded) server.keyGiven().then(() => answerAgain(turn));
  }

  /** Answer the last question once more, in place of this answer. */
  function answerAgain(turn) {
    if (running || talk.turns.at(-1) !== turn || !settings.areValid()) return;
    talk.turns.pop();
    talk.app = chosenApp();
    talk.turns.at(-1).app = talk.app;
    drawTalk();
    text.focus();
    answer(turn.content);
  }

  function describe({ began, first, last, usage, finish, wasStopped }) {
    const parts = [];
    if (wasStopped) parts.push("stopped");
    else if (finish === "length") parts.push("cut at max tokens");
    if (first !== null) parts.push(`first token ${seconds((first - began) / 1000)}`);
    if (usage) {
      const made = usage.completion_tokens;
      if (made > 1 && last > first) {
        parts.push(`${rate(((made - 1) * 1000) / (last - first))} tokens/s`);
      }
      const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
      parts.push(`${count(cached)} of ${count(usage.prompt_tokens)} prompt tokens cached`);
      const dropped = usage.prompt_tokens_details?.dropped_tokens;
      if (dropped) parts.push(`the oldest ${count(dropped)} did not fit into the context`);
    }
    return parts.join(" \u00b7 ");
  }

  // --- what the user does ----------------------------------------------------------------------

  function send() {
    const content = text.value.trim();
    if (!content || running || !settings.areValid()) return;
    text.value = "";
    fitText();
    talk.app = chosenApp();
    const last = talk.turns.at(-1);
    const question = { role: "user", content, app: talk.app };
    dropUnanswered(talk);
    talk.turns.push(question);
    if (last && !talk.turns.includes(last)) drawTalk();
    else addQuestion(question);
    deleted.delete(talk.id);
    answer();
  }

  /** Begin a new conversation, with this one's app and system prompt. */
  function startOver() {
    const made = newTalk(talk.system);
    made.app = chosenApp();
    goTo(made);
  }

  function goTo(other) {
    stop();
    talk = other;
    settings.setSystem(talk.system ?? "");
    chooseApp();
    drawTalk();
    keepTab();
    history.draw();
    text.focus();
  }

  /** End the answer in progress, whatever the server does. */
  function stop() {
    if (!running) return;
    running.abort();
    setRunning(null);
    const open = talk.turns.at(-1); // only its end is missing
    endTurn(open, "stopped", "stopped");
    keep();
  }

  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  text.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send();
    }
  });
  text.addEventListener("input", fitText);
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !byId("metrics").open) running?.abort();
  });
  byId("stop").addEventListener("click", () => {
    running?.abort();
    text.focus();
  });
  byId("new").addEventListener("click", () => {
    history.close();
    startOver();
  });
  byId("app").addEventListener("change", () => {
    talk.app = byId("app").value;
    keep();
  });
  // the browser closes connections when the page is left: that is no failure
  window.addEventListener("pagehide", () => {
    stop();
    keepTab();
  });
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) keepTab(); // a phone may end the tab without another event
    if (document.hidden && running) keep();
  });
  window.addEventListener("storage", ({ key, newValue }) => {
    const id = idOf(key);
    history.draw();
    if (id !== talk.id) return;
    const changed = newValue && load(localStorage, id, tab);
    if (!changed) deleted.add(id); // by another tab; it stays in view here
    else if (!running) {
      talk = changed;
      settings.setSystem(talk.system ?? "");
      drawTalk();
    }
  });

  /** Choose the app of this conversation, if the server still has it. */
  function chooseApp() {
    const names = [...byId("app").options].map((option) => option.value);
    byId("app").value = names.includes(talk.app) ? talk.app : "";
  }

  /** Offer these apps; keeps the choice if it is still there. */
  function setApps(names) {
    const select = byId("app");
    const shown = [...select.options].slice(1).map((option) => option.value);
    if (select.options.length && shown.join("\n") === names.join("\n")) return;
    talk.app = chosenApp() || talk.app;
    select.replaceChildren(new Option("none", ""), ...names.map((name) => new Option(name, name)));
    chooseApp();
    byId("app-field").hidden = names.length === 0;
  }

  text.value = draft;
  settings.setSystem(talk.system ?? "");
  fitText();
  drawTalk();

  /** Take in what /live answered. */
  function look(news) {
    live = news;
    setApps(live.apps);
    drawWait();
  }

  return { look };
}
