import assert from "node:assert/strict";
import test from "node:test";

const { probabilityWords, scoreBody, scoreRows, usageWords } = await import(
  `${process.env.PAGE}/scores.js`
);

test("each line is a choice, with its spaces; blank lines are not", () => {
  const body = scoreBody("The sky is ", " blue\r\n\n  \n green \n", "");
  assert.deepEqual(body, { prompt: "The sky is ", choices: [" blue", " green "] });
  assert.equal(scoreBody("a", "b", "legal").app, "legal");
});

test("only 0 and 1 are shown as 0 % and 100 %", () => {
  const shown = [0, 1e-9, 0.0005, 0.934, 0.9994, 0.9999, 1].map(probabilityWords);
  const words = ["0 %", "< 0.1 %", "0.1 %", "93.4 %", "99.9 %", "> 99.9 %", "100 %"];
  assert.deepEqual(shown, words);
});

test("rows keep the order of the choices and mark the likeliest", () => {
  const choices = [
    { index: 0, text: " a", probability: 0.1, logprob: -3.4567, token_ids: [1, 2] },
    { index: 1, text: " b", probability: 0.9, logprob: -0.001, token_ids: [3] },
    { index: 2, text: " c", probability: 0, logprob: null, token_ids: [4] }, // JSON has no -inf
  ];
  const rows = scoreRows({ choices, best: 1 });
  assert.deepEqual(rows.map((row) => row.isBest), [false, true, false]);
  assert.deepEqual(rows.map((row) => row.logprob), ["-3.46", "0.00", "-\u221e"]);
  assert.deepEqual(rows[0], {
    text: " a", share: 0.1, probability: "10.0 %", logprob: "-3.46", tokens: "2", isBest: false,
  });
});

test("cached tokens are shown if the reply has them", () => {
  const usage = { prompt_tokens: 1571, prompt_tokens_details: { cached_tokens: 1536 } };
  assert.equal(usageWords(usage), "1,536 of 1,571 tokens cached");
  assert.equal(usageWords({ prompt_tokens: 3 }), "");
  assert.equal(usageWords(undefined), "");
});
