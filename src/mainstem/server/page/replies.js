// Replies of the server: streams of events, and errors.

/** Raised when the server cannot be reached, or the connection breaks. */
export class Unreachable extends Error {}

/** Every `data:` payload of a server-sent event stream, in order, without the final [DONE].
 *  Comments are skipped: the server sends `: ping` while it has no news. Throws Unreachable if the
 *  stream ends without [DONE]. */
export async function* payloads(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await readOrBreak(reader);
    if (done) throw new Unreachable(BROKEN);
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

const BROKEN = "The connection to the server broke before the answer was complete.";

async function readOrBreak(reader) {
  try {
    return await reader.read();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Unreachable(BROKEN); // browsers say "network error"
  }
}

/** fetch, whose error says in words that the server cannot be reached. */
export async function fetchOrSay(path, options) {
  try {
    return await fetch(path, options);
  } catch (error) {
    if (error.name !== "TypeError") throw error; // stopped by the user, or a timeout
    throw new Unreachable("The server cannot be reached. Is it still running?");
  }
}

/** The reason in an error reply, in any of the formats it may have. */
export async function reasonOf(reply) {
  try {
    const body = await reply.json();
    return body.error?.message ?? body.detail ?? `the server answered ${reply.status}`;
  } catch {
    return `the server answered ${reply.status}`;
  }
}
