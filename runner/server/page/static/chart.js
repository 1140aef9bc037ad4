// Pictures of numbers over time, as SVG by hand; each has its numbers as a table beside it.

import { el, svg, say, count } from "./dom.js";

const HEIGHT = 96;
const GAP_MS = 5000;

/** Patterns for what colour alone should not tell; once for the whole page. */
export function patterns() {
  const stripe = (id, cls, path) =>
    svg(
      "pattern",
      { id, class: cls, width: 6, height: 6, patternUnits: "userSpaceOnUse" },
      svg("rect", { width: 6, height: 6 }),
      svg("path", { d: path }),
    );
  const up = "M-1 1 1 -1M0 6 6 0M5 7 7 5",
    down = "M-1 5 1 7M0 0 6 6M5 -1 7 1";
  return svg(
    "svg",
    { class: "patterns", "aria-hidden": "true", width: 0, height: 0 },
    svg(
      "defs",
      {},
      ...["device", "host"].flatMap((tier) => [
        stripe(`loading-${tier}`, tier, down),
        stripe(`fenced-${tier}`, tier, up),
      ]),
      stripe("quarantined", "bad", `${up}${down}`),
      stripe("lent", "none", "M2 3h2"),
    ),
  );
}

const runs = (times) => {
  const found = [];
  let start = 0;
  for (let i = 1; i <= times.length; i++) {
    if (i === times.length || times[i] - times[i - 1] > GAP_MS) {
      found.push([start, i]);
      start = i;
    }
  }
  return found;
};

export class Chart {
  /**
   * series: {key, label, cls, fill}. stacked: areas on each other, else lines. steps: a value is of the time since the
   * one before it.
   */
  constructor({ title, series, stacked = false, steps = false, format = count, unit = "" }) {
    Object.assign(this, { title, series, stacked, steps, format, unit });
    this.paths = series.map((one) =>
      svg("path", { class: `${stacked ? "area" : "line"} ${one.cls}`, fill: one.fill ?? null }),
    );
    this.svg = svg(
      "svg",
      { role: "img", "aria-label": title, height: HEIGHT },
      svg("path", { class: "axis", d: `M0 ${HEIGHT - 0.5}H10000` }),
      ...this.paths,
    );
    this.most = el("span", { class: "most" });
    this.values = el("p", { class: "values" });
    this.from = el("span");
    this.rows = series.map((one) => [1, 2, 3, 4].map(() => el("td")));
    this.table = el(
      "details",
      { on: { toggle: () => this.fillTable() } },
      el("summary", {}, "As a table", el("span", { class: "hidden" }, `: ${title}`)),
      el(
        "table",
        {},
        el(
          "thead",
          {},
          el("tr", {}, ...["", "now", "mean", "least", "most"].map((h) => el("th", { scope: "col" }, h))),
        ),
        el(
          "tbody",
          {},
          ...series.map((one, i) => el("tr", {}, el("th", { scope: "row" }, one.label), ...this.rows[i])),
        ),
      ),
    );
    this.node = el(
      "figure",
      {},
      el("figcaption", {}, el("span", { class: "title" }, title), this.most),
      this.svg,
      el("div", { class: "times", "aria-hidden": "true" }, this.from, el("span", {}, "now")),
      this.values,
      this.table,
    );
  }

  /** times: ms; columns: by series, numbers or null; most: the top, if it is known. */
  update(times, columns, windowS, most = 0) {
    this.columns = columns;
    const sums = this.stacked ? this.stack(columns) : columns;
    const top = most || nice(Math.max(1e-9, ...sums.flat().filter((v) => v !== null)));
    const width = this.svg.clientWidth || 300,
      end = times.at(-1) ?? 0;
    this.svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    const x = (i) => (width * (1 - (end - times[i]) / (windowS * 1000))).toFixed(1);
    const y = (v) => (HEIGHT - 1 - (HEIGHT - 2) * Math.min(1, v / top)).toFixed(1);
    const parts = runs(times);
    this.paths.forEach((path, k) =>
      path.setAttribute(
        "d",
        this.stacked ? area(parts, x, y, sums[k], sums[k - 1], this.steps) : line(parts, x, y, sums[k]),
      ),
    );
    say(this.most, `${this.format(top)}${this.unit}`);
    say(this.from, windowS < 60 || windowS % 60 ? `${windowS} s ago` : `${windowS / 60} min ago`);
    const now = this.series.map((one, k) => [one.label, columns[k].at(-1) ?? 0]);
    const told =
      now
        .filter(([, n]) => n > 0)
        .map(([label, n]) => `${label} ${this.format(n)}`)
        .join(", ") || "nothing";
    this.svg.setAttribute("aria-label", `${this.title}, now: ${told}${this.unit}`);
    this.fillTable();
  }

  stack(columns) {
    const sums = [];
    columns.forEach((column, k) => sums.push(column.map((v, i) => (v ?? 0) + (k ? sums[k - 1][i] : 0))));
    return sums;
  }

  fillTable() {
    if (!this.table.open || !this.columns) return;
    this.columns.forEach((column, k) => {
      const known = column.filter((v) => v !== null),
        all = known.length || 1;
      const numbers = [
        known.at(-1) ?? 0,
        known.reduce((a, b) => a + b, 0) / all,
        Math.min(...known),
        Math.max(...known),
      ];
      numbers.forEach((n, i) => say(this.rows[k][i], known.length ? this.format(n) : "–"));
    });
  }
}

function area(parts, x, y, tops, bottoms, steps) {
  let d = "";
  for (const [start, end] of parts) {
    if (end - start < 2) continue;
    let up = "",
      down = "",
      is = false;
    for (let i = start; i < end; i++) {
      const low = bottoms ? bottoms[i] : 0;
      is ||= tops[i] > low;
      if (steps && i > start) {
        up += `L${x(i - 1)} ${y(tops[i])}`;
        down = `L${x(i - 1)} ${y(low)}${down}`;
      }
      up += `${i > start ? "L" : "M"}${x(i)} ${y(tops[i])}`;
      down = `L${x(i)} ${y(low)}${down}`;
    }
    if (is) d += `${up}${down}Z`;
  }
  return d;
}

function line(parts, x, y, values) {
  let d = "";
  for (const [start, end] of parts) {
    let pen = "M";
    for (let i = start; i < end; i++) {
      if (values[i] === null) {
        pen = "M";
        continue;
      }
      d += `${pen}${x(i)} ${y(values[i])}`;
      pen = "L";
    }
  }
  return d;
}

function nice(n) {
  const step = 10 ** Math.floor(Math.log10(n));
  return [1, 2, 5, 10].map((m) => m * step).find((m) => m >= n) ?? n;
}

export const SOURCES = [
  ["device", "device"],
  ["host", "host"],
  ["remote", "remote"],
  ["computed", "computed"],
];

/** Those of a server with or without a remote tier. */
export const sourcesOf = (server) => SOURCES.filter(([key]) => key !== "remote" || server.remote);

/** A bar that says which part of a prompt came from where; its text says the same. */
export function sourceBar() {
  const parts = SOURCES.map(([key]) => svg("rect", { class: `area ${key}`, height: 8, y: 0 }));
  const picture = svg(
    "svg",
    { class: "bar", viewBox: "0 0 100 8", preserveAspectRatio: "none", "aria-hidden": "true" },
    ...parts,
  );
  const text = el("span", { class: "bar-text" });
  const node = el("div", { class: "sources" }, picture, text);
  return {
    node,
    /** device: null while it is not known. */
    update({ device, host, remote = 0, prompt }) {
      const known = device !== null && device !== undefined,
        numbers = known ? [device, host, remote, prompt - device - host - remote] : [0, 0, 0, 0];
      let at = 0;
      numbers.forEach((n, i) => {
        const wide = prompt ? (100 * n) / prompt : 0;
        parts[i].setAttribute("x", at);
        parts[i].setAttribute("width", wide);
        at += wide;
      });
      const told = SOURCES.map(([, label], i) => [label, numbers[i]])
        .filter(([, n]) => n > 0)
        .map(([label, n]) => `${label} ${count(n)}`);
      say(text, known ? told.join(", ") : "not known yet");
    },
  };
}
