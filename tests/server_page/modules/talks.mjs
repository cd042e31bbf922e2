import assert from "node:assert/strict";
import test from "node:test";

const page = await import(`${process.env.PAGE}/talks.js`);
const { dividerBefore, dropUnanswered, endTurn, load, messagesBefore, newTalk, save } = page;

/** Session storage whose values have at most `room` characters. */
function storage(room = Infinity) {
  const held = new Map();
  return {
    getItem: (name) => held.get(name) ?? null,
    setItem: (name, value) => {
      if (value.length > room) throw new Error("QuotaExceededError");
      held.set(name, value);
    },
  };
}

const user = (content, app = "") => ({ role: "user", content, app });
const said = (content, state = "done") => ({ role: "assistant", content, state, note: "" });
const talkOf = (...turns) => ({ ...newTalk(), turns });

test("saved conversations are loaded again", () => {
  const kept = storage();
  const talks = [talkOf(user("a"), said("b")), talkOf(user("c", "legal"), said("d", "stopped"))];
  assert.equal(save(kept, { talks, talk: talks[1], draft: "half" }), true);
  assert.deepEqual(load(kept), { talks, talk: talks[1], draft: "half" });
});

test("no conversation is loaded from empty storage or from data of another version", () => {
  for (const wrong of [null, "", "{", "[]", '{"talks": [{}]}', '{"talks": []}',
    '{"talks": [{"turns": [{"content": 5}]}]}']) {
    assert.equal(load({ getItem: () => wrong }), null);
  }
});

test("an answer that was open when the page was left is stopped, not failed", () => {
  const kept = storage();
  const talk = talkOf(user("a"), said("so f", "open"));
  save(kept, { talks: [talk], talk, draft: "" });
  const turn = load(kept).talk.turns[1];
  assert.equal(turn.content, "so f");
  assert.equal(turn.state, "stopped");
  assert.match(turn.note, /^stopped/);
});

test("the earlier answer stays if regenerating fails, also after a reload", () => {
  const turn = { ...said("", "open"), earlier: "old" };
  const kept = storage();
  const talk = talkOf(user("a"), turn);
  save(kept, { talks: [talk], talk, draft: "" });
  endTurn(turn, "failed", "not reachable");
  assert.deepEqual([turn.content, turn.state], ["old", "failed"]);
  assert.match(turn.note, /^not reachable .* earlier answer$/);
  assert.deepEqual([load(kept).talk.turns[1].content, load(kept).talk.turns[1].earlier], ["old", ""]);

  const better = { ...said("new", "open"), earlier: "old" };
  endTurn(better, "done", "");
  assert.deepEqual([better.content, better.note, better.earlier], ["new", "", ""]);
});

test("the number and size of kept conversations is limited; the shown one is kept", () => {
  const talks = Array.from({ length: 30 }, (_, index) => talkOf(user(`question ${index}`)));
  const kept = storage();
  assert.equal(save(kept, { talks, talk: talks[29], draft: "" }), true);
  const names = load(kept).talks.map(({ turns }) => turns[0].content);
  assert.equal(names.length, 20);
  assert.deepEqual([names[0], names[18], names[19]], ["question 0", "question 18", "question 29"]);

  const large = talks.slice(0, 4).map(() => talkOf(user("x".repeat(900_000))));
  assert.equal(save(kept, { talks: large, talk: large[2], draft: "" }), true);
  assert.deepEqual(load(kept).talks.map(({ id }) => id), [large[0].id, large[2].id]);
});

test("a browser with less room keeps less", () => {
  const kept = storage(300_000);
  const talks = [1, 2, 3, 4].map(() => talkOf(user("x".repeat(100_000))));
  assert.equal(save(kept, { talks, talk: talks[3], draft: "" }), true);
  assert.deepEqual(load(kept).talks.map(({ id }) => id), [talks[0].id, talks[3].id]);
  assert.equal(save(storage(10), { talks, talk: talks[3], draft: "" }), false);
});

test("a conversation that is too large is reported, and the others are kept", () => {
  const kept = storage();
  const [other, huge] = [talkOf(user("a")), talkOf(user("x".repeat(3_000_000)))];
  assert.equal(save(kept, { talks: [huge, other], talk: huge, draft: "" }), false);
  const { talks, talk } = load(kept);
  assert.deepEqual(talks, [other]);
  assert.deepEqual(talk.turns, []);
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
