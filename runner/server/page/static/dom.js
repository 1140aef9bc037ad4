// Makes elements. Data becomes text, never markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "on") for (const [event, run] of Object.entries(value)) node.addEventListener(event, run);
    else if (value !== null && value !== undefined && value !== false)
      node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

export const el = (name, attributes = {}, ...children) => fill(document.createElement(name), attributes, children);
export const svg = (name, attributes = {}, ...children) =>
  fill(document.createElementNS(SVG, name), attributes, children);
export const $ = (id) => document.getElementById(id);

/** Sets the text of a node, only if it is another one: what has not changed is not read aloud again. */
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

const whole = new Intl.NumberFormat("en");

export const count = (n) => whole.format(Math.round(n));
export const share = (part, all) =>
  all > 0 ? `${((100 * part) / all).toFixed(part === all || part === 0 ? 0 : 1)}\u00a0%` : "–";

export function rate(n) {
  if (n >= 100 || n === 0) return count(n);
  return n >= 10 ? n.toFixed(1) : n >= 0.005 ? n.toFixed(2) : "0";
}

export function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  for (; n >= 1024 && at < units.length - 1; at++) n /= 1024;
  return `${at && n < 10 ? n.toFixed(1) : Math.round(n)} ${units[at]}`;
}

export function seconds(s) {
  if (s === null || s === undefined) return "–";
  if (s < 0.01) return `${(s * 1000).toFixed(1)} ms`;
  if (s < 1) return `${Math.round(s * 1000)} ms`;
  return s < 100 ? `${s.toFixed(1)} s` : `${Math.floor(s / 60)} min ${Math.round(s % 60)} s`;
}

/** Rows of a table body by key: rows that stay keep their node, and with it the focus. */
export function reconcile(body, items, keyOf, make, update) {
  const known = new Map([...body.children].map((row) => [row.dataset.key, row]));
  let at = body.firstElementChild;
  for (const item of items) {
    const key = keyOf(item);
    let row = known.get(key);
    known.delete(key);
    if (!row) {
      row = make(item);
      row.dataset.key = key;
    }
    if (row === at) at = at.nextElementSibling;
    else body.insertBefore(row, at);
    update(row, item);
  }
  for (const row of known.values()) row.remove();
}
