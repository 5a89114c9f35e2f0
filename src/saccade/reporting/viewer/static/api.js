// Requests to the server; an exported page answers them from the data that it contains.

async function readExport() {
  const holder = document.getElementById("data");
  if (!holder) return null;
  const bytes = Uint8Array.from(atob(holder.textContent), (character) => character.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
}

export const exported = await readExport();

function listPairs(params) {
  const pairs = Object.entries(params ?? {}).flatMap(([name, value]) => (Array.isArray(value) ? value : [value]).map((item) => [name, item]));
  return pairs.filter(([, item]) => item !== undefined && item !== null && item !== "");
}

export function buildQuery(params) {
  return new URLSearchParams(listPairs(params)).toString();
}

// A browser opens six connections to a server: those of a page that was left must not delay the next page.
let leaving = new AbortController();

export function abandonRequests() {
  leaving.abort();
  leaving = new AbortController();
}

export async function get(name, params = {}) {
  if (exported) return answerExported(name, params);
  const response = await fetch(`api/${name}?${buildQuery(params)}`, { signal: name === "settings" ? null : leaving.signal });
  const value = await response.json().catch((error) => {
    if (error.name === "AbortError") throw error;
    return { error: `the server answered with status ${response.status}` };
  });
  if (!response.ok) throw new Error(value.error ?? `status ${response.status}`);
  return value;
}

export function frameAddress(run, ref, image, size = "thumb") {
  if (exported) {
    const frame = exported.episodes[ref]?.frames[image] ?? null;
    return frame === null ? null : `data:image/jpeg;base64,${exported.frames[frame]}`;
  }
  return `frame?${buildQuery({ run, ref, image, size })}`;
}

export function mediaAddress(run, ref, number) {
  return exported ? null : `media?${buildQuery({ run, ref, number })}`;
}

const VERDICTS = {
  right: (row) => row.correct >= 0.5 && row.correct !== null,
  wrong: (row) => row.correct !== null && row.correct < 0.5,
  ungraded: (row) => row.correct === null,
  failed: (row) => row.error !== null,
};

function passes(row, filters) {
  const same = ["stage", "status", "outcome", "answer_type", "source", "environment", "mode", "task", "step", "grp"];
  if (same.some((name) => filters[name] && String(row[name]) !== String(filters[name]))) return false;
  if (VERDICTS[filters.verdict] && !VERDICTS[filters.verdict](row)) return false;
  if (filters.reward_min && !(row.reward >= Number(filters.reward_min))) return false;
  if (filters.reward_max && !(row.reward <= Number(filters.reward_max))) return false;
  if (filters.errors && (row.tool_errors > 0) !== (filters.errors === "yes")) return false;
  if (filters.called && (row.calls > 0) !== (filters.called === "yes")) return false;
  const text = [row.task, row.question, row.answer, row.ground_truth].join(" ").toLowerCase();
  return (filters.text ?? "").toLowerCase().split(/\s+/).every((word) => text.includes(word));
}

function answerExported(name, params) {
  const { rows } = exported;
  if (name === "episodes") {
    let found = rows.filter((row) => passes(row, params));
    const key = (params.sort ?? "").replace("-", "");
    if (key) {
      const sign = params.sort.startsWith("-") ? -1 : 1;
      found = [...found].sort((a, b) => sign * ((a[key] ?? 0) - (b[key] ?? 0)));
    }
    const start = Number(params.offset ?? 0);
    return { total: found.length, rows: found.slice(start, start + Number(params.limit ?? 100)) };
  }
  if (name === "position") {
    const position = rows.filter((row) => passes(row, params)).findIndex((row) => row.ref === params.ref);
    return { position: position < 0 ? null : position };
  }
  if (name === "step") {
    const own = rows.filter((row) => row.kind === "rollout" && row.stage === params.stage && row.step === Number(params.step));
    return own.sort((a, b) => a.grp - b.grp || a.idx - b.idx);
  }
  const value = name === "episode" ? exported.episodes[params.ref] : exported.answers[[name, ...listPairs(params).map((pair) => pair.join("="))].join("\n")];
  if (value === undefined) throw new Error("This exported page doesn't contain that; open the run with saccade view.");
  return value;
}
