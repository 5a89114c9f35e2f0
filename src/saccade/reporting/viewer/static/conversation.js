// A conversation turn by turn: frames, blocks of a reply by their origin, calls side by side, sub-agents folded inside.

import { frameAddress } from "./api.js";
import { h, longText } from "./dom.js";
import { plural, span, time } from "./format.js";

const KIND_TITLES = { think: "reasoning", call: "call", answer: "answer", tag: "", text: "", unmatched_tag: "unmatched tag" };
const SUMMARY_TEXT = 160;

// Frames are small; with `isLarge`, images without a time, such as figures, are large enough to be read.
export function frames(view, numbers, title, isLarge = false) {
  if (!numbers.length) return null;
  return h("div", { class: "frames", role: "list", "aria-label": title }, numbers.map((number) => {
    const image = view.images[number];
    const isFigure = isLarge && image.time === null;
    const address = frameAddress(view.run, view.ref, number, isFigure ? "full" : "thumb");
    const label = `${image.time === null ? image.name : `frame at ${time(image.time)}`}, ${image.size}${image.box ? `, box ${image.box.join(", ")}` : ""}`;
    const picture = address ? h("img", { src: address, alt: label, loading: "lazy", decoding: "async" }) : h("span", { class: "missing" }, "not in this page");
    if (address) picture.addEventListener("error", () => picture.replaceWith(h("span", { class: "missing" }, "not available")));
    return h("span", { role: "listitem" }, h("button", { type: "button", class: isFigure ? "frame figure" : "frame", title: label, onclick: () => view.openFrame(number) }, picture, h("small", null, image.time === null ? "image" : time(image.time))));
  }));
}

// An indented line of code isn't broken after its indentation, which would leave an empty line.
function pieces(items) {
  return h("div", { class: "reply" }, items.map((piece) =>
    h("span", { class: `o-${piece.origin} k-${piece.kind || "text"}${piece.kind === "call" && /\n[ \t]/.test(piece.text) ? " indented" : ""}`, title: [piece.origin, KIND_TITLES[piece.kind]].filter(Boolean).join(", ") }, longText(piece.text))));
}

function describeArguments(call) {
  return h("dl", { class: "arguments" }, Object.entries(call.arguments).map(([name, value]) => [h("dt", null, name), h("dd", null, longText(value, 600))]));
}

// `reply` is the text of the turn if this is its only call: code that stands there isn't repeated.
function callCard(view, call, turn, index, reply) {
  const state = call.ok ? "ok" : call.malformed || call.error ? "failed" : call.executed ? "ok" : "skipped";
  const title = call.window ? span(call.window) : call.name || "a call";
  const seek = call.window && view.seek ? h("button", { type: "button", class: "window", onclick: () => view.seek(call.window[0], turn, index) }, `▶ ${title}`) : h("b", null, title);
  return h("article", { class: `call ${state}`, id: turn === null ? null : `call-${turn}-${index}`, "aria-label": `call ${index + 1}: ${title}` },
    h("header", null, seek, h("small", null, [call.window ? call.name : "", call.is_python_style ? "Python style" : "", call.seconds === null ? "not run" : `${call.seconds.toFixed(2)} s`].filter(Boolean).join(" · "))),
    call.code === null ? describeArguments(call) : reply.includes(call.code) ? null : h("pre", { class: "code", tabindex: "0" }, longText(call.code)),
    call.malformed ? h("p", { class: "bad" }, "malformed: ", longText(call.malformed, 600)) : null,
    call.text ? h("pre", { class: "result o-observation", tabindex: "0" }, longText(call.text)) : null,
    call.error && call.error !== call.malformed ? h("pre", { class: "result bad", tabindex: "0" }, longText(call.error)) : null,
    frames(view, call.images, "Images of the result", true),
    call.child ? subAgent(view, call.child) : null);
}

// A summary is a control, so the rest of a long question is below it.
function subAgent(view, child) {
  const isLong = child.question.length > SUMMARY_TEXT;
  const images = child.prompt.images.length ? `, ${plural(child.prompt.images.length, "frame")}` : null;
  return h("details", { class: "child" },
    h("summary", null, "sub-agent: ", isLong ? `${child.question.slice(0, SUMMARY_TEXT)}…` : child.question, images),
    isLong ? h("p", { class: "question" }, longText(child.question)) : null,
    conversation(view, child, false));
}

export function conversation(view, data, isMain = true) {
  const blocks = [];
  if (data.prompt.images.length || isMain) {
    blocks.push(h("section", { class: "turn", "aria-label": "Prompt" }, h(isMain ? "h3" : "h4", null, "Prompt ", h("small", null, [plural(data.prompt.images.length, "frame"), data.prompt.tokens ? plural(data.prompt.tokens, "token") : ""].filter(Boolean).join(", "))), frames(view, data.prompt.images, "Frames of the prompt")));
  }
  if (data.messages.length && isMain) {
    blocks.push(h("details", null, h("summary", null, "Messages of the chat API"), data.messages.map((message) => h("div", { class: "message" }, h("b", null, message.role), h("pre", { tabindex: "0" }, longText(message.text)), frames(view, message.images, "Images of the message")))));
  }
  data.turns.forEach((turn, number) => {
    const reply = turn.calls.length === 1 ? turn.pieces.map((piece) => piece.text).join("") : "";
    blocks.push(h("section", { class: "turn", id: isMain ? `turn-${number}` : null, "aria-label": `Turn ${number + 1}` },
      isMain ? h("h3", null, `Turn ${number + 1}`, turn.reward === null ? null : h("small", null, ` reward ${turn.reward}`)) : null,
      pieces(turn.pieces),
      turn.calls.length ? h("div", { class: "calls" }, turn.calls.map((call, index) => callCard(view, call, isMain ? number : null, index, reply))) : null));
  });
  if (!data.turns.length) blocks.push(h("p", { class: "note" }, `No turn: the episode ended as ${data.status.replaceAll("_", " ")}.`));
  return h("div", { class: isMain ? "conversation" : "conversation nested" }, blocks);
}
