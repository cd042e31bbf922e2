import assert from "node:assert/strict";
import test from "node:test";

const page = await import(`${process.env.PAGE}/talks.js`);
const {
  dividerBefore, dropUnanswered, endTurn, idOf, load, loadAll, loadTab, messagesBefore, newTalk,
  remove, save, saveTab, titleOf,
} = page;

/** Storage of a browser with room for `room` characters. */
function storage(room = Infinity) {
  const held = new Map();
  return {
    get length() { return held.size; },
    key: (index) => [...held.keys()][index] ?? null,
    getItem: (name) => held.get(name) ?? null,
    removeItem: (name) => held.delete(name),
    setItem: (name, value) => {
      const others = [...held].filter(([each]) => each !== name);
      const used = others.reduce((sum, [, text]) => sum + text.length, 0);
      if (used + value.length > room) throw new Error("QuotaExceededError");
      held.set(name, value);
    },
  };
}

const user = (content, app = "") => ({ role: "user", content, app });
const said = (content, state = "done") => ({ role: "assistant", content, state, note: "" });
const talkOf = (...turns) => ({ ...newTalk(), turns });
const firsts = (kept) => loadAll(kept, "tab").map(({ turns }) => turns[0].content.slice(0, 9));

test("saved conversations are loaded again, those that changed last first", () => {
  const kept = storage();
  const talks = [talkOf(user("a"), said("b")), talkOf(user("c", "legal"), said("d", "stopped"))];
  talks.forEach((talk, index) => assert.equal(save(kept, talk, 10 - index), true));
  assert.deepEqual(loadAll(kept, "tab"), talks);
  assert.deepEqual(load(kept, talks[1].id, "tab"), talks[1]);
  remove(kept, talks[0].id);
  assert.equal(load(kept, talks[0].id, "tab"), null);
});

test("no conversation is loaded from empty storage or from data of another version", () => {
  for (const wrong of [null, "", "{", "[]", '{"talks": [{}]}', '{"turns": [{"content": 5}]}']) {
    assert.equal(load({ getItem: () => wrong }, "x", "tab"), null);
  }
  const kept = storage();
  kept.setItem("mainstem-settings", "{}");
  kept.setItem("mainstem-talk:x", "null");
  assert.deepEqual(loadAll(kept, "tab"), []);
  assert.deepEqual([idOf("mainstem-talk:x"), idOf("mainstem-settings"), idOf(null)], ["x", null, null]);
});

test("a tab keeps what it shows and its draft; a new tab has a name of its own", () => {
  const kept = storage();
  const { tab, id, draft } = loadTab(kept);
  assert.deepEqual([id, draft], [null, ""]);
  assert.notEqual(tab, loadTab(storage()).tab);
  saveTab(kept, { tab, id: "page-1", draft: "half" });
  assert.deepEqual(loadTab(kept), { tab, id: "page-1", draft: "half" });
});

test("an answer that this tab left open is stopped, not failed; one of another tab goes on", () => {
  const kept = storage();
  const talk = talkOf(user("a"), { ...said("so f", "open"), tab: "mine" });
  save(kept, talk);
  const turn = load(kept, talk.id, "mine").turns[1];
  assert.deepEqual([turn.content, turn.state], ["so f", "stopped"]);
  assert.match(turn.note, /^stopped/);
  const theirs = load(kept, talk.id, "other").turns[1];
  assert.deepEqual([theirs.state, theirs.note], ["open", "being answered in another tab"]);
});

test("two tabs that continue one conversation lose neither continuation", () => {
  const kept = storage();
  const talk = talkOf(user("a"), said("b"));
  save(kept, talk);
  const other = load(kept, talk.id, "other");
  talk.turns.push(user("mine"));
  other.turns.push(user("theirs"));
  assert.equal(save(kept, other), true);
  assert.equal(save(kept, talk), true);
  assert.notEqual(talk.id, other.id);
  const last = loadAll(kept, "tab").map(({ turns }) => turns.at(-1).content);
  assert.deepEqual(last.sort(), ["mine", "theirs"]);
});

test("the earlier answer stays if regenerating fails, also after a reload", () => {
  const turn = { ...said("", "open"), earlier: "old", tab: "tab" };
  const kept = storage();
  const talk = talkOf(user("a"), turn);
  save(kept, talk);
  endTurn(turn, "failed", "not reachable");
  assert.deepEqual([turn.content, turn.state], ["old", "failed"]);
  assert.match(turn.note, /^not reachable .* earlier answer$/);
  const again = load(kept, talk.id, "tab").turns[1];
  assert.deepEqual([again.content, again.earlier], ["old", ""]);

  const better = { ...said("new", "open"), earlier: "old" };
  endTurn(better, "done", "");
  assert.deepEqual([better.content, better.note, better.earlier], ["new", "", ""]);
});

test("the number and size of kept conversations is limited: the oldest go", () => {
  const kept = storage();
  for (let index = 0; index < 110; index += 1) save(kept, talkOf(user(`number ${index}`)), index);
  assert.equal(loadAll(kept, "tab").length, 100);
  assert.equal(loadAll(kept, "tab").at(-1).turns[0].content, "number 10");
  const large = ["a", "b", "c"].map((letter) => talkOf(user(letter.repeat(1_500_000))));
  large.forEach((talk, index) => assert.equal(save(kept, talk, 1000 + index), true));
  assert.deepEqual(firsts(kept), ["ccccccccc", "bbbbbbbbb"]);
});

test("a browser with less room keeps less, and a conversation that is too long is reported", () => {
  const kept = storage(300_000);
  const talks = [1, 2, 3, 4].map((index) => talkOf(user(String(index).repeat(100_000))));
  talks.forEach((talk, index) => assert.equal(save(kept, talk, index), true));
  assert.deepEqual(firsts(kept), ["444444444", "333333333"]);
  assert.equal(save(storage(10), talks[3]), false);
  const whole = storage();
  save(whole, talks[0], 1);
  assert.equal(save(whole, talkOf(user("x".repeat(5_000_000))), 2), false);
  assert.deepEqual(firsts(whole), ["111111111"]);
});

test("a conversation is named by its first words, and has the system prompt before its turns", () => {
  const talk = { ...talkOf(user("  how \n much  "), said("", "open")), system: "Be brief." };
  assert.equal(titleOf(talk), "how much");
  assert.equal(titleOf(newTalk()), "New conversation");
  assert.deepEqual(messagesBefore(talk, talk.turns[1]), [
    { role: "system", content: "Be brief." }, { role: "user", content: "  how \n much  " },
  ]);
});

test("the API gets the turns before the answer, without fields of the page", () => {
  const [question, answer] = [user("a", "legal"), said("", "open")];
  const talk = talkOf(question, answer);
  assert.deepEqual(messagesBefore(talk, answer), [{ role: "user", content: "a" }]);
});

test("a question without an answer is dropped before the next question", () => {
  const talk = talkOf(user("a"), said("b"), user("c"), said("", "failed"));
  dropUnanswered(talk);
  assert.deepEqual(talk.turns.map(({ content }) => content), ["a", "b"]);
  dropUnanswered(talk);
  assert.equal(talk.turns.length, 2);
});

test("a divider shows where the app changes within a conversation", () => {
  const turns = [user("a", "legal"), said("b"), user("c", "legal"), said("d"), user("e")];
  const talk = talkOf(...turns, said("f"), user("g", "support"));
  assert.deepEqual(talk.turns.map((turn) => dividerBefore(talk, turn)), [
    null, null, null, null, "No app from here", null, "App from here: support",
  ]);
});

test("each conversation has its own id, which the server accepts", () => {
  assert.match(newTalk().id, /^page-[0-9a-f]{32}$/);
  assert.notEqual(newTalk().id, newTalk().id);
});
