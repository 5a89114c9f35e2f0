// An episode token by token, colored by origin or by one of its values.

import { get } from "./api.js";
import { errorBox, fill, h } from "./dom.js";
import { number } from "./format.js";

const MODES = {
  origin: "origin",
  logprob: "logprob: the darker, the less likely",
  entropy: "entropy: the darker, the less certain",
  advantage: "advantage: blue above, orange below 0",
  logprob_diff: "engine–trainer logprob difference: the darker, the larger",
};
const MAX_SPANS = 20000;
const FULL_ENTROPY = 3, FULL_DIFFERENCE = 0.2; // nats of the darkest color

function tint(token, mode) {
  if (mode === "logprob" && token.logprob !== null) return ["warm", 1 - Math.exp(Math.min(token.logprob, 0))];
  if (mode === "entropy" && token.entropy !== null) return ["warm", Math.min(token.entropy / FULL_ENTROPY, 1)];
  if (mode === "logprob_diff" && token.logprob_diff !== null) return ["warm", Math.min(Math.abs(token.logprob_diff) / FULL_DIFFERENCE, 1)];
  if (mode === "advantage" && token.advantage) return [token.advantage > 0 ? "cool" : "warm", Math.min(Math.abs(token.advantage) / 2, 1)];
  return null;
}

function describe(token, segment) {
  const parts = [segment.origin];
  if (token.logprob !== null) parts.push(`p ${number(Math.exp(token.logprob))}`, `logprob ${number(token.logprob)}`);
  if (token.entropy !== null) parts.push(`entropy ${number(token.entropy)}`);
  if (token.logprob_diff !== null) parts.push(`engine–trainer logprob difference ${number(token.logprob_diff)}`);
  if (token.advantage !== null) parts.push(`advantage ${number(token.advantage)}`);
  if (segment.version !== null) parts.push(`weight version ${segment.version}`);
  return parts.join(", ");
}

export function tokenPanel(view) {
  const box = h("div"), status = h("p", { class: "note token-status", role: "status" }, "Point at a token, or move to the first with Tab and on with the arrow keys.");
  const state = { mode: "origin", data: null };
  const details = h("details", { class: "card tokens" }, h("summary", null, "Tokens: logprobs, entropies, advantages, weight versions, engine–trainer gaps"), box);

  function draw() {
    const { conversations, note, error } = state.data;
    if (error) { fill(box, h("p", { class: "note" }, error)); return; }
    const picker = h("select", { "aria-label": "Color tokens by", onchange: (event) => { state.mode = event.target.value; draw(); } }, Object.entries(MODES).map(([name, title]) => h("option", { value: name, selected: name === state.mode }, title)));
    let count = 0;
    fill(box,
      h("div", { class: "controls" }, h("label", null, "Color by ", picker)),
      note ? h("p", { class: "note" }, note) : null,
      status,
      conversations.map((item) => h("section", null, h("h3", null, item.title), item.segments.map((segment) => h("div", { class: `segment o-${segment.origin}` },
        h("small", null, `${segment.origin}, ${segment.tokens} tokens${segment.visual ? ` (${segment.visual} visual)` : ""}${segment.version === null ? "" : `, weight version ${segment.version}`}`),
        h("div", { class: "stream" }, segment.pieces.map((token) => {
          if (token.logprob === null || ++count > MAX_SPANS) return h("span", null, token.text);
          const color = tint(token, state.mode);
          const span = h("span", { class: `token ${color ? color[0] : ""}`, tabindex: count === 1 ? "0" : "-1", style: color ? { "--tint": color[1].toFixed(2) } : {} }, token.text);
          span.token = [token, segment];
          return span;
        })))))));
  }

  const report = (event) => { if (event.target.token) status.textContent = `“${event.target.textContent}”: ${describe(...event.target.token)}`; };
  box.addEventListener("pointerover", report);
  box.addEventListener("focusin", report);
  box.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by || !event.target.token) return;
    const tokens = [...box.querySelectorAll(".token")];
    tokens[tokens.indexOf(event.target) + by]?.focus();
    event.preventDefault();
  });

  async function load() {
    fill(box, h("p", { class: "note", role: "status" }, "Loading …"));
    try { state.data = await get("tokens", { run: view.run, ref: view.ref }); draw(); } catch (error) { fill(box, errorBox(error)); }
  }
  details.addEventListener("toggle", () => { if (details.open && !state.data) load(); });
  return details;
}
