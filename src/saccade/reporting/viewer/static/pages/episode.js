// One episode: the video with its windows, the conversation turn by turn, the reward's parts, every token on demand.

import { pageAddress } from "../address.js";
import { exported, frameAddress, get, mediaAddress } from "../api.js";
import { conversation } from "../conversation.js";
import { fill, h, longText, put } from "../dom.js";
import { number, time, verdict, VERDICT_SIGNS } from "../format.js";
import { timeline } from "../timeline.js";
import { tokenPanel } from "../tokens.js";
import { PAGE, readFilters } from "./episodes.js";

// The text of the option that a letter names.
function nameOption(task) {
  const option = /^[A-Z]$/.test(task.ground_truth) ? task.options["ABCDEFGHIJKLMNOPQRSTUVWXYZ".indexOf(task.ground_truth)] : undefined;
  return option === undefined ? null : [" (", longText(option, 200), ")"];
}

function scoreTable(data) {
  const { score, weights } = data;
  if (!score) return h("p", { class: "note" }, data.reason ? `No score: ${data.reason}` : "No score.");
  const rows = Object.entries(score.parts).flatMap(([name, value]) => [
    h("tr", { class: score.reasons[name] ? "explained" : null }, h("th", { scope: "row" }, name.replaceAll("_", " ")), h("td", null, number(value)), h("td", null, name in weights ? `× ${number(weights[name])}` : "")),
    score.reasons[name] ? h("tr", { class: "reason" }, h("td", { class: "text", colspan: 3 }, longText(score.reasons[name], 400))) : null,
  ].filter(Boolean));
  rows.push(...score.credits.map((credit) => h("tr", null, h("th", { scope: "row" }, `credit, ${credit.span}`), h("td", null, number(credit.value)), h("td"))));
  return h("table", { class: "data score" }, h("caption", null, "Reward ", h("b", null, number(score.value)), score.correct === null ? "" : `, correctness ${number(score.correct)}`), h("tbody", null, rows));
}

export function frameDialog(view, number) {
  const image = view.images[number];
  const address = frameAddress(view.run, view.ref, number, "full");
  const picture = address ? h("img", { src: address, alt: "", class: "full" }) : h("p", { class: "note" }, "The frame isn't in this page.");
  const dialog = h("dialog", { class: "lightbox", "aria-label": "Frame" },
    picture,
    h("p", null, [image.time === null ? image.name : `frame at ${time(image.time)}`, `${image.size} pixels as the model saw it`, image.box ? `box ${image.box.join(", ")}` : ""].filter(Boolean).join(" · ")),
    h("div", { class: "controls" },
      h("button", { type: "button", onclick: () => step(-1) }, "Previous"), h("button", { type: "button", onclick: () => step(1) }, "Next"),
      view.seek && image.time !== null ? h("button", { type: "button", onclick: () => { dialog.close(); view.seek(image.time); } }, "Show in the video") : null,
      h("button", { type: "button", onclick: () => dialog.close() }, "Close")));
  const step = (by) => { const next = number + by; if (view.images[next]) { dialog.close(); frameDialog(view, next); } };
  dialog.addEventListener("keydown", (event) => {
    event.stopPropagation();
    if (event.key === "n" || event.key === "ArrowRight") step(1);
    if (event.key === "p" || event.key === "ArrowLeft") step(-1);
  });
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
}

function imageStage(view, data, index) {
  const picture = h("img", { src: mediaAddress(view.run, view.ref, index), alt: `the task's image ${data.task.media[index].name}` });
  const boxes = h("div", { class: "boxes", "aria-hidden": "true" });
  picture.addEventListener("load", () => {
    const { naturalWidth: width, naturalHeight: height } = picture;
    const draw = ([left, top, right, bottom], kind, title) => h("i", { class: kind, title, style: { left: `${(left / width) * 100}%`, top: `${(top / height) * 100}%`, width: `${((right - left) / width) * 100}%`, height: `${((bottom - top) / height) * 100}%` } });
    fill(boxes,
      data.evidence_boxes.map((box) => draw(box, "need", "must be seen to answer")),
      data.images.filter((image) => image.box && image.name === data.task.media[index].name).map(({ box }) => draw(box, "look", "shown to the model")));
  });
  return h("div", { class: "still" }, picture, boxes);
}

export async function episodePage({ root, params, go }) {
  const run = params.get("run"), ref = params.get("ref"), filters = readFilters(params);
  const data = await get("episode", { run, ref });
  const { row, task } = data;
  const kind = verdict(row);
  const view = { run, ref, images: data.images, seek: null, openFrame: (number) => frameDialog(view, number) };
  const side = h("aside", { class: "side", tabindex: "0", "aria-label": "Video and score" });
  let video = null;
  task.media.forEach((media, index) => {
    const address = mediaAddress(run, ref, index);
    if (!media.exists || !address) {
      put(side, h("p", { class: "note" }, exported ? `${media.name} isn't part of an exported page.` : `${media.name} is missing.`));
    } else if (media.kind === "image") put(side, imageStage(view, data, index));
    else if (!video) {
      video = h("video", { controls: true, muted: true, playsinline: true, preload: "metadata", src: address, "aria-label": `the video ${media.name}` });
      put(side, video);
    } else put(side, h("video", { controls: true, muted: true, preload: "none", src: address, "aria-label": `the video ${media.name}` }));
  });
  const mark = (turn, call) => {
    root.querySelectorAll(".call.current").forEach((element) => element.classList.remove("current"));
    const card = turn === undefined || turn === null ? null : root.querySelector(`#call-${turn}-${call}`);
    card?.classList.add("current");
    return card;
  };
  if (video) view.seek = (seconds, turn, call) => { video.currentTime = seconds; mark(turn, call); };
  if (data.timeline) {
    put(side, timeline(data.timeline, { video, seek: (seconds, turn, call) => {
      if (video) video.currentTime = seconds;
      mark(turn, call)?.scrollIntoView({ block: "nearest", behavior: "smooth" });
    } }));
  }
  put(side, h("div", { class: "card" }, scoreTable(data)));
  put(side, h("div", { class: "card" }, h("dl", { class: "facts" },
    Object.entries({ status: data.status.replaceAll("_", " "), outcome: data.reason ? `${data.outcome}: ${data.reason}` : data.outcome, environment: data.environment, frames: data.frame_budget ?? "–", "weight version": row.version ?? "–", ...data.usage }).map(([name, value]) => h("div", null, h("dt", null, name), h("dd", null, String(value)))))));
  if (Object.keys(task.extras).length) {
    put(side, h("details", null, h("summary", null, "Further fields of the row"), h("dl", { class: "arguments" }, Object.entries(task.extras).map(([name, value]) => [h("dt", null, name), h("dd", null, longText(value, 300))]))));
  }
  const place = row.kind === "evaluation" ? row.stage : `${row.stage}, step ${row.step}, group ${row.grp}, episode ${row.idx}`;
  const at = /^\d+$/.test(params.get("at")) ? params.get("at") : null;
  const isRollout = row.kind === "rollout";
  const back = pageAddress("episodes", { run, ...filters, offset: at ? Math.floor(at / PAGE) * PAGE || "" : "" });
  put(root, 
    h("p", { class: "crumbs" }, h("a", { href: back }, run), " › ", isRollout ? h("a", { href: pageAddress("step", { run, stage: row.stage, step: row.step }) }, place) : h("a", { href: pageAddress("episodes", { run, stage: row.stage }) }, place),
      h("span", { class: "turning" }, h("button", { type: "button", onclick: () => turn(-1) }, "← Previous"), h("button", { type: "button", onclick: () => turn(1) }, "Next →"))),
    h("h1", { class: "question" }, h("span", { class: `mark ${kind}`, role: "img", "aria-label": kind }, VERDICT_SIGNS[kind]), " ", longText(task.question, 1200)),
    task.options.length ? h("ol", { class: "options" }, task.options.map((option) => h("li", null, longText(option, 400)))) : null,
    h("p", { class: "answers" }, h("span", null, "answer ", h("b", { class: kind }, data.answer === null ? "none" : longText(data.answer, 600))), h("span", null, "ground truth ", h("b", null, longText(task.ground_truth, 600)), nameOption(task)), h("span", { class: "soft" }, task.answer_type), h("a", { href: pageAddress("episodes", { run, task: task.id }) }, "all episodes of this task")),
    data.error ? h("p", { class: "error" }, longText(data.error)) : null,
    h("p", { class: "legend", "aria-label": "Colors" }, h("span", { class: "o-prefill" }, "prefilled"), h("span", { class: "o-sampled" }, "sampled"), h("span", { class: "o-observation" }, "observed")),
    h("div", { class: "split" }, h("div", { class: "story" }, conversation(view, data.conversation), exported ? null : tokenPanel(view)), side));

  async function turn(by) {
    let position = at === null ? null : Number(at), own = filters;
    if (position === null) {
      own = isRollout ? { stage: row.stage, step: row.step } : { stage: row.stage };
      position = (await get("position", { run, ref, ...own })).position;
    }
    if (position === null || position + by < 0) return;
    const { rows } = await get("episodes", { run, ...own, offset: position + by, limit: 1 });
    if (rows.length) go("episode", { run, ref: rows[0].ref, at: position + by, ...own });
  }
  return { keys: { n: () => turn(1), p: () => turn(-1), " ": () => { if (video) { if (video.paused) video.play(); else video.pause(); } } } };
}
