// The server's metrics as text. A link alone would carry no key.

import { copyButton } from "./copy.js";
import { reasonOf } from "./replies.js";

const byId = (id) => document.getElementById(id);

export function startMetrics(server) {
  const dialog = byId("metrics");
  const shown = byId("metrics-text");

  async function show() {
    shown.textContent = "reading\u2026";
    dialog.showModal();
    try {
      const reply = await server.ask("/metrics");
      shown.textContent = reply.ok ? await reply.text() : await reasonOf(reply);
    } catch (error) {
      if (error instanceof server.KeyNeeded) dialog.close(); // the field for the key is below it
      shown.textContent = error.message;
    }
  }

  byId("metrics-open").addEventListener("click", show);
  byId("metrics-close").addEventListener("click", () => dialog.close());
  byId("metrics-close").before(copyButton(() => shown.textContent, "Copy metrics"));
}
