// Runs: all of them with their state and best numbers; curves of the chosen ones, results, differences of recipes.

import { pageAddress } from "../address.js";
import { get } from "../api.js";
import { chart } from "../charts.js";
import { errorBox, fill, h, put } from "../dom.js";
import { ago, number, plural } from "../format.js";
import { table } from "../table.js";

const STAGE_TITLES = { sft: "SFT", sft_validation: "SFT validation", rl: "RL", rl_validation: "RL validation" };
const MAX_OVERLAID = 16;

function describeProgress(run) {
  const parts = Object.entries(run.progress).map(([stage, [done, planned]]) => `${STAGE_TITLES[stage] ?? stage} ${done}${planned ? ` / ${planned}` : ""}`);
  return parts.join(", ") || "–";
}

function describeNewest(run) {
  const { reward, accuracy, loss } = run.newest;
  if (reward === undefined) return loss === undefined ? "–" : `loss ${number(loss)}`;
  return `reward ${number(reward)}${accuracy === undefined ? "" : `, accuracy ${number(accuracy)}`}`;
}

export async function runsPage({ root, params, replace, isCurrent }) {
  let runs = await get("runs");
  const asked = params.getAll("run").filter((name) => runs.some((run) => run.name === name));
  const chosen = new Set(asked.length ? asked : runs.slice(0, 1).map((run) => run.name));
  const state = {
    stage: params.get("stage") ?? "", weight: Math.min(Math.max(Number(params.get("smooth") ?? 0.6), 0), 0.95) || 0, bands: params.get("bands") === "1", text: params.get("text") ?? "",
    metric: params.get("metric") ?? "",
  };
  const list = h("div"), curves = h("section", { "aria-label": "Curves" }), tables = h("section", { "aria-label": "Results" });
  const search = h("input", { type: "search", placeholder: "Filter runs", "aria-label": "Filter runs", value: state.text, oninput: () => { state.text = search.value; drawList(); remember(); } });
  put(root, h("div", { class: "head" }, h("h1", null, "Runs"), search), list, curves, tables);

  function remember() {
    replace("runs", { run: [...chosen], stage: state.stage, smooth: state.weight, bands: state.bands ? 1 : "", text: state.text, metric: state.metric });
  }

  function drawList() {
    const words = state.text.toLowerCase().split(/\s+/);
    const visible = runs.filter((run) => words.every((word) => run.name.toLowerCase().includes(word)));
    if (!runs.length) {
      fill(list, h("p", { class: "note" }, "No run yet: a run is a folder with a recipe.yaml. saccade demo makes one."));
      return;
    }
    const head = ["", "run", "state", "steps", "newest", "best validation", "episodes", "updated"];
    fill(list, h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Runs" }, h("table", { class: "data list" },
      h("caption", { class: "hidden" }, "Runs"),
      h("thead", null, h("tr", null, head.map((text) => h("th", { scope: "col", class: "text" }, text || h("span", { class: "hidden" }, "shown"))))),
      h("tbody", null, visible.map((run) => h("tr", { "data-row": run.name },
        h("td", null, h("input", { type: "checkbox", "aria-label": `Show the curves of ${run.name}`, checked: chosen.has(run.name), onchange: (event) => choose(run.name, event.target.checked) })),
        h("th", { scope: "row" }, h("a", { href: pageAddress("episodes", { run: run.name }) }, run.name), run.problem ? h("small", { class: "bad" }, ` ${run.problem}`) : null),
        h("td", { class: "text", "data-label": "state" }, h("span", { class: `state ${run.state}` }, run.state)),
        h("td", { class: "text", "data-label": "steps" }, describeProgress(run)),
        h("td", { class: "text", "data-label": "newest" }, describeNewest(run)),
        h("td", { class: "text", "data-label": "best validation" }, run.best ? `${number(run.best[1])} (${run.best[0]}, step ${run.best[2]})` : "–"),
        h("td", { class: "text", "data-label": "episodes" }, run.episodes.toLocaleString("en-US"), run.indexing ? h("small", null, `, reading ${plural(run.indexing, "file")}`) : null),
        h("td", { class: "text", "data-label": "updated" }, ago(run.modified))))))));
  }

  function choose(name, isChosen) {
    if (isChosen) chosen.add(name); else chosen.delete(name);
    remember();
    drawCurves();
    drawTables();
  }

  async function drawCurves() {
    const names = [...chosen].slice(0, MAX_OVERLAID);
    if (!names.length) { fill(curves); return; }
    if (!curves.childElementCount) fill(curves, h("p", { class: "note", role: "status" }, "Loading curves …"));
    let data;
    try {
      data = await get("curves", { run: names, stage: state.stage || "rl", bands: state.bands ? 1 : "" });
      if (!data.panels.length && data.stages.length && !state.stage) {
        state.stage = data.stages[data.stages.length - 1];
        data = await get("curves", { run: names, stage: state.stage, bands: state.bands ? 1 : "" });
      }
    } catch (error) { fill(curves, errorBox(error)); return; }
    if (!isCurrent()) return;
    const stage = state.stage || "rl";
    const tabs = h("div", { class: "tabs", role: "group", "aria-label": "Stage" }, data.stages.map((name) =>
      h("button", { type: "button", "aria-pressed": String(name === stage), onclick: () => { state.stage = name; remember(); drawCurves(); } }, STAGE_TITLES[name] ?? name)));
    const slider = h("input", { type: "range", min: 0, max: 0.95, step: 0.05, value: state.weight, onchange: () => { state.weight = Number(slider.value); remember(); drawCurves(); } });
    const seeds = h("input", { type: "checkbox", checked: state.bands, onchange: () => { state.bands = seeds.checked; remember(); drawCurves(); } });
    const metric = h("input", { type: "search", placeholder: "Filter curves", "aria-label": "Filter curves", value: state.metric, oninput: () => { state.metric = metric.value; remember(); drawCharts(); } });
    const grid = h("div", { class: "charts" });
    const isValidation = stage.endsWith("_validation");
    const drawCharts = () => fill(grid, data.panels.filter((panel) => panel.title.toLowerCase().includes(state.metric.toLowerCase())).map((panel) =>
      chart(panel, { weight: isValidation ? 0 : state.weight, alarms: data.alarms, numRuns: Object.keys(data.families).length })));
    fill(curves, h("h2", null, "Curves"),
      h("div", { class: "controls" }, tabs,
        h("label", null, "Smoothing ", slider), chosen.size > 1 ? h("label", null, seeds, " Mean and interval over seeds") : null, metric),
      chosen.size > MAX_OVERLAID ? h("p", { class: "note" }, `The first ${MAX_OVERLAID} of ${chosen.size} runs are shown.`) : null,
      data.panels.length ? grid : h("p", { class: "note" }, "No metrics yet."));
    drawCharts();
  }

  let tablesSerial = 0;
  let isDrawingTables = false;
  let areTablesStale = false; // since the drawing in progress began: results may take the server minutes

  async function drawTables({ keepsOld = false } = {}) {
    const own = ++tablesSerial;
    isDrawingTables = true;
    areTablesStale = false;
    const target = keepsOld ? h("div") : tables;
    fill(target);
    await putTables(target, () => own === tablesSerial && isCurrent());
    if (own !== tablesSerial || !isCurrent()) return;
    if (target !== tables) fill(tables, ...target.childNodes);
    isDrawingTables = false;
    if (areTablesStale) drawTables({ keepsOld: true });
  }

  async function putTables(tables, isNewest) {
    const names = [...chosen];
    if (names.length > 1) {
      const differences = await get("differences", { run: names }).catch(() => []);
      if (!isNewest()) return;
      if (differences.length) {
        put(tables, h("h2", null, "Differences of the recipes"), table({ title: "Differences of the recipes", header: ["key", ...names], rows: differences.map((row) => [row.key, ...row.values]), bars: [], folded: false }, { caption: false }));
      }
    }
    for (const name of names.slice(0, 4)) {
      const waiting = h("p", { class: "note", role: "status" }, `Computing the results of ${name} …`);
      put(tables, waiting);
      try {
        const data = await get("tables", { run: name });
        if (!isNewest()) return;
        waiting.remove();
        put(tables, h("section", { "aria-label": name },
          data.problems.map(errorBox),
          data.sections.length ? h("h2", null, names.length > 1 ? `${name}: results` : "Results") : null,
          data.sections.map((section) => [h("h3", null, section.title), section.notes.map((note) => h("p", { class: "note" }, note)), h("div", { class: "tables" }, section.tables.map((item) => table(item, { caption: item.title !== section.title })))]),
          h("details", null, h("summary", null, "Versions and times"), h("dl", { class: "facts" }, Object.entries(data.metadata).map(([key, value]) => h("div", null, h("dt", null, key), h("dd", null, value)))))));
      } catch (error) {
        if (!isNewest()) return;
        waiting.replaceWith(errorBox(error));
      }
    }
  }

  drawList();
  drawCurves();
  drawTables();
  return {
    tick: (newer) => {
      const stamp = (items) => JSON.stringify(items.filter((run) => chosen.has(run.name)).map((run) => [run.modified, run.evaluations]));
      const hasChanged = stamp(newer) !== stamp(runs);
      runs = newer;
      if (!list.contains(document.activeElement)) drawList();
      if (hasChanged) drawCurves();
      if (hasChanged && isDrawingTables) areTablesStale = true;
      else if (hasChanged) drawTables({ keepsOld: true });
    },
    redraw: drawCurves,
    keys: { Enter: () => root.querySelector("[data-row].selected a")?.click() },
  };
}
