// The conversation: what was said, the answer as it streams, and what it cost.

import { count, rate, seconds } from "./numbers.js";

const byId = (id) => document.getElementById(id);

/** Every `data:` payload of a server-sent event stream, in order, without the final [DONE]. */
async function* payloads(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split(/\r?\n/);
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue;
      const payload = line.slice(5).trim();
      if (payload === "[DONE]") return;
      yield JSON.parse(payload);
    }
  }
}

/** What an error answer says, whatever its shape. */
async function reasonOf(reply) {
  try {
    const body = await reply.json();
    return body.error?.message ?? body.detail ?? `the server answered ${reply.status}`;
  } catch {
    return `the server answered ${reply.status}`;
  }
}

/** A conversation of this tab; the server keeps its token ids under the session's id. */
function newTalk() {
  const numbers = crypto.getRandomValues(new Uint32Array(4));
  const id = `page-${[...numbers].map((number) => number.toString(16).padStart(8, "0")).join("")}`;
  return { id, turns: [] }; // turns: {role, content}, as the API wants them
}

export function startChat(server) {
  const log = byId("log");
  const text = byId("text");
  let talk = newTalk();
  const talks = [talk]; // the latest begun first
  let model = null;
  let running = null; // the AbortController of the answer in progress

  // --- what is shown ---------------------------------------------------------------------------

  function addTurn(role) {
    byId("empty").hidden = true;
    const turn = document.createElement("article");
    turn.className = `turn ${role}`;
    turn.setAttribute("aria-label", role === "user" ? "You" : "Answer");
    const said = document.createElement("p");
    said.className = "said";
    const note = document.createElement("p");
    note.className = "note";
    turn.append(said, note);
    log.append(turn);
    return { turn, said, note };
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

  async function findModel() {
    if (model) return model;
    const reply = await server.ask("/v1/models");
    if (!reply.ok) throw new Error(await reasonOf(reply));
    const { data } = await reply.json();
    model = data[0].id;
    return model;
  }

  async function requestBody() {
    const base = await findModel();
    const app = byId("app").value;
    const temperature = byId("temperature").value; // "": the server's default for the model
    return {
      model: app ? `${base}:${app}` : base,
      session_id: talk.id,
      messages: talk.turns,
      temperature: temperature === "" ? null : Number(temperature),
      max_tokens: Number(byId("max-tokens").value),
      stream: true,
      stream_options: { include_usage: true },
    };
  }

  /** Stream one answer into the log; resolves when it ended, by itself or by the user. */
  async function answer() {
    const { turn, said, note } = addTurn("assistant");
    const { turns } = talk;
    const shown = document.createTextNode("");
    said.append(shown);
    turn.classList.add("streaming");
    const controller = new AbortController();
    setRunning(controller);
    toEnd();

    let whole = "";
    let isDrawing = false;
    const draw = () => {
      isDrawing = false;
      const follow = isAtEnd();
      shown.data = whole;
      if (follow) toEnd();
    };
    const began = performance.now();
    let first = null;
    let last = null;
    let usage = null;
    let finish = null;
    let failure = null;
    try {
      const body = JSON.stringify(await requestBody());
      const headers = { "Content-Type": "application/json" };
      const options = { method: "POST", headers, body, signal: controller.signal };
      const reply = await server.ask("/v1/chat/completions", options);
      if (!reply.ok) throw new Error(await reasonOf(reply));
      for await (const chunk of payloads(reply.body)) {
        if (chunk.error) throw new Error(chunk.error.message ?? "the answer failed");
        if (chunk.usage) usage = chunk.usage;
        const choice = chunk.choices?.[0];
        if (!choice) continue;
        if (choice.delta?.content) {
          last = performance.now();
          first ??= last;
          whole += choice.delta.content;
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
    draw();
    const follow = isAtEnd();
    turn.classList.remove("streaming");
    setRunning(null);
    if (!turn.isConnected) return; // the conversation was left
    const wasStopped = controller.signal.aborted;
    if (whole) turns.push({ role: "assistant", content: whole });
    if (failure && !wasStopped) {
      showFailure(turn, note, failure);
    } else {
      note.textContent = describe({ began, first, last, usage, finish, wasStopped });
    }
    if (follow) toEnd();
    byId("announce").textContent = failure && !wasStopped ? failure.message : whole;
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
      if (dropped) parts.push(`the oldest ${count(dropped)} are out of the context`);
    }
    return parts.join(" \u00b7 ");
  }

  function showFailure(turn, note, failure) {
    turn.classList.add("failed");
    note.textContent = failure.message || "The server cannot be reached.";
    const again = document.createElement("button");
    again.type = "button";
    again.textContent = "Try again";
    again.addEventListener("click", () => {
      if (running || !turn.isConnected) return;
      if (talk.turns.at(-1)?.role === "assistant") talk.turns.pop();
      turn.remove();
      answer();
    });
    note.append(" ", again);
    if (failure instanceof server.KeyNeeded) server.keyGiven().then(() => again.click());
  }

  // --- what the user does ----------------------------------------------------------------------

  function send() {
    const content = text.value.trim();
    if (!content || running) return;
    for (const id of ["temperature", "max-tokens"]) {
      if (byId(id).checkValidity()) continue; // max-tokens is required
      openSettings(true);
      byId(id).reportValidity();
      return;
    }
    text.value = "";
    fitText();
    dropUnanswered();
    addTurn("user").said.textContent = content;
    talk.turns.push({ role: "user", content });
    drawTalks();
    answer();
  }

  /** Forget a question that got no answer: the next one takes its place. */
  function dropUnanswered() {
    for (const stale of log.querySelectorAll(".failed")) stale.remove();
    if (talk.turns.at(-1)?.role !== "user") return;
    talk.turns.pop();
    const asked = [...log.querySelectorAll(".turn.user")].at(-1);
    while (asked.nextSibling) asked.nextSibling.remove();
    asked.remove();
  }

  /** Leave this conversation for a new one; it can be taken up again. */
  function startOver() {
    if (talk.turns.length) talks.unshift(newTalk());
    goTo(talks[0]);
  }

  function goTo(other) {
    running?.abort();
    talk = other;
    for (const turn of log.querySelectorAll(".turn")) turn.remove();
    byId("empty").hidden = talk.turns.length > 0;
    for (const { role, content } of talk.turns) addTurn(role).said.textContent = content;
    drawTalks();
    toEnd();
    text.focus();
  }

  /** Offer the conversations of this tab, by how they begin. */
  function drawTalks() {
    const named = ({ id, turns }) => new Option(turns[0]?.content.slice(0, 40) ?? "new", id);
    byId("session").replaceChildren(...talks.map(named));
    byId("session").value = talk.id;
    byId("session-field").hidden = talks.length < 2;
  }

  function openSettings(isOpen) {
    byId("settings").hidden = !isOpen;
    byId("settings-button").setAttribute("aria-expanded", String(isOpen));
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
    if (event.key === "Escape") running?.abort();
  });
  byId("stop").addEventListener("click", () => {
    running?.abort();
    text.focus();
  });
  byId("new").addEventListener("click", startOver);
  byId("session").addEventListener("change", (event) => {
    goTo(talks.find(({ id }) => id === event.target.value));
  });
  byId("settings-button").addEventListener("click", () => openSettings(byId("settings").hidden));

  /** Offer these apps; keeps the choice if it is still there. */
  function setApps(names) {
    const select = byId("app");
    const shown = [...select.options].slice(1).map((option) => option.value);
    if (select.options.length && shown.join("\n") === names.join("\n")) return;
    const chosen = select.value;
    select.replaceChildren(new Option("none", ""), ...names.map((name) => new Option(name, name)));
    select.value = names.includes(chosen) ? chosen : "";
    byId("app-field").hidden = names.length === 0;
  }

  return { setApps };
}
