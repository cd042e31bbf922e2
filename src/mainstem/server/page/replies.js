// Error replies of the server.

/** The reason in an error reply, in any of the formats it may have. */
export async function reasonOf(reply) {
  try {
    const body = await reply.json();
    return body.error?.message ?? body.detail ?? `the server answered ${reply.status}`;
  } catch {
    return `the server answered ${reply.status}`;
  }
}
