// Build elements. Every text becomes a text node, so no text of a model or a file is ever parsed as HTML.

export function h(tag, props, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "class") element.className = value;
    else if (name === "text") element.textContent = value;
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, item] of Object.entries(value)) element.style.setProperty(key, item);
    else if (name === "value" || name === "checked" || name === "disabled" || name === "open") element[name] = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  append(element, children);
  return element;
}

function append(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child === undefined || child === null || child === false) continue;
    element.append(child instanceof Node ? child : String(child));
  }
}

export function put(element, ...children) {
  append(element, children);
  return element;
}

export function fill(element, ...children) {
  element.replaceChildren();
  append(element, children);
  return element;
}

const LONG_TEXT = 4000;

// A text node, or its start with a button that shows the rest: a megabyte in one line is slow to lay out.
export function longText(text, limit = LONG_TEXT) {
  if (text.length <= limit) return document.createTextNode(text);
  const start = document.createTextNode(text.slice(0, limit));
  const button = h("button", { type: "button", class: "more" }, `… show all ${text.length.toLocaleString("en-US")} characters`);
  button.addEventListener("click", () => { start.data = text; button.remove(); });
  return h("span", null, start, button);
}

export function errorBox(error) {
  if (error?.name === "AbortError") return null; // the page was left
  return h("p", { class: "error", role: "alert" }, error?.message ?? String(error));
}
