// Which API keys a browser can send.

/**
 * Why this key cannot be sent, or null when it can. fetch throws for a header value with a
 * character outside Latin-1, a line break or a null character: every request would fail.
 */
export function refusal(key) {
  if (key === "") return "The key is empty.";
  const bad = [...key].find((character) => !/[\x20-\x7e\xa0-\xff]/.test(character));
  if (bad === undefined) return null;
  const code = bad.codePointAt(0).toString(16).toUpperCase().padStart(4, "0");
  const shown = /[\p{L}\p{P}\p{S}]/u.test(bad) ? `\u201c${bad}\u201d (U+${code})` : `U+${code}`;
  return `This key was not used: the character ${shown} cannot be sent in a header. Check what was pasted.`;
}
