// Tables of the server: texts, and bars of numbers with their intervals.

import { h } from "./dom.js";

const NUMBER = /^[^A-Za-z]{0,40}( s)?$/;
const ESTIMATE = /^([+-]?\d[\d.]*) (\[[^\]]*\])(.*)$/s;

function isNumber(text) {
  return NUMBER.test(text) || ESTIMATE.test(text);
}

function cellContent(text) {
  const match = ESTIMATE.exec(text);
  return match ? [h("b", null, match[1]), " ", h("small", null, match[2]), match[3]] : text;
}

function bar(item) {
  const percent = (value) => `${Math.min(Math.max(value / item.maximum, 0), 1) * 100}%`;
  const width = `${Math.max(0, Math.min(item.high / item.maximum, 1) - Math.max(item.low / item.maximum, 0)) * 100}%`;
  return h("span", { class: "track" },
    h("i", { style: { left: percent(item.low), width } }),
    h("b", { style: { left: percent(item.value) } }),
    item.marks.map(([label, value]) => h("u", { title: label, style: { left: percent(value) } })));
}

export function table(data, { caption = true } = {}) {
  if (!data.rows.length) return null;
  const bars = data.bars.length === data.rows.length ? data.bars : null;
  const isNumeric = data.header.map((_, index) => index > 0 && data.rows.every((row) => isNumber(row[index] ?? "")));
  const isBroad = data.header.length > 4 || data.rows.some((row) => row.some((text) => text.length > 120));
  const head = data.header.map((text, index) => h("th", { scope: "col", class: index ? (isNumeric[index] ? "" : "text") : "left" }, text || h("span", { class: "hidden" }, "name")));
  if (bars) head.splice(1, 0, h("th", { scope: "col", class: "wide" }, h("span", { class: "scale" }, h("span", null, "0"), h("span", null, String(bars[0].maximum)))));
  const body = data.rows.map((row, rowIndex) => {
    const cells = row.map((text, index) => index
      ? h("td", { class: isNumeric[index] ? "" : "text", "data-label": data.header[index] ?? "" }, cellContent(text))
      : h("th", { scope: "row" }, text));
    if (bars) cells.splice(1, 0, h("td", { class: "wide", "data-label": "" }, bar(bars[rowIndex])));
    return h("tr", null, cells);
  });
  const element = h("div", { class: isBroad ? "scroll broad" : "scroll", tabindex: "0", role: "region", "aria-label": data.title },
    h("table", { class: "data" }, caption ? h("caption", null, data.title) : null, h("thead", null, h("tr", null, head)), h("tbody", null, body)));
  return data.folded ? h("details", { class: "broad" }, h("summary", null, data.title), element) : element;
}
