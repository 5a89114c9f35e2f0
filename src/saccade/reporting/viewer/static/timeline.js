// The time line of a video: frames of the prompt, windows of calls, events, the spans that must be seen, a playhead.

import { h } from "./dom.js";
import { time } from "./format.js";

export function timeline(data, { seek, video }) {
  const percent = (value) => `${Math.min(Math.max(value / data.seconds, 0), 1) * 100}%`;
  const span = (item) => ({ left: percent(item.start), width: `${Math.max((Math.min(item.end, data.seconds) - Math.max(item.start, 0)) / data.seconds, 0) * 100}%` });
  const label = (item) => `${time(item.start)} – ${time(item.end)}`;
  const playhead = h("i", { class: "playhead" });
  const lane = (title, items) => h("div", { class: "lane-row" }, h("span", { class: "lane-title" }, title), h("div", { class: "lane", onclick: (event) => {
    if (event.target !== event.currentTarget) return;
    const box = event.currentTarget.getBoundingClientRect();
    seek(((event.clientX - box.left) / box.width) * data.seconds);
  } }, items));
  const turns = [...new Set(data.windows.map((item) => item.turn))];
  const rows = [
    lane("frames", data.frames.map((at) => h("button", { type: "button", class: "tick", title: `frame at ${time(at)}`, "aria-label": `Seek to the frame at ${time(at)}`, style: { left: percent(at) }, onclick: () => seek(at) }))),
    ...turns.map((turn) => lane(turns.length > 1 ? `turn ${turn + 1}` : "calls", data.windows.filter((item) => item.turn === turn).map((item) =>
      h("button", { type: "button", class: `window ${item.ok ? "" : "failed"}`, "data-start": item.start, title: `call ${item.call + 1} of turn ${item.turn + 1}: ${label(item)}${item.ok ? "" : ", failed"}`, "aria-label": `Seek to the window ${label(item)} of turn ${item.turn + 1}`, style: span(item), onclick: () => seek(item.start, item.turn, item.call) })))),
  ];
  if (turns.length && data.windows.some((item) => item.frames.length)) {
    rows.push(lane("crops", data.windows.flatMap((item) => item.frames.map((at) => h("i", { class: "tick soft", title: `frame of a call at ${time(at)}`, style: { left: percent(at) } })))));
  }
  if (data.events.length) rows.push(lane("events", data.events.map((item) => h("i", { class: "event", title: item.label, style: { ...span(item), ...(item.color ? { background: item.color } : {}) } }))));
  if (data.evidence.length) rows.push(lane("needed", data.evidence.map((item) => h("i", { class: "need", title: `must be seen to answer: ${label(item)}`, style: span(item) }))));
  if (data.ground_truth) rows.push(lane("truth", [h("i", { class: "need", title: `ground truth: ${time(data.ground_truth[0])} – ${time(data.ground_truth[1])}`, style: span({ start: data.ground_truth[0], end: data.ground_truth[1] }) })]));
  const cover = h("div", { class: "cover", "aria-hidden": "true" }, playhead);
  const clock = h("span", null, `at ${time(0)}`);
  if (video) {
    video.addEventListener("timeupdate", () => {
      playhead.style.left = percent(video.currentTime);
      clock.textContent = `at ${time(video.currentTime)}`;
    });
  }
  return h("div", { class: "timeline" }, h("div", { class: "lanes" }, rows, cover), h("p", { class: "lane-scale" }, h("span", null, "0 s"), video ? clock : null, h("span", null, time(data.seconds))));
}
