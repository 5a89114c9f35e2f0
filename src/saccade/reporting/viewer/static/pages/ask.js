// Ask a model: drop a video or a picture, ask, watch the calls arrive; then the episode with its frames and time line.

import { buildQuery, get, mediaAddress } from "../api.js";
import { conversation } from "../conversation.js";
import { errorBox, fill, h, longText, put } from "../dom.js";
import { frameDialog } from "./episode.js";
import { timeline } from "../timeline.js";

const ASKED = "(asked)";

async function readLines(response, receive) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    lines.filter(Boolean).forEach((line) => receive(JSON.parse(line)));
  }
}

async function post(path, params, body) {
  const response = await fetch(`${path}?${buildQuery(params)}`, { method: "POST", body });
  if (!response.ok) throw new Error((await response.json().catch(() => ({}))).error ?? `status ${response.status}`);
  return response;
}

// What is known of a running episode: replies, and calls side by side whose results are filled in.
function liveView() {
  const box = h("div", { class: "conversation", "aria-live": "polite" });
  const calls = new Map();
  return {
    box,
    receive: (event) => {
      if (event.event === "turn") put(box, h("h3", null, `Turn ${box.querySelectorAll("h3").length + 1}`));
      if (event.event === "reply") put(box, h("div", { class: "reply o-sampled" }, longText(event.text)));
      if (event.event === "calls") {
        const cards = event.calls.map((text, index) => {
          const result = h("pre", { class: "result", tabindex: "0" }, "…");
          calls.set(`${event.turn}/${index}`, result);
          return h("article", { class: "call skipped" }, longText(text, 300), result);
        });
        put(box, h("div", { class: "calls" }, cards));
      }
      const card = calls.get(`${event.turn}/${event.index}`);
      if (event.event === "result" && card) {
        fill(card, longText(event.text, 600));
        card.parentElement.className = `call ${event.ok ? "ok" : "failed"}`;
      }
    },
  };
}

async function showEpisode(box, ref) {
  const data = await get("asked", { ref });
  const view = { run: ASKED, ref, images: data.images, seek: null, openFrame: (number) => frameDialog(view, number) };
  const side = h("aside", { class: "side", tabindex: "0", "aria-label": "What was asked about" });
  let video = null;
  data.task.media.forEach((media, index) => {
    const address = mediaAddress(ASKED, ref, index);
    if (media.kind === "image") put(side, h("div", { class: "still" }, h("img", { src: address, alt: `the picture ${media.name}` })));
    else {
      const player = h("video", { controls: true, muted: true, playsinline: true, preload: "metadata", src: address, "aria-label": `the video ${media.name}` });
      video ??= player;
      put(side, player);
    }
  });
  const seek = (seconds, turn, call) => {
    if (video) video.currentTime = seconds;
    box.querySelectorAll(".call.current").forEach((element) => element.classList.remove("current"));
    const card = turn === undefined ? null : box.querySelector(`#call-${turn}-${call}`);
    card?.classList.add("current");
  };
  if (video) view.seek = seek;
  if (data.timeline) put(side, timeline(data.timeline, { video, seek }));
  const answer = data.answer === null ? h("i", null, `none: ${data.status.replaceAll("_", " ")}`) : h("b", null, longText(data.answer, 2000));
  fill(box,
    h("h2", null, longText(data.task.question, 600)),
    h("p", { class: "answers" }, h("span", null, "answer ", answer), h("span", { class: "soft" }, Object.entries(data.usage).map(([name, value]) => `${value} ${name}`).join(", "))),
    data.error ? h("p", { class: "error" }, longText(data.error)) : null,
    h("div", { class: "split" }, h("div", { class: "story" }, conversation(view, data.conversation)), side));
}

export async function askPage({ root, isCurrent }) {
  const { ask: model } = await get("settings");
  put(root, h("div", { class: "head" }, h("h1", null, "Ask ", h("small", null, model ?? ""))));
  if (!model) { put(root, h("p", { class: "note" }, "Start the viewer with --ask MODEL to ask a checkpoint or a server.")); return {}; }
  const files = [];
  const input = h("input", { type: "file", multiple: true, accept: "video/*,image/*", "aria-label": "Videos or pictures" });
  const list = h("span", { role: "status" }, "Drop a video or a picture here, or choose one.");
  const drop = h("div", { class: "drop" }, h("p", null, list), input);
  const question = h("textarea", { "aria-label": "Question", placeholder: "What do you want to know?", rows: 2 });
  const button = h("button", { type: "submit" }, "Ask");
  const status = h("p", { class: "note", role: "status" }), result = h("section", { "aria-label": "Answer" });
  const choose = (chosen) => {
    files.splice(0, files.length, ...chosen);
    list.textContent = files.map((file) => file.name).join(", ");
  };
  input.addEventListener("change", () => choose(input.files));
  drop.addEventListener("dragover", (event) => { event.preventDefault(); drop.classList.add("over"); });
  drop.addEventListener("dragleave", () => drop.classList.remove("over"));
  drop.addEventListener("drop", (event) => { event.preventDefault(); drop.classList.remove("over"); input.files = event.dataTransfer.files; choose(input.files); });

  async function submit(event) {
    event.preventDefault();
    if (!files.length || !question.value.trim()) { status.textContent = "Choose a file and write a question."; return; }
    button.disabled = true;
    const live = liveView();
    fill(result, live.box);
    try {
      const numbers = [];
      for (const file of files) {
        status.textContent = `Sending ${file.name} …`;
        numbers.push((await (await post("ask/file", { name: file.name }, file)).json()).number);
      }
      status.textContent = "The model looks …";
      let last = null;
      await readLines(await post("ask/question", { question: question.value, file: numbers }), (item) => { last = item; live.receive(item); });
      if (last?.event !== "done") throw new Error(last?.text ?? "the connection was lost");
      if (isCurrent()) await showEpisode(result, last.ref);
      status.textContent = "";
    } catch (error) {
      status.textContent = "";
      put(result, errorBox(error));
    }
    button.disabled = false;
  }

  put(root, h("form", { onsubmit: submit }, drop, h("p", null, question), button), status, result);
  return {};
}
