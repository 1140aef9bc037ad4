// Ends of texts, by class: where prompts were found again, and where they would have been.

import { Chart } from "./chart.js";
import { $, count, el, rate, say, svg } from "./dom.js";

const DASHES = 6; // kinds of lines in the style sheet

const swatch = (cls) =>
  svg(
    "svg",
    { class: "swatch", viewBox: "0 0 14 10", "aria-hidden": "true" },
    svg("path", { class: `line ${cls}`, d: "M0 5H14" }),
  );

export class Ends {
  constructor(server) {
    this.names = server.ends;
    const cls = (i) => `end-${i % DASHES}`;
    const chart = (title, of) =>
      new Chart({
        title,
        format: rate,
        unit: "/s",
        series: this.names.map((name, i) => ({ key: `ends.${name}.${of}`, label: name, cls: cls(i) })),
      });
    this.hits = chart("Hits by end", "hits");
    this.missed = chart("Missed by end: windows were not there", "missed");
    this.told = Object.fromEntries(this.names.map((name) => [name, el("span")]));
    const legend = el(
      "ul",
      { class: "legend values", id: "ends" },
      ...this.names.map((name, i) => el("li", {}, swatch(cls(i)), this.told[name])),
    );
    this.hits.values.replaceWith(legend);
    $("flow").append(el("div", { class: "charts" }, this.hits.node, this.missed.node));
  }

  update(store, windowS) {
    const times = store.times(windowS);
    for (const chart of [this.hits, this.missed])
      chart.update(
        times,
        chart.series.map((one) => store.rate(one.key, windowS)),
        windowS,
      );
    const last = (name, of) => store.last(`ends.${name}.${of}`);
    for (const name of this.names) {
      const kept = last(name, "pays") ? "kept" : "not kept";
      say(this.told[name], `${name} ${count(last(name, "hits"))}, ${kept}`);
    }
    say(this.missed.values, this.names.map((name) => `${name} ${count(last(name, "missed"))}`).join(" · "));
  }
}
