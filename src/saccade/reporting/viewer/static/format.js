// Format numbers, durations and verdicts.

export function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (Math.abs(value) < 1e-12) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-3) return value.toExponential(2);
  const shown = Number.isInteger(value) ? 0 : size >= 100 ? 1 : digits;
  return value.toLocaleString("en-US", { minimumFractionDigits: shown, maximumFractionDigits: shown });
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 60) return `${value.toFixed(1)} s`;
  const minutes = Math.floor(value / 60);
  return minutes < 60 ? `${minutes} min ${Math.round(value % 60)} s` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

export function time(value) {
  return value === null || value === undefined ? "" : `${Number(value.toFixed(2))} s`;
}

export function span([start, end]) {
  return `${Number(start.toFixed(2))} – ${time(end)}`;
}

export function ago(timestamp) {
  const passed = Date.now() / 1000 - timestamp;
  if (passed < 90) return "now";
  if (passed < 5400) return `${Math.round(passed / 60)} min ago`;
  if (passed < 129600) return `${Math.round(passed / 3600)} h ago`;
  return `${Math.round(passed / 86400)} days ago`;
}

export function verdict(row) {
  if (row.error) return "failed";
  if (row.correct === null || row.correct === undefined) return "ungraded";
  return row.correct >= 0.5 ? "right" : "wrong";
}

export const VERDICT_SIGNS = { right: "✓", wrong: "✗", failed: "!", ungraded: "?" };

export function truth(row) {
  try {
    const value = JSON.parse(row.ground_truth);
    return Array.isArray(value) ? value.map((item) => number(item)).join("–") : String(value);
  } catch {
    return row.ground_truth;
  }
}

export function plural(count, noun) {
  return `${count.toLocaleString("en-US")} ${noun}${count === 1 ? "" : "s"}`;
}
