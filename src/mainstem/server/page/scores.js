// How likely choices are: the body of a request to /v1/score, and its reply in words.

import { count } from "./numbers.js";

const decimals = new Intl.NumberFormat("en", {
  minimumFractionDigits: 2,
  maximumFractionDigits: 2,
  signDisplay: "negative", // no -0.00
});

/** One choice per line, with its spaces; blank lines are left out. */
const choicesOf = (lines) => lines.split(/\r?\n/).filter((line) => line.trim() !== "");

export function scoreBody(context, lines, app) {
  return { prompt: context, choices: choicesOf(lines), ...(app && { app }) };
}

/** 93.4 %; 0 % and 100 % only for exactly 0 and 1. */
export function probabilityWords(share) {
  if (share === 0 || share === 1) return `${share * 100} %`;
  if (share < 0.0005) return "< 0.1 %";
  if (share >= 0.9995) return "> 99.9 %";
  return `${(share * 100).toFixed(1)} %`;
}

/** A row for each choice, in the order of the request. */
export function scoreRows({ choices, best }) {
  return choices.map(({ index, text, probability, logprob, token_ids: ids }) => ({
    text,
    share: probability,
    probability: probabilityWords(probability),
    logprob: logprob === null ? "-\u221e" : decimals.format(logprob),
    tokens: count(ids.length),
    isBest: index === best,
  }));
}

/** How much of the request was found in the cache; "" when the reply does not report it. */
export function usageWords(usage) {
  const cached = usage?.prompt_tokens_details?.cached_tokens;
  if (cached === undefined) return "";
  return `${count(cached)} of ${count(usage.prompt_tokens)} tokens cached`;
}
