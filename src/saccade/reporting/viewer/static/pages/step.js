// A step's groups as rows: the rewards of their episodes, spread, what became of them and why, advantages.

import { pageAddress } from "../address.js";
import { get } from "../api.js";
import { fill, h, put } from "../dom.js";
import { number, plural, verdict } from "../format.js";
import { chooseRun, runPicker } from "./episodes.js";

function mean(values) { return values.reduce((sum, value) => sum + value, 0) / values.length; }

function groupRows(rows) {
  const groups = new Map();
  for (const row of rows) {
    const key = `${row.mode}\n${row.grp}`;
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key).push(row);
  }
  return [...groups.values()];
}

function chips(run, members, advantages, [low, high]) {
  return h("span", { class: "chips" }, members.map((row) => {
    const share = row.reward === null || high <= low ? 0 : (row.reward - low) / (high - low);
    const advantage = advantages[row.ref];
    const label = `episode ${row.idx}: reward ${number(row.reward)}, ${verdict(row)}, ${row.outcome}${row.reason ? ` (${row.reason})` : ""}${advantage === undefined ? "" : `, advantage ${number(advantage)}`}`;
    return h("a", { class: `chip ${row.outcome === "kept" || row.outcome === "validation" ? "" : "dropped"} ${verdict(row)}`, href: pageAddress("episode", { run, ref: row.ref }), title: label },
      h("span", { class: "hidden" }, `${label}; `),
      h("span", { class: "fill", style: { height: `${(share * 100).toFixed(0)}%` } }), h("span", { class: "value" }, number(row.reward, 2)), advantage === undefined ? null : h("small", { class: advantage < 0 ? "negative" : "" }, `${advantage > 0 ? "+" : ""}${advantage.toFixed(2)}`));
  }));
}

export async function stepPage({ root, params, go, isCurrent }) {
  const { runs, name } = await chooseRun(params);
  put(root, h("div", { class: "head" }, h("h1", null, "Steps"), name ? runPicker(runs, name, (run) => go("step", { run })) : null));
  const steps = name ? await get("steps", { run: name }) : [];
  if (!steps.length) {
    put(root, h("p", { class: "note" }, "No episodes of steps on disk: RL and validations write them to episodes/."));
    return {};
  }
  const last = steps.filter((step) => step.stage === "rl").pop() ?? steps[steps.length - 1];
  const stage = params.get("stage") ?? last.stage;
  const own = steps.filter((step) => step.stage === stage);
  const wanted = Number(params.get("step") ?? own[own.length - 1]?.step);
  const at = own.findIndex((step) => step.step === wanted);
  if (at < 0) throw new Error(`${name} has no episodes of ${own.length ? `step ${params.get("step")}` : `the stage ${stage}`}`);
  const step = own[at];
  const open = (values) => go("step", { run: name, stage, ...values });
  const stages = [...new Set(steps.map((item) => item.stage))];
  const turn = (by) => { if (own[at + by]) open({ step: own[at + by].step }); };
  put(root, h("div", { class: "controls" },
    stages.length > 1 ? h("select", { "aria-label": "Stage", onchange: (event) => go("step", { run: name, stage: event.target.value }) }, stages.map((item) => h("option", { value: item, selected: item === stage }, item.replaceAll("_", " ")))) : null,
    h("button", { type: "button", disabled: !own[at - 1], onclick: () => turn(-1) }, "← Previous"),
    h("select", { "aria-label": "Step", onchange: (event) => open({ step: event.target.value }) }, own.map((item) => h("option", { value: item.step, selected: item.step === step.step }, `step ${item.step}`))),
    h("button", { type: "button", disabled: !own[at + 1], onclick: () => turn(1) }, "Next →"),
    h("a", { href: pageAddress("episodes", { run: name, stage, step: step.step }) }, "as a list of episodes")));
  const rows = await get("step", { run: name, stage, step: step.step });
  const rewards = rows.map((row) => row.reward).filter((value) => value !== null);
  const range = [Math.min(0, ...rewards), Math.max(...rewards, 1e-9)];
  const groups = groupRows(rows);
  const kept = rows.filter((row) => row.outcome === "kept").length;
  const reasons = new Map();
  for (const row of rows) if (row.outcome !== "kept" && row.outcome !== "validation") { const key = row.reason ? `${row.outcome}: ${row.reason}` : row.outcome; reasons.set(key, (reasons.get(key) ?? 0) + 1); }
  const body = h("tbody");
  const draw = (advantages) => fill(body, groups.map((members) => {
    const values = members.map((row) => row.reward).filter((value) => value !== null);
    const spread = values.length ? Math.sqrt(mean(values.map((value) => (value - mean(values)) ** 2))) : null;
    const fates = new Map();
    for (const row of members) { const key = row.reason ? `${row.outcome}: ${row.reason}` : row.outcome; fates.set(key, (fates.get(key) ?? 0) + 1); }
    const [first] = members;
    return h("tr", { "data-row": `${first.mode}${first.grp}` },
      h("th", { scope: "row", class: "question" }, h("a", { href: pageAddress("episodes", { run: name, stage, step: step.step, grp: first.grp, mode: first.mode }) }, first.question || first.task), h("small", null, `group ${first.grp}${first.mode ? `, ${first.mode}` : ""}, ${first.frame_budget === null ? "" : `${first.frame_budget} frames, `}${first.task}`)),
      h("td", { class: "text", "data-label": "rewards" }, chips(name, members, advantages, range)),
      h("td", { "data-label": "mean" }, values.length ? number(mean(values)) : "–"),
      h("td", { "data-label": "spread" }, number(spread)),
      h("td", { class: "text", "data-label": "outcome" }, [...fates].map(([fate, count]) => h("span", { class: `fate ${fate.split(":")[0]}` }, `${count} ${fate}`))));
  }));
  const note = h("p", { class: "note", role: "status" });
  put(root,
    h("p", { class: "note", role: "status" }, `${plural(groups.length, "group")}, ${plural(rows.length, "episode")}${stage === "rl" ? `, ${kept} kept` : ""}${reasons.size ? `; ${[...reasons].map(([reason, count]) => `${count} ${reason}`).join(", ")}` : ""}`),
    h("p", { class: "legend" }, h("span", null, "A box per episode: its height is the reward, its border the verdict, the signed number the advantage; faint boxes weren't trained on.")),
    note,
    h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Groups" }, h("table", { class: "data list" },
      h("caption", { class: "hidden" }, "Groups"),
      h("thead", null, h("tr", null, [["task", "text"], ["rewards and advantages", "text"], ["mean"], ["spread"], ["outcome", "text"]].map(([text, kind]) => h("th", { scope: "col", class: kind ?? "" }, text)))), body)));
  draw({});
  if (stage === "rl") get("advantages", { run: name, stage, step: step.step }).then((advantages) => { if (isCurrent()) draw(advantages); }).catch((error) => put(note, `Advantages can't be shown: ${error.message}`));
  return {
    keys: { n: () => turn(1), p: () => turn(-1), Enter: () => root.querySelector("[data-row].selected a")?.click() },
  };
}
