// Replies of the server: streams of events, and errors.

/** Every `data:` payload of a server-sent event stream, in order, without the final [DONE].
 *  Comments are skipped: the server sends `: ping` while it has no news. */
export async function* payloads(body) {
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

/** The reason in an error reply, in any of the formats it may have. */
export async function reasonOf(reply) {
  try {
    const body = await reply.json();
    return body.error?.message ?? body.detail ?? `the server answered ${reply.status}`;
  } catch {
    return `the server answered ${reply.status}`;
  }
}
