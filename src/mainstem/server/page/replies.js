// What a reply of the server says when it is no answer.

/** The reason in an error reply, whatever its shape. */
export async function reasonOf(reply) {
  try {
    const body = await reply.json();
    return body.error?.message ?? body.detail ?? `the server answered ${reply.status}`;
  } catch {
    return `the server answered ${reply.status}`;
  }
}
