// How answers are asked for; kept in this browser.

const NAME = "mainstem-settings";
const FIELDS = ["temperature", "max-tokens", "system"];
const byId = (id) => document.getElementById(id);

/** Fill the fields as they were left; `onSystem` gets the system prompt when it is changed. */
export function startSettings({ onSystem }) {
  const panel = byId("settings");
  const opener = byId("settings-button");

  function open(isOpen) {
    panel.hidden = !isOpen;
    opener.setAttribute("aria-expanded", String(isOpen));
  }

  function restore() {
    try {
      const kept = JSON.parse(localStorage.getItem(NAME)) ?? {};
      for (const id of FIELDS) {
        if (typeof kept[id] === "string") byId(id).value = kept[id];
      }
    } catch {
      // written by another version of this page
    }
  }

  function keep() {
    const values = FIELDS.map((id) => [id, byId(id).value]);
    try {
      localStorage.setItem(NAME, JSON.stringify(Object.fromEntries(values)));
    } catch {
      // no room: the fields keep their values until the tab is closed
    }
  }

  opener.addEventListener("click", () => open(panel.hidden));
  for (const id of FIELDS) byId(id).addEventListener("change", keep);
  byId("system").addEventListener("input", () => onSystem(byId("system").value));
  restore();

  return {
    /** Whether all values may be used; otherwise shows which may not. */
    areValid() {
      const wrong = FIELDS.map(byId).find((field) => !field.checkValidity());
      if (!wrong) return true;
      open(true); // a hidden field cannot show what is wrong
      wrong.reportValidity();
      return false;
    },
    /** The fields of a request. */
    chosen() {
      const temperature = byId("temperature").value; // "": the server's default for the model
      return {
        temperature: temperature === "" ? null : Number(temperature),
        max_tokens: Number(byId("max-tokens").value),
      };
    },
    system: () => byId("system").value,
    setSystem: (text) => { byId("system").value = text; },
  };
}
