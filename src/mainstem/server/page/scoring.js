// The tab of scores: a context, choices, and a table of how likely each one is.

import { seconds } from "./numbers.js";
import { reasonOf } from "./replies.js";
import { scoreBody, scoreRows, usageWords } from "./scores.js";

const byId = (id) => document.getElementById(id);

function cell(className, ...inside) {
  const made = document.createElement("td");
  made.className = className;
  made.append(...inside);
  return made;
}

function span(className, text = "") {
  const made = document.createElement("span");
  made.className = className;
  made.textContent = text;
  return made;
}

function drawRow({ text, share, probability, logprob, tokens, isBest }) {
  const row = document.createElement("tr");
  row.className = isBest ? "best" : "";
  const meter = span("meter");
  const fill = span("");
  fill.style.width = `${share * 100}%`;
  meter.append(fill);
  const choice = cell("choice", span("words", text));
  if (isBest) choice.append(" ", span("tag", "likeliest"));
  row.append(
    choice,
    cell("probability", meter, span("", probability)),
    cell("number", logprob),
    cell("number", tokens),
  );
  return row;
}

export function startScoring(server) {
  const table = byId("score-table");
  const note = byId("score-note");
  let running = null; // the AbortController of the request in progress

  function setRunning(controller) {
    running = controller;
    byId("score").hidden = controller !== null;
    byId("score-stop").hidden = controller === null;
  }

  function show(rows, words, isFailed = false) {
    table.hidden = rows.length === 0;
    byId("score-legend").hidden = table.hidden;
    table.querySelector("tbody").replaceChildren(...rows.map(drawRow));
    note.textContent = words;
    note.classList.toggle("failed", isFailed);
  }

  async function score() {
    if (running) return;
    const controller = new AbortController();
    setRunning(controller);
    show([], "scoring\u2026");
    const asked = scoreBody(byId("context").value, byId("choices").value, byId("app").value);
    const began = performance.now();
    try {
      const reply = await server.ask("/v1/score", {
        method: "POST",
        headers: { "Content-Type": "application/json" },
        body: JSON.stringify(asked),
        signal: controller.signal,
      });
      if (!reply.ok) throw new Error(await reasonOf(reply));
      const scores = await reply.json();
      const taken = seconds((performance.now() - began) / 1000);
      const words = [usageWords(scores.usage), taken].filter(Boolean).join(" \u00b7 ");
      show(scoreRows(scores), words);
    } catch (error) {
      const isStopped = controller.signal.aborted;
      show([], isStopped ? "stopped" : error.message, !isStopped);
      if (error instanceof server.KeyNeeded) server.keyGiven().then(score);
    }
    setRunning(null);
  }

  byId("score-stop").addEventListener("click", () => running?.abort());
  byId("score-example").addEventListener("click", () => {
    byId("context").value = "Question: What is the capital of France?\nAnswer:";
    byId("choices").value = " Paris\n London\n Madrid";
    score();
  });

  byId("scoring").addEventListener("submit", (event) => {
    event.preventDefault();
    score();
  });
}
