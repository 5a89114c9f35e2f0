// Addresses of pages.

import { buildQuery } from "./api.js";

export function pageAddress(name, params = {}) {
  const text = buildQuery(params);
  return `#/${name}${text ? `?${text}` : ""}`;
}
