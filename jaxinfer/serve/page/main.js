// Puts the page together: theme, side panel, API key, status and chat.

import { apiKey } from "./api.js";
import { Chat } from "./chat.js";
import { byId } from "./dom.js";
import { Settings } from "./settings.js";
import { Status } from "./status.js";

const THEME = "jaxinfer.theme";

function startTheme() {
  const chosen = localStorage.getItem(THEME);
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
  byId("theme").addEventListener("click", () => {
    const dark = matchMedia("(prefers-color-scheme: dark)").matches;
    const now = document.documentElement.dataset.theme ?? (dark ? "dark" : "light");
    const next = now === "dark" ? "light" : "dark";
    document.documentElement.dataset.theme = next;
    localStorage.setItem(THEME, next);
  });
}

function startPanel() {
  const toggle = byId("panel-toggle");
  toggle.addEventListener("click", () => {
    const open = document.body.classList.toggle("panel-open");
    toggle.setAttribute("aria-expanded", String(open));
  });
}

// Asks for a key once, however many requests were refused; each goes on when there is one.
function startKeys() {
  const dialog = byId("key-dialog");
  let waiting = [];
  byId("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    apiKey.set(byId("key").value.trim());
    dialog.close();
    const resumed = waiting;
    waiting = [];
    for (const resume of resumed) resume();
  });
  byId("key-cancel").addEventListener("click", () => dialog.close());
  return (resume) => {
    if (apiKey.get()) byId("key-note").textContent = "The server refused the key that it was given.";
    waiting.push(resume);
    if (!dialog.open) dialog.showModal();
  };
}

startTheme();
startPanel();
const onRefused = startKeys();
new Status({ onRefused });
new Chat({ settings: new Settings(), onRefused });
byId("prompt").focus();
