// The live view: asks /live once a second while the page is in view, and draws the reply.

import { count, duration, percent, rate, seconds } from "./numbers.js";
import { nameOf, stateWords, stepWords } from "./reading.js";

const EACH_MS = 1000;
const SLOW_MS = 5000; // after a failure
const TIMEOUT_MS = 4000;
const SPARK_POINTS = 60;
const MAX_STEMS = 24;

const byId = (id) => document.getElementById(id);
const setText = (id, text) => {
  if (byId(id).textContent !== text) byId(id).textContent = text;
};
const sleep = (ms) => new Promise((wake) => setTimeout(wake, ms));

/** Resolves at once when the page is in view, else when it comes into view. */
const inView = () =>
  new Promise((wake) => {
    if (!document.hidden) wake();
    else document.addEventListener("visibilitychange", () => wake(), { once: true });
  });

function element(name, className, text = "") {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text) made.textContent = text;
  return made;
}

/** Stems in drawing order, with their depth and where they start; the most shared sibling first. */
function ordered(stems) {
  const children = new Map();
  for (const stem of stems) {
    const siblings = children.get(stem.parent) ?? [];
    siblings.push(stem);
    children.set(stem.parent, siblings);
  }
  const rows = [];
  const visit = (parent, depth, start) => {
    const siblings = children.get(parent) ?? [];
    siblings.sort((a, b) => b.sequences - a.sequences || b.tokens - a.tokens || a.id - b.id);
    for (const stem of siblings) {
      rows.push({ ...stem, depth, start });
      visit(stem.id, depth + 1, start + stem.tokens);
    }
  };
  visit(null, 0, 0);
  return rows;
}

function drawStems(stems) {
  const rows = ordered(stems);
  const end = Math.max(1, ...rows.map((row) => row.start + row.tokens));
  const most = Math.max(1, ...rows.map((row) => row.sequences));
  byId("stems-empty").hidden = rows.length > 0;
  byId("stems-more").hidden = rows.length <= MAX_STEMS;
  setText("stems-more", `and ${count(rows.length - MAX_STEMS)} more`);
  byId("stems").replaceChildren(
    ...rows.slice(0, MAX_STEMS).map((row) => {
      const item = element("li");
      const words = element("p");
      words.style.paddingInlineStart = `${Math.min(row.depth, 6) * 0.9}rem`;
      words.append(
        element("b", "", count(row.sequences)),
        element("span", "", ` sequences share ${count(row.tokens)} tokens`),
        element("span", "from", row.start ? `from ${count(row.start)}` : "from the start"),
      );
      const course = element("div", "course");
      const run = element("span", `depth-${Math.min(row.depth, 3)}`);
      run.style.insetInlineStart = `${(row.start / end) * 100}%`;
      run.style.width = `${(row.tokens / end) * 100}%`;
      run.style.height = `${3 + 9 * Math.sqrt(row.sequences / most)}px`;
      course.append(run);
      item.append(words, course);
      return item;
    }),
  );
}

function drawPages(pages) {
  // `pages.cached` includes held pages; `cached` does not
  const cached = Math.min(Math.max(0, pages.cached - pages.held), pages.total - pages.held);
  const free = pages.total - pages.held - cached;
  const bar = byId("pages");
  const share = (number) => `${(number / Math.max(1, pages.total)) * 100}%`;
  bar.querySelector(".held").style.width = share(pages.held);
  bar.querySelector(".cached").style.width = share(cached);
  const words = `${pages.held} held, ${cached} cached, ${free} free of ${pages.total} pages`;
  bar.setAttribute("aria-label", words);
  setText("pages-held", count(pages.held));
  setText("pages-cached", count(cached));
  setText("pages-free", count(free));
  setText("pages-size", `${pages.page_size} tokens each`);
  for (const tier of ["host", "disk"]) {
    byId(`pages-${tier}-item`).hidden = !pages[tier];
    setText(`pages-${tier}`, count(pages[tier]));
  }
}

function drawSpark(points) {
  const top = Math.max(1, ...points);
  const step = 120 / (SPARK_POINTS - 1);
  const left = 120 - (points.length - 1) * step;
  const line = points
    .map((value, i) => `${(left + i * step).toFixed(1)},${(30 - (value / top) * 27).toFixed(1)}`)
    .join("L");
  byId("spark").querySelector(".line").setAttribute("d", `M${line}`);
  byId("spark").querySelector(".area").setAttribute("d", `M${left.toFixed(1)},32L${line}L120,32Z`);
}

function drawTotals(live) {
  const { totals } = live;
  setText("rate", rate(live.tokens_per_s));
  setText("running", count(live.running));
  setText("waiting", live.waiting ? `${count(live.waiting)} waiting` : "none waiting");
  setText("step", stepWords(live.step));
  setText("saving", percent(totals.saving_ratio));
  if (totals.prompt_tokens) {
    const words = `${count(totals.cached_tokens)} of ${count(totals.prompt_tokens)}`;
    setText("saving-hint", words);
  }
  const saved = Math.max(0, 1 - totals.read_ratio);
  setText("reads", percent(saved));
  if (saved > 0.005) {
    setText("reads-hint", `${(1 / totals.read_ratio).toFixed(1)}\u00d7 fewer`);
  }
}

/** The server lists requests as they came; people look for the newest first. */
function drawRecent(recent) {
  byId("recent").hidden = recent.length === 0;
  byId("recent-empty").hidden = recent.length > 0;
  byId("recent")
    .querySelector("tbody")
    .replaceChildren(
      ...[...recent].reverse().map((request) => {
        const row = element("tr", request.state);
        const name = element("td");
        const label = element("span", "id", nameOf(request));
        label.title = request.id;
        name.append(label);
        if (request.app) name.append(" ", element("span", "tag", request.app));
        const cached = element("td", "cache");
        const share = request.cached_tokens / Math.max(1, request.prompt_tokens);
        const meter = element("span", "meter");
        const fill = element("span");
        fill.style.width = percent(share).replace(" ", "");
        meter.append(fill);
        cached.append(meter, ` ${percent(share)}`);
        cached.title = `${request.cached_tokens} of ${request.prompt_tokens} tokens`;
        const first = request.ttft_ms === null ? "\u2013" : seconds(request.ttft_ms / 1000);
        row.append(
          name,
          element("td", "number", count(request.prompt_tokens)),
          cached,
          element("td", "number", count(request.output_tokens)),
          element("td", "number", first),
          element("td", "status", stateWords(request)),
        );
        return row;
      }),
    );
}

function setState(state, words) {
  byId("state").dataset.state = state;
  setText("state", words);
}

/** Make tooltips that say what a card means; screen readers get the text by aria-describedby. */
function startTips() {
  for (const tipped of document.querySelectorAll(".live [aria-describedby]")) {
    const tip = byId(tipped.getAttribute("aria-describedby"));
    tipped.title = tip.textContent.trim().replace(/\s+/g, " ");
  }
}

/** Buttons do what hovering does on a desktop: all explanations at once. */
function startExplaining() {
  const button = byId("explain");
  button.addEventListener("click", () => {
    const isShown = document.querySelector(".live").classList.toggle("explained");
    button.setAttribute("aria-pressed", String(isShown));
  });
}

/** Show that nothing is known about the present; what was counted so far stays. */
function drawLost(last, since) {
  byId("stale").hidden = false;
  const time = since.toLocaleTimeString(undefined, { timeStyle: "medium" });
  setText("stale", `No connection since ${time}; trying again. The totals below are the last ones.`);
  for (const id of ["rate", "running"]) setText(id, "\u2013");
  for (const id of ["waiting", "step", "uptime"]) setText(id, "");
  drawStems([]);
  byId("stems-empty").hidden = true;
  const isOpen = ({ state }) => state === "running" || state === "waiting";
  drawRecent(last.recent.map((each) => (isOpen(each) ? { ...each, state: "not known" } : each)));
}

export function startLive(server, { onLook }) {
  const points = [];
  let last = null; // what /live answered last
  let lastSeen = null; // when

  function draw(live) {
    last = live;
    lastSeen = new Date();
    byId("stale").hidden = true;
    setState("up", live.running ? "busy" : "idle");
    setText("model", live.model);
    setText("uptime", `up ${duration(live.uptime_s)}`);
    points.push(live.tokens_per_s);
    if (points.length > SPARK_POINTS) points.shift();
    drawTotals(live);
    drawSpark(points);
    drawStems(live.stems);
    drawPages(live.pages);
    drawRecent(live.recent);
    onLook(live);
  }

  async function look() {
    const reply = await server.ask("/live", { signal: AbortSignal.timeout(TIMEOUT_MS) });
    if (!reply.ok) throw new Error(`the server answered ${reply.status}`);
    draw(await reply.json());
  }

  async function watch() {
    for (;;) {
      await inView();
      try {
        await look();
        await sleep(EACH_MS);
      } catch (error) {
        if (error instanceof server.KeyNeeded) {
          setState("down", "key needed");
          await server.keyGiven();
        } else {
          setState("down", "not reachable");
          points.length = 0;
          if (last) drawLost(last, lastSeen);
          await sleep(SLOW_MS);
        }
      }
    }
  }

  startTips();
  startExplaining();
  watch();
}
