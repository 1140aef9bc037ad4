// The remote tier, if there is one: what goes there, what comes back, and what went wrong.

import { Chart } from "./chart.js";
import { $, bytes, count, el, rate, say } from "./dom.js";
import { MB } from "./panels.js";

const STATES = {
  on: "in use",
  alone: "left alone after failures, but for a try a second",
  off: "left alone since the cache was reset",
};
const TROUBLES = [
  ["missed_objects", "gone when read"],
  ["damaged_objects", "damaged"],
  ["refused_objects", "not taken"],
  ["failed_spills", "spills failed"],
  ["failed_fetches", "fetches failed"],
  ["late_looks", "late answers"],
  ["expired", "given up"],
  ["not_worth", "faster to compute"],
];

export class RemoteTier {
  constructor(server) {
    this.state = el("span", { class: "quiet" });
    this.kind = server.remote.kind;
    const chart = (title, of, unit, format) =>
      new Chart({
        title,
        format,
        unit,
        series: [
          { key: `remote.spilled_${of}`, label: "spilled", cls: "remote" },
          { key: `remote.fetched_${of}`, label: "fetched", cls: "host" },
        ],
      });
    this.bytes = chart("Spilled and fetched", "bytes", " MB/s", rate);
    this.objects = chart("Objects", "objects", "/s", rate);
    this.troubles = el("p", { class: "values" });
    this.node = el(
      "section",
      { class: "tier remote", id: "remote", "aria-label": "Remote tier" },
      el("h3", {}, "Remote tier ", this.state),
      el("div", { class: "charts" }, this.bytes.node, this.objects.node),
      this.troubles,
    );
    $("pools").append(this.node);
  }

  update(store, snapshot, windowS) {
    const times = store.times(windowS),
      last = (name) => store.last(`remote.${name}`);
    for (const [chart, per] of [
      [this.bytes, MB],
      [this.objects, 1],
    ]) {
      const scaled = (v) => (v === null ? null : v / per);
      chart.update(
        times,
        chart.series.map((one) => store.rate(one.key, windowS).map(scaled)),
        windowS,
      );
    }
    say(this.state, `${this.kind}, ${STATES[snapshot.remote] ?? snapshot.remote}`);
    this.node.classList.toggle("bad", snapshot.remote !== "on");
    const speed = (name) => rate(store.now(`remote.${name}`) / MB);
    say(
      this.bytes.values,
      [
        `now spilled ${speed("spilled_bytes")}, fetched ${speed("fetched_bytes")}`,
        `in all ${bytes(last("spilled_bytes"))} and ${bytes(last("fetched_bytes"))}`,
        `under way ${count(last("live"))}`,
      ].join(" · "),
    );
    say(
      this.objects.values,
      `spilled ${count(last("spilled_objects"))}, fetched ${count(last("fetched_objects"))} · ` +
        `questions ${count(last("looks"))}`,
    );
    const told = TROUBLES.map(([name, label]) => [label, last(name)]).filter(([, n]) => n > 0);
    say(this.troubles, told.map(([label, n]) => `${label} ${count(n)}`).join(" · "));
  }
}
