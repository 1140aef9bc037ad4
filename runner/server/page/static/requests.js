// Requests that are open, requests that have ended, and what the server knows of one.

import { sourceBar } from "./chart.js";
import { $, count, el, reconcile, say, seconds } from "./dom.js";
import { ask, problem } from "./stream.js";

const WAITS = {
  queue: "not looked at yet",
  tokens: "the step has no tokens left",
  rows: "as many run as may",
  blocks: "a group lacks blocks",
  stores: "stores still read the blocks",
  transfer: "a transfer brings its prefix",
  twin: "another request computes its prefix",
};
const ENDS = { abort: "its client left", capacity: "outgrew the pools", load_error: "a load failed" };
/** Finished requests that are shown at first; style.css says the same. */
const FEW = 8;
const HEADS = ["Request", "State", "Prompt from", "Tokens", "Progress"];

export class Requests {
  constructor() {
    $("request-close").addEventListener("click", () => $("request").close());
    $("request-again").addEventListener("click", () => this.look());
    $("finished-all").addEventListener("click", () => {
      const all = $("finished").classList.toggle("all");
      $("finished-all").setAttribute("aria-expanded", String(all));
      say($("finished-all"), all ? "Show fewer" : "Show all");
    });
  }

  update(store, snapshot) {
    const open = [...snapshot.running, ...snapshot.waiting],
      isDead = snapshot.state === "dead";
    say($("open-title"), isDead ? "Open when the engine died" : "Running and waiting");
    reconcile(
      $("open").tBodies[0],
      open,
      (one) => one.engine_id,
      (one) => this.row(one),
      fillOpen,
    );
    say(
      $("open-more"),
      snapshot.unnamed ? `and ${count(snapshot.unnamed)} more` : open.length ? "" : "No request is open.",
    );
    const ended = snapshot.finished.toReversed();
    reconcile(
      $("finished").tBodies[0],
      ended,
      (one) => one.engine_id,
      (one) => this.row(one),
      fillFinished,
    );
    say($("finished-more"), ended.length ? "" : "None has ended yet.");
    $("finished-all").hidden = ended.length <= FEW;
    const waits = Object.entries(WAITS)
      .map(([name, words]) => [words, store.last(`waiting.${name}`)])
      .filter(([, n]) => n);
    say($("waits"), waits.length && !isDead ? `Waiting: ${waits.map(([words, n]) => `${count(n)} (${words})`).join(", ")}` : "");
  }

  row(one) {
    const name = one.answer === null || one.answer === undefined ? one.id : `${one.id}, answer ${one.answer}`;
    const button = el("button", { type: "button", class: "link", on: { click: () => this.show(one) } }, name);
    const cells = HEADS.map((head, i) => el(i ? "td" : "th", i ? { "data-head": head } : { scope: "row" }));
    const bar = sourceBar();
    cells[0].append(button);
    cells[2].append(bar.node);
    const row = el("tr", {}, ...cells);
    row.parts = { cells, bar };
    return row;
  }

  /** Opens what the server knows of a request: {id, engine_id}. */
  show(one) {
    this.shown = one;
    say($("request-title"), `Request ${one.id}`);
    $("request-body").replaceChildren(el("p", {}, "asking"));
    if (!$("request").open) $("request").showModal();
    this.look();
  }

  async look() {
    const one = this.shown,
      found = await explanation(one);
    if (one !== this.shown) return;
    $("request-body").replaceChildren(...(found.problem ? [el("p", {}, found.problem), raw(one)] : told(found)));
  }
}

/** What the server knows of a request, by any of its names: {problem} if that is nothing. */
export async function explanation({ id, engine_id: engineId }) {
  let last = "";
  for (const name of new Set([id, engineId])) {
    if (!name) continue;
    try {
      const response = await ask(`v1/requests/${encodeURIComponent(name)}/explain`);
      if (response.ok) return await response.json();
      last = response.status === 404 ? "The server has no explanation of this request." : await problem(response);
      if (response.status !== 404) break;
    } catch (error) {
      last = error.message;
      break;
    }
  }
  return { problem: last };
}

function fillOpen(row, one) {
  const { cells, bar } = row.parts,
    waits = "wait" in one;
  const back = one.preemptions ? `, preempted ${count(one.preemptions)}×` : "";
  row.className = waits ? "waiting" : one.state;
  say(cells[1], `${waits ? "waiting" : one.state}${back}`);
  bar.update(waits ? { device: null } : one);
  say(
    cells[3],
    waits ? `${count(one.prompt)}` : `${count(one.prompt)} + ${count(one.generated)} of ${count(one.most)}`,
  );
  if (waits) {
    say(cells[4], one.why);
    return;
  }
  let progress = cells[4].querySelector("progress");
  if (!progress) {
    progress = el("progress", { "aria-label": "progress" });
    cells[4].replaceChildren(progress, el("span"));
  }
  const decodes = one.state === "decode",
    [at, most] = decodes ? [one.generated, one.most] : [one.computed, one.known];
  progress.max = Math.max(1, most);
  progress.value = at;
  say(
    progress.nextSibling,
    one.state === "loading"
      ? "a transfer is bringing its prefix"
      : decodes
        ? `generated ${count(at)} of ${count(most)}`
        : `computed ${count(at)} of ${count(most)}`,
  );
}

function fillFinished(row, one) {
  const { cells, bar } = row.parts;
  if (row.className) return;
  row.className = "ended";
  say(cells[1], ENDS[one.reason] ?? one.reason);
  bar.update(one);
  say(cells[3], `${count(one.prompt)} + ${count(one.generated)}`);
  say(
    cells[4],
    one.ttft_s === null ? seconds(one.seconds) : `${seconds(one.seconds)}, first token after ${seconds(one.ttft_s)}`,
  );
}

// --- an explanation -------------------------------------------------------------------------------

const lines = (text) => (Array.isArray(text) ? text : String(text ?? "").split("\n")).filter((line) => line.trim());
const raw = (value) =>
  el("details", {}, el("summary", {}, "As JSON"), el("pre", { tabindex: 0 }, JSON.stringify(value, null, 2)));

/** Of an explanation: a bar for each part's hit, the server's own words, and all of it. */
function told(found) {
  const bars = (found.parts ?? [])
    .filter((part) => part.hit?.device_tokens !== undefined)
    .map(({ hit, prompt_tokens: prompt }) => {
      const bar = sourceBar();
      const known = hit.sources?.at(-1)?.[1] ?? hit.tokens + hit.computed_tokens;
      bar.update({ device: hit.device_tokens, host: hit.host_tokens ?? 0, remote: hit.remote_tokens ?? 0, prompt: prompt ?? known });
      return bar.node;
    });
  return [...bars, ...lines(found.text).map((line) => el("p", {}, line)), raw(found)];
}
