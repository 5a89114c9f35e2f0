// The same tasks under two evaluations or steps: what flipped, right to wrong first, and both episodes side by side.

import { pageAddress } from "../address.js";
import { get } from "../api.js";
import { conversation } from "../conversation.js";
import { errorBox, fill, h, put } from "../dom.js";
import { number, truth, verdict, VERDICT_SIGNS } from "../format.js";
import { table } from "../table.js";

const KINDS = ["right → wrong", "wrong → right", "answer changed"];

async function listSides(runs) {
  const sides = [];
  for (const run of runs) {
    for (const name of run.evaluations) sides.push({ run: run.name, stage: name, step: 0, label: `${run.name}: ${name}` });
    const steps = run.episodes ? await get("steps", { run: run.name }).catch(() => []) : [];
    for (const step of steps.filter((item) => item.stage !== "rl")) sides.push({ run: run.name, stage: step.stage, step: step.step, label: `${run.name}: ${step.stage.replaceAll("_", " ")} after step ${step.step}` });
  }
  return sides;
}

// Words of two texts that are in one of them only, by the longest common subsequence; long texts are left unmarked.
function differingWords(first, second) {
  const [a, b] = [first, second].map((text) => text.split(/(\s+)/));
  if (a.length * b.length > 400000) return null;
  const lengths = Array.from({ length: a.length + 1 }, () => new Uint16Array(b.length + 1));
  for (let i = a.length - 1; i >= 0; i--) for (let j = b.length - 1; j >= 0; j--) lengths[i][j] = a[i] === b[j] ? lengths[i + 1][j + 1] + 1 : Math.max(lengths[i + 1][j], lengths[i][j + 1]);
  const common = [new Set(), new Set()];
  for (let i = 0, j = 0; i < a.length && j < b.length;) {
    if (a[i] === b[j]) { common[0].add(i++); common[1].add(j++); } else if (lengths[i + 1][j] >= lengths[i][j + 1]) i++; else j++;
  }
  return [a, b].map((words, side) => words.map((word, index) => ({ word, isOwn: !common[side].has(index) && word.trim() !== "" })));
}

function replyText(data) {
  return data.conversation.turns.map((turn) => turn.pieces.map((piece) => piece.text).join("")).join("\n");
}

async function showPair(box, pair, sides) {
  fill(box, h("p", { class: "note", role: "status" }, "Loading …"));
  try {
    const data = await Promise.all([pair.before, pair.after].map((row, side) => get("episode", { run: sides[side].run, ref: row.ref })));
    const marked = differingWords(replyText(data[0]), replyText(data[1]));
    fill(box, h("h2", null, pair.before.question || pair.before.task), h("div", { class: "pair" }, data.map((item, side) => {
      const row = [pair.before, pair.after][side];
      const view = { run: sides[side].run, ref: row.ref, images: item.images, seek: null, openFrame: () => { location.hash = pageAddress("episode", { run: sides[side].run, ref: row.ref }).slice(1); } };
      const isDifferent = pair.before.answer !== pair.after.answer;
      return h("section", { class: "card", "aria-label": sides[side].label },
        h("h3", null, h("a", { href: pageAddress("episode", { run: sides[side].run, ref: row.ref }) }, sides[side].label)),
        h("p", { class: "answers" }, h("span", { class: `mark ${verdict(row)}` }, VERDICT_SIGNS[verdict(row)]), h("span", null, "answer ", h(isDifferent ? "mark" : "b", null, row.answer ?? "none")), h("span", null, `of ${truth(row)}`), h("span", null, `reward ${number(row.reward)}`), h("span", null, `${row.calls} calls`)),
        marked ? h("details", { open: true }, h("summary", null, "Replies, differences marked"), h("div", { class: "reply" }, marked[side].map(({ word, isOwn }) => (isOwn ? h("mark", null, word) : word)))) : null,
        conversation(view, item.conversation, false));
    })));
  } catch (error) { fill(box, errorBox(error)); }
}

export async function comparePage({ root, params, go, replace, exported }) {
  const runs = await get("runs");
  const sides = exported?.sides ?? await listSides(runs);
  put(root, h("div", { class: "head" }, h("h1", null, "Compare")));
  if (sides.length < 2) { put(root, h("p", { class: "note" }, "A comparison needs two evaluations or validations.")); return {}; }
  const own = params.get("run");
  const mine = sides.filter((side) => !own || side.run === own);
  const find = (text, other) => {
    const side = text ? sides.find((item) => item.label === text) : other;
    if (!side) throw new Error(`there is no evaluation or validation ${text}; choose two on the page Compare`);
    return side;
  };
  const first = find(params.get("first"), mine[0] ?? sides[0]);
  // By default the last one of the first one's kind, such as greedy.
  const isLike = (side) => side !== first && side.stage.split("_").pop() === first.stage.split("_").pop();
  const second = find(params.get("second"), [...mine].reverse().find(isLike) ?? mine[mine.length - 1] ?? sides[sides.length - 1]);
  const pick = (label, current, key) => h("label", null, `${label} `, h("select", { onchange: (event) => go("compare", { run: own ?? "", first: first.label, second: second.label, [key]: event.target.value }) }, sides.map((side) => h("option", { value: side.label, selected: side === current }, side.label))));
  put(root, h("div", { class: "controls" }, pick("before", first, "first"), pick("after", second, "second"), h("button", { type: "button", onclick: () => go("compare", { run: own ?? "", first: second.label, second: first.label }) }, "Swap")));
  if (first === second) { put(root, h("p", { class: "note" }, "Choose two different ones.")); return {}; }
  const sideParams = { first_run: first.run, first_stage: first.stage, first_step: first.step, second_run: second.run, second_stage: second.stage, second_step: second.step };
  const data = await get("compare", sideParams);
  const isPaired = !first.step && !second.step;
  const tables = h("div", null, isPaired ? h("p", { class: "note", role: "status" }, "Computing the paired difference …") : null);
  if (isPaired) get("paired", sideParams).then((items) => fill(tables, items.map((item) => table(item)))).catch((error) => fill(tables, errorBox(error)));
  const state = { kind: params.get("kind") ?? "" };
  const body = h("tbody"), detail = h("tr", { class: "detail" }, h("td", { class: "text", colspan: 5, "aria-live": "polite" }));
  const tabs = h("div", { class: "tabs", role: "group", "aria-label": "Kind of change" });
  const list = h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Changes" }, h("table", { class: "data list" }, h("caption", { class: "hidden" }, "Changes"), h("thead", null, h("tr", null, ["change", "question", "ground truth", "before", "after"].map((text) => h("th", { scope: "col", class: "text" }, text)))), body));
  const draw = () => {
    fill(tabs, ["", ...KINDS].map((kind) => h("button", { type: "button", "aria-pressed": String(state.kind === kind), onclick: () => { state.kind = kind; replace("compare", { run: own, first: first.label, second: second.label, kind }); draw(); } }, kind ? `${kind} (${data.counts[kind]})` : "all changes")));
    const pairs = data.pairs.filter((pair) => !state.kind || pair.kind === state.kind);
    list.hidden = !pairs.length;
    fill(body, pairs.map((pair) => {
      const open = () => {
        const isOpen = row.classList.contains("open");
        root.querySelectorAll("tr.open").forEach((other) => other.classList.remove("open"));
        detail.remove();
        if (isOpen) return;
        row.classList.add("open");
        row.after(detail);
        showPair(detail.firstChild, pair, [first, second]);
      };
      const row = h("tr", { "data-row": pair.before.ref },
        h("td", { class: "text", "data-label": "change" }, h("span", { class: `change ${pair.kind.startsWith("right") ? "worse" : pair.kind.startsWith("wrong") ? "better" : ""}` }, pair.kind)),
        h("th", { scope: "row", class: "question" }, h("button", { type: "button", class: "link", onclick: open }, pair.before.question || pair.before.task), h("small", null, pair.before.task)),
        h("td", { class: "text", "data-label": "ground truth" }, truth(pair.before)),
        h("td", { class: "text", "data-label": "before" }, pair.before.answer ?? "–", h("small", null, `${pair.before.calls} calls`)),
        h("td", { class: "text", "data-label": "after" }, pair.after.answer ?? "–", h("small", null, `${pair.after.calls} calls`)));
      return row;
    }));
  };
  draw();
  put(root, 
    tables,
    h("p", { class: "note", role: "status" }, `${data.shared} episodes of the same task and sample in both; ${data.only_first} only before, ${data.only_second} only after; ${data.counts.same} unchanged.`),
    tabs,
    list);
  return { keys: { Enter: () => root.querySelector("[data-row].selected button.link")?.click() } };
}
