// Buttons that copy text.

const SHOWN_MS = 1500;

/** Put text on the clipboard; returns whether that worked. */
async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copyBySelection(text); // over plain HTTP there is no navigator.clipboard
  }
}

function copyBySelection(text) {
  const focused = document.activeElement;
  const field = document.createElement("textarea");
  field.className = "unseen";
  field.readOnly = true;
  field.value = text;
  document.body.append(field);
  field.select();
  try {
    return document.execCommand("copy");
  } finally {
    field.remove();
    focused?.focus();
  }
}

/** A button that copies what `text()` returns at the click, and says whether that worked. */
export function copyButton(text, label) {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "copy";
  button.textContent = "Copy";
  button.setAttribute("aria-label", label);
  button.addEventListener("click", async () => {
    const outcome = (await copyText(text())) ? "Copied" : "Not copied";
    button.textContent = outcome;
    document.getElementById("announce").textContent = outcome;
    setTimeout(() => { button.textContent = "Copy"; }, SHOWN_MS);
  });
  return button;
}
