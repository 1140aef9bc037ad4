// The pictures: what is now, the pools, tokens and transfers.

import { Chart, sourceBar, sourcesOf } from "./chart.js";
import { $, bytes, count, el, rate, say, seconds, share, svg } from "./dom.js";

export const PLACES = [
  ["held", "held", "by requests and stores"],
  ["loading", "loading", "a load writes them (device) or reads them (host)"],
  ["fenced", "storing", "free, but a store still reads them"],
  ["cached", "cached", "free, and findable until they are handed out"],
  ["quarantined", "quarantined", "an overdue copy may still touch them"],
  ["lent", "lent", "other groups use their memory"],
  ["empty", "empty", "free, without content"],
];
export const MB = 1e6;

const pattern = (place, tier) =>
  ({
    loading: `url(#loading-${tier})`,
    fenced: `url(#fenced-${tier})`,
    quarantined: "url(#quarantined)",
    lent: "url(#lent)",
  })[place] ?? null;

export const swatch = (cls, fill = null) =>
  svg(
    "svg",
    { class: "swatch", viewBox: "0 0 14 10", "aria-hidden": "true" },
    svg("rect", { class: `area ${cls}`, width: 14, height: 10, fill }),
  );

export function legends(server) {
  $("places").replaceChildren(
    ...PLACES.map(([place, label]) => el("li", {}, swatch(`device ${place}`, pattern(place, "device")), label)),
  );
  $("meanings").replaceChildren(
    ...PLACES.map(([, label, means]) => el("div", {}, el("dt", {}, label), el("dd", {}, means))),
  );
  for (const id of ["sources", "ask-sources"]) {
    const items = [...sourcesOf(server), ["generated", "generated"]];
    $(id).replaceChildren(...items.map(([key, label]) => el("li", {}, swatch(key), label)));
  }
}

// --- now ------------------------------------------------------------------------------------------

const TIMES = [
  ["first", "first_token_s"],
  ["token", "token_s"],
];
const TILES = [
  ["running", "running"],
  ["waiting", "waiting"],
  ["refused", "refused (429)"],
  ["first", "to the first token, p50"],
  ["token", "for each later token, p50"],
  ["prompt", "prompt tokens/s computed"],
  ["generated", "tokens/s generated"],
  ["cached", "of prompts from the cache"],
  ["stored", "MB/s stored"],
  ["loaded", "MB/s loaded"],
  ["failures", "failed copies"],
];

export class Now {
  constructor() {
    this.cells = Object.fromEntries(TILES.map(([name]) => [name, el("dd")]));
    this.more = Object.fromEntries(TIMES.map(([name]) => [name, el("dd", { class: "more" })]));
    $("now").replaceChildren(
      ...TILES.map(([name, label]) =>
        el("div", { "data-name": name }, el("dt", {}, label), this.cells[name], this.more[name]),
      ),
    );
  }

  update(store, snapshot, windowS) {
    const grown = growth(store, windowS);
    const cached = grown("tokens.device") + grown("tokens.host") + grown("tokens.remote"),
      all = cached + grown("tokens.computed");
    const failed = store.last("failed_stores") + store.last("failed_loads");
    const isDead = snapshot.state === "dead";
    const told = {
      running: isDead ? "–" : count(store.last("running")),
      waiting: isDead ? "–" : count(waiting(store)),
      refused: count(store.last("refused")),
      prompt: rate(store.now("prefilled")),
      generated: rate(store.now("generated")),
      cached: share(cached, all),
      stored: rate(store.now("stored_bytes") / MB),
      loaded: rate(store.now("loaded_bytes") / MB),
      failures: snapshot.stores_hang ? `${count(failed)}, stores hang` : count(failed),
    };
    for (const [name, text] of Object.entries(told)) say(this.cells[name], text);
    for (const [name, key] of TIMES) {
      const [p50, p95, p99] = snapshot.times[key] ?? [];
      say(this.cells[name], seconds(p50));
      say(this.more[name], `p95 ${seconds(p95)}, p99 ${seconds(p99)}`);
    }
    this.cells.refused.parentNode.classList.toggle("bad", snapshot.state === "overloaded");
    this.cells.failures.parentNode.classList.toggle("bad", failed > 0 || snapshot.stores_hang);
  }
}

export const waiting = (store) =>
  store.columns.filter((name) => name.startsWith("waiting.")).reduce((n, name) => n + store.last(name), 0);

const growth = (store, windowS) => (name) => {
  const [first, end] = store.span(windowS),
    column = store.column(name);
  return end > first ? column[end - 1] - column[first] : 0;
};

// --- pools ----------------------------------------------------------------------------------------

export class Pools {
  constructor(server) {
    this.charts = [];
    $("pools").replaceChildren(
      ...Object.entries(server.tiers).map(([tier, of]) => {
        const title = `${tier === "device" ? "Device" : "Host"} tier`;
        const room = `${bytes(of.bytes)}, contexts of ${count(of.capacity_tokens)} tokens`;
        const charts = Object.keys(server.groups).map((group) => this.chart(server, tier, group));
        return el(
          "section",
          { class: `tier ${tier}`, "aria-label": title },
          el("h3", {}, title, " ", el("span", { class: "quiet" }, room)),
          el("div", { class: "charts" }, ...charts),
        );
      }),
    );
  }

  chart(server, tier, group) {
    const series = PLACES.filter(([place]) => place !== "empty").map(([place, label]) => ({
      key: `${tier}.${group}.${place}`,
      label,
      cls: `${tier} ${place}`,
      fill: pattern(place, tier),
    }));
    const chart = new Chart({ title: `${group}, ${tier}`, series, stacked: true, unit: " blocks" });
    this.charts.push({
      chart,
      series,
      usable: server.tiers[tier].usable[group],
      size: server.groups[group].block_bytes,
      key: `${tier}.${group}`,
    });
    return chart.node;
  }

  update(store, windowS) {
    const times = store.times(windowS);
    for (const { chart, series, usable, size, key } of this.charts) {
      chart.update(
        times,
        series.map((one) => store.gauge(one.key, windowS)),
        windowS,
        usable,
      );
      const told = PLACES.map(([place, label]) => [label, store.last(`${key}.${place}`)]).filter(([, n]) => n > 0);
      say(chart.values, told.map(([label, n]) => `${label} ${count(n)} (${share(n, usable)})`).join(" · "));
      say(chart.most, `${count(usable)} blocks of ${bytes(size)}`);
    }
  }
}

// --- tokens and transfers -------------------------------------------------------------------------

export class Flow {
  constructor(server) {
    this.sources = sourcesOf(server).map(([key]) => key);
    const lines = (names) => names.map(([key, label, cls]) => ({ key, label, cls }));
    this.hits = new Chart({
      title: "Prompt tokens by source",
      stacked: true,
      steps: true,
      format: rate,
      unit: "/s",
      series: lines(sourcesOf(server).map(([key, label]) => [`tokens.${key}`, label, key])),
    });
    this.prompts = new Chart({
      title: "Prompt tokens computed",
      format: rate,
      unit: "/s",
      series: lines([["prefilled", "computed", "computed"]]),
    });
    this.tokens = new Chart({
      title: "Tokens generated",
      format: rate,
      unit: "/s",
      series: lines([["generated", "generated", "generated"]]),
    });
    this.transfers = new Chart({
      title: "Transfers",
      format: rate,
      unit: " MB/s",
      series: lines([
        ["stored_bytes", "stored to the host", "host"],
        ["loaded_bytes", "loaded to the device", "device"],
      ]),
    });
    this.bar = sourceBar();
    this.hits.values.replaceWith(this.bar.node);
    $("flow").replaceChildren(
      el("div", { class: "charts" }, this.hits.node, this.prompts.node, this.tokens.node, this.transfers.node),
    );
  }

  update(store, windowS) {
    const times = store.times(windowS);
    for (const [chart, per] of [
      [this.hits, 1],
      [this.prompts, 1],
      [this.tokens, 1],
      [this.transfers, MB],
    ]) {
      const scaled = (v) => (v === null ? null : v / per);
      const columns = chart.series.map((one) => store.rate(one.key, windowS).map(scaled));
      chart.update(times, columns, windowS);
    }
    const grown = growth(store, windowS),
      counted = Object.fromEntries(this.sources.map((key) => [key, grown(`tokens.${key}`)]));
    this.bar.update({ ...counted, prompt: Object.values(counted).reduce((a, b) => a + b, 0) });
    say(this.prompts.values, `now ${rate(store.now("prefilled"))} · preemptions ${count(store.last("preemptions"))}`);
    say(this.tokens.values, `now ${rate(store.now("generated"))} · requests finished ${count(store.last("finished"))}`);
    const speed = (name) => rate(store.now(name) / MB);
    const total = (name) => count(store.last(name));
    say(
      this.transfers.values,
      [
        `now stored ${speed("stored_bytes")}, loaded ${speed("loaded_bytes")}`,
        `under way ${total("transfers")}`,
        `failed: stores ${total("failed_stores")}, loads ${total("failed_loads")}`,
        `blocks dropped ${total("dropped_blocks")}`,
      ].join(" · "),
    );
  }
}
