// The router: `#/page?parameters`. Each page returns what `tick` does while it is shown, what `redraw` draws in the
// colors of another theme, and its own keys.

import { pageAddress } from "./address.js";
import { abandonRequests, exported, get } from "./api.js";
import { errorBox, fill, h } from "./dom.js";
import { askPage } from "./pages/ask.js";
import { benchmarksPage } from "./pages/benchmarks.js";
import { comparePage } from "./pages/compare.js";
import { episodePage } from "./pages/episode.js";
import { episodesPage } from "./pages/episodes.js";
import { runsPage } from "./pages/runs.js";
import { stepPage } from "./pages/step.js";

const TICK_MILLISECONDS = 3000;
const PAGES = {
  runs: { title: "Runs", show: runsPage },
  episodes: { title: "Episodes", show: episodesPage },
  step: { title: "Steps", show: stepPage },
  compare: { title: "Compare", show: comparePage },
  benchmarks: { title: "Benchmarks", show: benchmarksPage },
  episode: { title: "Episode", show: episodePage, isHidden: true },
  ask: { title: "Ask", show: askPage, isHidden: true },
};
const HELP = [
  ["j / k", "next / previous row"], ["Enter", "open the row"], ["n / p", "next / previous episode or step"],
  ["/", "search"], ["Space", "play or pause the video"], ["r e s c b", "pages: runs, episodes, steps, compare, benchmarks"],
  ["?", "this list"], ["Esc", "close"],
];
const SHORTCUTS = { r: "runs", e: "episodes", s: "step", c: "compare", b: "benchmarks" };

const main = document.getElementById("content");
const bar = document.querySelector("header.bar");
let shown = { keys: {}, tick: null };
let serial = 0;
if (!exported) get("settings").then(({ ask }) => { if (ask) { PAGES.ask.isHidden = false; show(); } }).catch(() => {});

function readAddress() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  return { name: PAGES[path] ? path : "runs", params: new URLSearchParams(query ?? "") };
}

function drawBar(name, params) {
  const run = params.get("run");
  const keep = run ? { run } : {};
  const links = Object.entries(PAGES).filter(([, page]) => !page.isHidden).map(([key, page]) =>
    h("a", { href: pageAddress(key, keep), "aria-current": key === name || (key === "episodes" && name === "episode") ? "page" : null }, page.title));
  fill(bar,
    h("a", { class: "brand", href: "#/runs" }, "Saccade"),
    h("nav", { "aria-label": "Pages" }, links),
    h("span", { class: "tools" },
      h("button", { type: "button", class: "plain", "aria-label": "Keyboard shortcuts", onclick: showHelp }, "?"),
      h("button", { type: "button", class: "plain", "aria-label": "Switch between light and dark", onclick: switchTheme }, "◐")));
}

function switchTheme() {
  const isDark = document.documentElement.dataset.theme
    ? document.documentElement.dataset.theme === "dark"
    : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = isDark ? "light" : "dark";
  try { localStorage.setItem("saccade-theme", document.documentElement.dataset.theme); } catch { /* disabled */ }
  shown.redraw?.();
}

function showHelp() {
  const dialog = h("dialog", { class: "help", "aria-label": "Keyboard shortcuts" },
    h("h2", null, "Keyboard"),
    h("dl", null, HELP.map(([keys, text]) => [h("dt", null, keys), h("dd", null, text)])),
    h("button", { type: "button", onclick: () => dialog.close() }, "Close"));
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
}

// While a page loads, its keys aren't known: what is pressed takes effect when it is shown.
function waitForKeys(pressed) {
  return { keys: {}, tick: null, pressed };
}

function go(page, values) {
  const before = location.hash;
  location.hash = pageAddress(page, values).slice(1);
  if (location.hash !== before) shown = waitForKeys([]);
}

async function show() {
  const { name, params } = readAddress();
  const own = ++serial;
  abandonRequests();
  const pressed = shown.pressed ?? [];
  shown = waitForKeys(pressed);
  drawBar(name, params);
  document.title = `${PAGES[name].title} · Saccade`;
  const root = h("div", { class: `page page-${name}` });
  const context = {
    root, params, exported,
    isCurrent: () => own === serial,
    go,
    replace: (page, values) => { history.replaceState(null, "", pageAddress(page, values)); },
  };
  try {
    const page = await PAGES[name].show(context);
    if (own !== serial) return;
    shown = { keys: {}, tick: null, ...page };
    fill(main, exported ? h("p", { class: "note" }, exported.note) : null, root);
    for (const key of pressed) shown.keys[key]?.();
  } catch (error) {
    if (own === serial) fill(main, errorBox(error));
  }
  if (own === serial) { main.dataset.ready = String(own); window.scrollTo(0, 0); }
}

function listRows() {
  return [...main.querySelectorAll("[data-row]")].filter((row) => row.offsetParent !== null);
}

function moveRow(step) {
  const rows = listRows();
  if (!rows.length) return;
  const at = rows.findIndex((row) => row.classList.contains("selected"));
  const next = rows[Math.min(Math.max(at + step, 0), rows.length - 1)];
  rows.forEach((row) => row.classList.remove("selected"));
  next.classList.add("selected");
  next.scrollIntoView({ block: "nearest" });
  (next.querySelector("a") ?? next).focus({ preventScroll: true });
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const isTyping = event.target.closest?.("input, select, textarea");
  if (isTyping) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  const own = shown.keys[event.key];
  if (own) { event.preventDefault(); own(); return; }
  if (event.key === "j") moveRow(1);
  else if (event.key === "k") moveRow(-1);
  else if (event.key === "/") { event.preventDefault(); main.querySelector("input[type=search]")?.focus(); }
  else if (event.key === "?") showHelp();
  else if (SHORTCUTS[event.key]) {
    const run = readAddress().params.get("run");
    location.hash = pageAddress(SHORTCUTS[event.key], run ? { run } : {}).slice(1);
  } else shown.pressed?.push(event.key);
});

async function tick() {
  if (!document.hidden && shown.tick && !exported) {
    const own = serial;
    try {
      const runs = await get("runs");
      if (own === serial) await shown.tick(runs);
    } catch { /* the server was stopped: the page stays as it is */ }
  }
  setTimeout(tick, TICK_MILLISECONDS);
}

window.addEventListener("hashchange", show);
window.addEventListener("unhandledrejection", (event) => { if (event.reason?.name === "AbortError") event.preventDefault(); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => shown.redraw?.());
// A file that is dropped beside its box must not replace the page.
for (const name of ["dragover", "drop"]) {
  window.addEventListener(name, (event) => { if (event.dataTransfer?.types.includes("Files")) event.preventDefault(); });
}
show();
setTimeout(tick, TICK_MILLISECONDS);
