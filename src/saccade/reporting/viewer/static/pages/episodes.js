// Episodes of a run: filters, search, sorting; pages of rows from the index.

import { pageAddress } from "../address.js";
import { exported, get } from "../api.js";
import { errorBox, fill, h, put } from "../dom.js";
import { number, plural, truth, verdict, VERDICT_SIGNS } from "../format.js";

export const PAGE = 50; // rows
const PAUSE = 60; // milliseconds without a key before a search
const FACET_TITLES = { stage: "stage or evaluation", status: "status", outcome: "outcome", answer_type: "answer type", source: "data source", environment: "environment", mode: "mode" };
const FIXED = {
  verdict: ["verdict", [["right", "right"], ["wrong", "wrong"], ["failed", "failed"], ["ungraded", "ungraded"]]],
  called: ["tool calls", [["yes", "with a call"], ["no", "without a call"]]],
  errors: ["tool errors", [["yes", "with an error"], ["no", "without an error"]]],
};
const SORTS = [["", "newest step first"], ["reward", "lowest reward first"], ["-reward", "highest reward first"], ["-calls", "most calls first"], ["-tool_errors", "most tool errors first"], ["-sampled_tokens", "most sampled tokens first"], ["-visual_tokens", "most visual tokens first"], ["-seconds", "slowest first"]];
export const FILTERS = [...Object.keys(FACET_TITLES), ...Object.keys(FIXED), "task", "step", "grp", "reward_min", "reward_max", "text", "sort"];

export function readFilters(params) {
  return Object.fromEntries(FILTERS.filter((name) => params.get(name)).map((name) => [name, params.get(name)]));
}

export async function chooseRun(params) {
  const runs = await get("runs");
  const name = params.get("run");
  if (name && !runs.some((run) => run.name === name)) throw new Error(`there is no run ${name}; choose one on the page Runs`);
  return { runs, name: name || (runs.find((run) => run.episodes)?.name ?? runs[0]?.name) };
}

export function runPicker(runs, name, onchange) {
  return h("select", { "aria-label": "Run", onchange: (event) => onchange(event.target.value) },
    runs.map((run) => h("option", { value: run.name, selected: run.name === name }, run.name)));
}

function buildRow(row, address) {
  const kind = verdict(row);
  const place = row.kind === "evaluation" ? row.stage : `${row.stage} ${row.step}, group ${row.grp}`;
  return h("tr", { "data-row": row.ref },
    h("td", null, h("span", { class: `mark ${kind}`, title: kind, role: "img", "aria-label": kind }, VERDICT_SIGNS[kind])),
    h("th", { scope: "row", class: "question" }, exported && !exported.episodes[row.ref] ? row.question || row.task : h("a", { href: address }, row.question || row.task), h("small", null, row.task)),
    h("td", { class: "text", "data-label": "answer" }, row.answer ?? h("i", null, row.status.replaceAll("_", " ")), h("small", null, `of ${truth(row)}`)),
    h("td", { "data-label": "reward" }, number(row.reward)),
    h("td", { "data-label": "calls" }, String(row.calls), row.tool_errors ? h("small", { class: "bad" }, ` ${plural(row.tool_errors, "error")}`) : null),
    h("td", { "data-label": "turns" }, String(row.turns)),
    h("td", { "data-label": "tokens" }, String(row.sampled_tokens), h("small", null, `+ ${row.visual_tokens} visual`)),
    h("td", { class: "text", "data-label": "from" }, place, row.outcome === "scored" || row.outcome === "validation" ? null : h("small", { class: row.outcome === "kept" ? "" : "soft" }, row.reason ? `${row.outcome}: ${row.reason}` : row.outcome)));
}

export async function episodesPage({ root, params, replace, go, isCurrent }) {
  const { runs, name } = await chooseRun(params);
  if (!name) { put(root, h("h1", null, "Episodes"), h("p", { class: "note" }, "No run yet.")); return {}; }
  const filters = readFilters(params);
  let offset = Number(params.get("offset") ?? 0), request = 0, total = 0, count = runs.find((run) => run.name === name).episodes;
  const body = h("tbody"), status = h("p", { class: "note", role: "status" }), pager = h("div", { class: "pager" }), facetBox = h("span", { class: "facets" });
  const search = h("input", { type: "search", placeholder: "Search questions, answers, replies, results", "aria-label": "Search", value: filters.text ?? "" });
  let timer;
  search.addEventListener("input", () => { clearTimeout(timer); timer = setTimeout(() => change("text", search.value), PAUSE); });

  function change(key, value) {
    if (value) filters[key] = value; else delete filters[key];
    offset = 0;
    load();
  }

  function select(key, title, options) {
    return h("label", null, h("span", { class: "hidden" }, title), h("select", { name: key, onchange: (event) => change(key, event.target.value) },
      h("option", { value: "" }, title), options.map(([value, label]) => h("option", { value, selected: filters[key] === value }, label))));
  }

  const reward = ["reward_min", "reward_max"].map((key) => h("input", { type: "number", step: "any", class: "short", placeholder: key === "reward_min" ? "reward ≥" : "reward ≤", "aria-label": key === "reward_min" ? "Least reward" : "Greatest reward", value: filters[key] ?? "", onchange: (event) => change(key, event.target.value) }));
  const sort = h("select", { "aria-label": "Order", onchange: (event) => change("sort", event.target.value) }, SORTS.map(([value, label]) => h("option", { value, selected: (filters.sort ?? "") === value }, label)));
  put(root, 
    h("div", { class: "head" }, h("h1", null, "Episodes"), runPicker(runs, name, (run) => go("episodes", { run }))),
    h("form", { class: "filters", role: "search", onsubmit: (event) => event.preventDefault() }, search, facetBox, Object.entries(FIXED).map(([key, [title, options]]) => select(key, title, options)), reward, sort,
      h("button", { type: "button", onclick: () => go("episodes", { run: name }) }, "Clear")),
    status,
    h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Episodes" }, h("table", { class: "data list episodes" },
      h("caption", { class: "hidden" }, "Episodes"),
      h("thead", null, h("tr", null, [["", "verdict"], ["question"], ["answer"], ["reward"], ["calls"], ["turns"], ["tokens"], ["from"]].map(([text, hidden]) => h("th", { scope: "col", class: ["question", "answer", "from"].includes(text) ? "text" : "" }, text || h("span", { class: "hidden" }, hidden))))), body)),
    pager);

  async function load() {
    const own = ++request;
    replace("episodes", { run: name, ...filters, offset: offset || "" });
    let data;
    try { data = await get("episodes", { run: name, ...filters, offset, limit: PAGE }); } catch (error) { fill(status, errorBox(error)); return; }
    if (own !== request || !isCurrent()) return;
    total = data.total;
    const extra = ["task", "step", "grp"].filter((key) => filters[key]).map((key) => `${key === "grp" ? "group" : key} ${filters[key]}`);
    fill(status, total ? `${plural(total, "episode")}${extra.length ? ` of ${extra.join(", ")}` : ""}` : count ? "No episode passes these filters." : "No episode yet. Training and evaluations write them.");
    fill(body, data.rows.map((row, index) => buildRow(row, pageAddress("episode", { run: name, ref: row.ref, at: offset + index, ...filters }))));
    const pages = Math.ceil(total / PAGE), at = Math.floor(offset / PAGE);
    fill(pager, pages > 1 ? [
      h("button", { type: "button", disabled: at === 0, onclick: () => turn(-1) }, "Previous"),
      h("span", null, `page ${at + 1} of ${pages.toLocaleString("en-US")}`),
      h("button", { type: "button", disabled: at >= pages - 1, onclick: () => turn(1) }, "Next")] : null);
    body.dataset.request = String(own);
  }

  function turn(step) {
    const next = offset + step * PAGE;
    if (next < 0 || next >= total) return;
    offset = next;
    load().then(() => window.scrollTo(0, 0));
  }

  async function loadFacets() {
    const facets = await get("facets", { run: name }).catch(() => ({}));
    fill(facetBox, Object.entries(FACET_TITLES).filter(([key]) => (facets[key] ?? []).length > 1 || filters[key]).map(([key, title]) =>
      select(key, title, (facets[key] ?? []).map(([value, number]) => [value, `${value.replaceAll("_", " ")} (${number.toLocaleString("en-US")})`]))));
  }

  await load();
  loadFacets();
  return {
    tick: (newer) => {
      const episodes = newer.find((run) => run.name === name)?.episodes ?? count;
      if (episodes === count) return;
      count = episodes;
      loadFacets();
      if (!offset && !root.querySelector("[data-row].selected")) load();
    },
    keys: { n: () => turn(1), p: () => turn(-1), Enter: () => root.querySelector("[data-row].selected a")?.click() },
  };
}
