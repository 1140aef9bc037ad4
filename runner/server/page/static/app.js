// The page: one stream of snapshots, and what is made of it.

import { patterns } from "./chart.js";
import { $, count, say } from "./dom.js";
import { Flow, Now, Pools, legends } from "./panels.js";
import { Asking } from "./ask.js";
import { Requests } from "./requests.js";
import { Store } from "./store.js";
import { key, watch } from "./stream.js";
import { Ends } from "./ends.js";
import { RemoteTier } from "./remote.js";

const store = new Store(),
  now = new Now(),
  requests = new Requests();
let pools = null,
  remote = null,
  flow = null,
  ends = null,
  known = "",
  newest = null,
  isPaused = false,
  isDue = false;

document.body.append(patterns());
new Asking(requests);

function status(state, text) {
  $("status").dataset.state = state;
  say($("status"), text);
}

/** Draws at most once a frame, and not at all while nobody sees it. */
function draw() {
  if (isDue || isPaused || !newest) return;
  isDue = true;
  requestAnimationFrame(() => {
    isDue = false;
    const windowS = store.shown(Number($("window").value));
    now.update(store, newest, windowS);
    pools.update(store, windowS);
    remote?.update(store, newest, windowS);
    flow.update(store, windowS);
    ends?.update(store, windowS);
    requests.update(store, newest);
  });
}

const STATES = {
  serving: "serving",
  overloaded: "overloaded: most requests are refused",
  draining: "draining: no new requests",
  dead: "the engine has died",
};

/** What is told above all else: it stays while the server is lost, until another one answers. */
function banner({ state, death }) {
  const why = death ? ` of ${death}` : "";
  say(
    $("banner"),
    state === "dead" ? `The engine has died${why}. Nothing is served any more; the server's log has the traceback.` : "",
  );
  $("banner").hidden = state !== "dead";
  document.body.classList.toggle("dead", state === "dead");
}

const again = watch("watch", {
  history(past) {
    store.start(past);
    $("key-form").hidden = true;
    const { models, device, attention, longest } = past.server;
    say($("model"), models.join(", "));
    say($("facts"), `on ${device}, attention by ${attention}, at most ${count(longest)} tokens a request`);
    document.title = `${models[0]} · kvtier`;
    if (known !== JSON.stringify(past.server)) {
      // else what is open stays so
      legends(past.server);
      pools = new Pools(past.server);
      remote = past.server.remote ? new RemoteTier(past.server) : null;
      flow = new Flow(past.server);
      ends = past.server.ends.length ? new Ends(past.server) : null;
    }
    known = JSON.stringify(past.server);
  },
  snapshot(snapshot) {
    store.add(snapshot.numbers);
    newest = snapshot;
    status(snapshot.state, isPaused ? "paused" : STATES[snapshot.state]);
    banner(snapshot);
    draw();
  },
  state(name, message) {
    status(name, message);
    if (name === "locked") {
      $("key-form").hidden = false;
      say($("key-note"), `${message}; it is kept in this tab only`);
      $("key").focus();
    }
  },
});

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key.set($("key").value.trim());
  $("key").value = "";
  again();
});
$("pause").addEventListener("click", () => {
  isPaused = !isPaused;
  say($("pause"), isPaused ? "Go on" : "Pause");
  status(newest?.state ?? "connecting", isPaused ? "paused" : (STATES[newest?.state] ?? "connecting"));
  draw();
});
$("window").addEventListener("change", draw);
window.addEventListener("resize", draw);
document.addEventListener("visibilitychange", draw);

const theme = (name) => {
  if (name) document.documentElement.dataset.theme = name;
  else delete document.documentElement.dataset.theme;
};
$("theme").value = localStorage.getItem("kvtier-theme") ?? "";
theme($("theme").value);
$("theme").addEventListener("change", () => {
  localStorage.setItem("kvtier-theme", $("theme").value);
  theme($("theme").value);
});
