// Benchmarks of a run: scores with intervals beside published ones, costs, strata, example answers with failures first.

import { pageAddress } from "../address.js";
import { get } from "../api.js";
import { errorBox, h, put } from "../dom.js";
import { table } from "../table.js";
import { chooseRun, runPicker } from "./episodes.js";

export async function benchmarksPage({ root, params, go }) {
  const { runs, name } = await chooseRun(params);
  put(root, h("div", { class: "head" }, h("h1", null, "Benchmarks"), name ? runPicker(runs, name, (run) => go("benchmarks", { run })) : null));
  let data = { overview: [], evaluations: [], notes: [] };
  try { if (name) data = await get("benchmarks", { run: name }); } catch (error) { put(root, errorBox(error)); return {}; }
  if (!data.overview.length) {
    put(root, h("p", { class: "note" }, "This run has no benchmark evaluation; saccade eval RUN --benchmarks NAME makes one."));
    return {};
  }
  put(root, data.notes.map((note) => h("p", { class: "note" }, note)), h("div", { class: "tables" }, data.overview.map((item) => table(item))));
  for (const evaluation of data.evaluations) {
    // The heading has the name that begins the titles.
    const tables = evaluation.tables.map((item) => ({ ...item, title: item.title.replace(`${evaluation.name}, `, "") }));
    const [examples, ...others] = tables.reverse();
    put(root, h("section", { "aria-label": evaluation.name }, h("h2", null, evaluation.name, " ", h("small", null, h("a", { href: pageAddress("episodes", { run: name, stage: evaluation.name, verdict: "wrong" }) }, "its failures"))),
      h("div", { class: "tables" }, others.reverse().map((item) => table(item)), table({ ...examples, folded: false }))));
  }
  return {};
}
