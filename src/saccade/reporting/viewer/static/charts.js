// Curves with uPlot: raw points faintly, a smoothed line, bands of intervals. Charts are drawn when they come into view.

import { h } from "./dom.js";
import { number } from "./format.js";

/* global uPlot */
const NUM_COLORS = 8;
const DASHES = [[], [6, 3], [2, 3], [8, 3, 2, 3]];
const HEIGHT = 190;
const MIN_LABEL_WIDTH = 34; // so that charts beside each other mostly begin at one place
const STEP_INCREMENTS = Array.from({ length: 10 }, (_, power) => [1, 2, 5].map((digit) => digit * 10 ** power)).flat();

export function readColor(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

// A debiased exponential mean: its start isn't pulled to 0.
export function smooth(values, weight) {
  if (!weight) return values;
  let mean = 0, norm = 0;
  return values.map((value) => {
    if (value === null || value === undefined) return value;
    mean = weight * mean + (1 - weight) * value;
    norm = weight * norm + (1 - weight);
    return mean / norm;
  });
}

function withAlpha(color, alpha) {
  const match = /^#(..)(..)(..)$/.exec(color);
  return match ? `rgba(${match.slice(1).map((part) => parseInt(part, 16)).join(",")},${alpha})` : color;
}

function buildOptions(panel, curves, width, weight, alarms) {
  const ink = readColor("--soft"), grid = readColor("--hair");
  const series = [{ label: "step" }], bands = [], data = [];
  for (const curve of curves) {
    const { color, dash } = curve;
    const columns = [curve.x, curve.y];
    const hasBand = Boolean(curve.low);
    if (weight && !hasBand) {
      series.push({ label: `${curve.name} (raw)`, stroke: withAlpha(color, 0.25), width: 1, points: { show: false } });
      columns.push(smooth(curve.y, weight));
    }
    series.push({ label: curve.name, stroke: color, width: 1.8, dash, points: { show: curve.x.length < 40, size: 5, fill: color } });
    if (hasBand) {
      const first = series.length;
      columns.push(curve.high, curve.low);
      series.push({ stroke: withAlpha(color, 0), points: { show: false } }, { stroke: withAlpha(color, 0), points: { show: false } });
      bands.push({ series: [first, first + 1], fill: withAlpha(color, 0.18) });
    }
    data.push(columns);
  }
  const axis = { stroke: ink, grid: { stroke: grid, width: 1 }, ticks: { stroke: grid, width: 1 }, font: "12px system-ui, sans-serif" };
  const options = {
    width, height: HEIGHT, series, bands,
    legend: { show: false },
    cursor: { sync: { key: "steps" }, points: { size: 6 }, drag: { x: true, y: false } },
    scales: { x: { time: false }, y: panel.is_log ? { distr: 3 } : { range: (_, low, high) => findRange(panel, low, high) } },
    axes: [{ ...axis, size: 32, incrs: STEP_INCREMENTS }, { ...axis, grid: { ...axis.grid, filter: panel.is_log ? keepPowers : (_, ticks) => ticks }, size: measureLabels, values: (_, ticks, __, ___, step) => ticks.map((value) => formatTick(value, step)) }],
    hooks: {
      draw: alarms.length ? [(plot) => drawAlarms(plot, alarms)] : [],
    },
  };
  return { options, data: uPlot.join(data) };
}

// The width of an axis: that of its longest label. uPlot asks again with the labels of the width that it got.
function measureLabels(plot, labels, axisNumber, cycle) {
  const axis = plot.axes[axisNumber];
  if (cycle > 1) return axis._size;
  const { ctx } = plot;
  ctx.save();
  ctx.font = axis.font[0];
  const widths = (labels ?? []).map((label) => ctx.measureText(label ?? "").width / devicePixelRatio);
  ctx.restore();
  return Math.ceil(axis.ticks.size + axis.gap + Math.max(MIN_LABEL_WIDTH, ...widths));
}

function findRange(panel, low, high) {
  if (low === null || high === null) return [0, panel.maximum ?? 1];
  if (panel.maximum) return [Math.min(0, low), Math.max(panel.maximum, high)];
  // Values that differ by rounding alone are equal: axes can't resolve them.
  if (high - low <= 1e-9 * Math.max(Math.abs(low), Math.abs(high))) return low >= 0 ? [0, 2 * high || 1] : [2 * low, Math.max(0, high)];
  const margin = (high - low) * 0.07;
  return [low >= 0 && low - margin < 0 ? 0 : low - margin, high + margin];
}

function formatTick(value, step) {
  if (value === null || value === undefined) return "";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e5 || size < 1e-3) return Number(value.toPrecision(2)).toExponential();
  let digits = 0;
  while (digits < 6 && Math.abs(step * 10 ** digits - Math.round(step * 10 ** digits)) > 1e-6) digits++;
  return value.toLocaleString("en-US", { maximumFractionDigits: digits });
}

function keepPowers(_, ticks) {
  return ticks.map((value) => (value > 0 && Math.abs(Math.log10(value) - Math.round(Math.log10(value))) < 1e-6 ? value : null));
}

function drawAlarms(plot, alarms) {
  const { ctx, bbox } = plot;
  ctx.save();
  ctx.strokeStyle = readColor("--bad");
  ctx.setLineDash([3, 4]);
  for (const step of alarms) {
    const x = plot.valToPos(step, "x", true);
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
  }
  ctx.restore();
}

// The line of a curve as a CSS background.
function drawKey({ color, dash }) {
  let at = 0;
  const stops = dash.map((length, index) => `${index % 2 ? "transparent" : color} ${at}px ${at += length}px`);
  return stops.length ? `repeating-linear-gradient(90deg, ${stops.join(", ")})` : color;
}

function describe(curves) {
  return curves.map((curve) => `${curve.name}: ${number(curve.y[curve.y.length - 1])} at step ${curve.x[curve.x.length - 1]}`).join("; ");
}

export function chart(panel, { weight, alarms, numRuns }) {
  const runs = [...new Set(panel.curves.map((curve) => curve.run))];
  const labels = [...new Set(panel.curves.map((curve) => curve.label))];
  const curves = panel.curves.map((curve) => {
    const [main, other] = numRuns > 1 ? [runs.indexOf(curve.run), labels.indexOf(curve.label)] : [labels.indexOf(curve.label), 0];
    const name = numRuns > 1 ? (labels.length > 1 ? `${curve.run}: ${curve.label}` : curve.run) : curve.label;
    return { ...curve, name, color: readColor(`--s${(main % NUM_COLORS) + 1}`), dash: DASHES[other % DASHES.length] };
  });
  const canvas = h("div", { class: "canvas", role: "img", "aria-label": `${panel.title}. ${describe(curves)}` });
  const values = curves.map((curve) => h("b", null, number(curve.y[curve.y.length - 1])));
  const legend = h("ul", { class: "legend" }, curves.map((curve, index) =>
    h("li", null, h("i", { class: "key", style: { background: drawKey(curve) } }), h("span", null, curve.name), " ", values[index])));
  const figure = h("figure", { class: "chart card" },
    h("figcaption", null, panel.title, panel.unit ? h("small", null, ` ${panel.unit}`) : null), canvas, legend);
  let plot = null;
  const draw = () => {
    if (plot || !canvas.clientWidth) return;
    const { options, data } = buildOptions(panel, curves, canvas.clientWidth, weight, alarms);
    options.hooks.setCursor = [(self) => {
      const at = self.cursor.idx;
      curves.forEach((curve, index) => {
        const step = at === null || at === undefined ? null : self.data[0][at];
        const position = step === null ? curve.x.length - 1 : curve.x.indexOf(step);
        if (position >= 0) values[index].textContent = number(curve.y[position]) + (step === null ? "" : ` @ ${step}`);
      });
    }];
    plot = new uPlot(options, data, canvas);
  };
  new IntersectionObserver((entries, observer) => {
    if (entries.some((entry) => entry.isIntersecting)) { observer.disconnect(); draw(); }
  }, { rootMargin: "200px" }).observe(canvas);
  new ResizeObserver(() => {
    if (plot && canvas.clientWidth && plot.width !== canvas.clientWidth) plot.setSize({ width: canvas.clientWidth, height: HEIGHT });
  }).observe(canvas);
  return figure;
}
