// Puts the page together: key, theme, the two sides.

import { Api } from "./api.js";
import { Chat } from "./chat.js";
import { byId, setText } from "./dom.js";
import { MemoryView } from "./memory.js";
import { Traffic } from "./traffic.js";

const THEMES = ["auto", "light", "dark"];
const narrow = matchMedia("(max-width: 860px)");

// ---------------------------------------------------------------- the key

/**
 * @param {boolean} rejected  a key was given before
 * @returns {Promise<string | null>}
 */
function askForKey(rejected) {
  const dialog = /** @type {HTMLDialogElement} */ (byId("key-dialog"));
  const input = byId("key");
  setText(byId("key-note"), rejected ? "The server did not accept that key." : "");
  input.value = "";
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener(
      "close",
      () => resolve(dialog.returnValue === "given" ? input.value.trim() || null : null),
      { once: true },
    );
  });
}

byId("key-form").addEventListener("submit", (/** @type {Event} */ event) => {
  event.preventDefault(); // nothing is sent from here: the key goes into a header
  byId("key-dialog").close("given");
});
byId("key-cancel").addEventListener("click", () => byId("key-dialog").close());

const api = new Api(askForKey, (known) => (byId("forget-key").hidden = !known));
byId("forget-key").addEventListener("click", () => {
  api.forgetKey();
  location.reload(); // nothing of what was read with it stays
});

// ---------------------------------------------------------------- the two sides

const memory = new MemoryView(api);
const chat = new Chat(api, (id, active) => memory.setOwn(id, active));
new Traffic(api);

/** @param {"chat" | "memory"} name */
function showSide(name) {
  for (const side of /** @type {const} */ (["chat", "memory"])) {
    const tab = byId(`tab-${side}`);
    tab.setAttribute("aria-selected", String(side === name));
    tab.tabIndex = side === name ? 0 : -1;
    byId(side).classList.toggle("shown", side === name);
  }
  watchOrNot();
}

function watchOrNot() {
  const seen = !narrow.matches || byId("memory").classList.contains("shown");
  memory.setVisible(seen && !document.hidden);
}

for (const side of /** @type {const} */ (["chat", "memory"])) {
  const tab = byId(`tab-${side}`);
  tab.addEventListener("click", () => showSide(side));
  tab.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => {
    if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
    const other = side === "chat" ? "memory" : "chat";
    showSide(other);
    byId(`tab-${other}`).focus();
  });
}
narrow.addEventListener("change", watchOrNot);
document.addEventListener("visibilitychange", watchOrNot);

// ---------------------------------------------------------------- the theme

function currentTheme() {
  return document.documentElement.dataset.theme ?? "auto";
}

function showTheme() {
  const theme = currentTheme();
  setText(byId("theme-name"), theme);
  byId("theme").setAttribute("aria-label", `Theme: ${theme}. Change it.`);
  memory.restyle();
}

byId("theme").addEventListener("click", () => {
  const theme = THEMES[(THEMES.indexOf(currentTheme()) + 1) % THEMES.length];
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  try {
    localStorage.setItem("jaxpaged-theme", theme);
  } catch {
    // It then lasts until the page is loaded again.
  }
  showTheme();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", showTheme);

// ---------------------------------------------------------------- start

showTheme();
showSide("chat");
if (!narrow.matches) byId("prompt").focus();
chat.loadModels();
