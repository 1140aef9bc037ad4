// Server-sent events over fetch, which can send a key (EventSource cannot), with reconnection.

const KEY = "kvtier-key";

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

/** fetch, with the key if there is one. Paths are relative, so that the server may stand under a prefix. */
export function ask(path, options = {}) {
  const headers = { ...options.headers };
  if (key.get()) headers.Authorization = `Bearer ${key.get()}`;
  return fetch(path, { ...options, headers, cache: "no-store", credentials: "same-origin" });
}

export const post = (path, body, options = {}) =>
  ask(path, {
    method: "POST",
    body: JSON.stringify(body),
    ...options,
    headers: { "Content-Type": "application/json", ...options.headers },
  });

/** The message of an answer that is not 2xx. */
export async function problem(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `status ${response.status}`;
  }
}

/** Yields {name, data} of each event of a response; `alive` is called whenever anything comes. */
export async function* events(response, alive = () => {}) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      alive();
      const blocks = (rest + value).split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) {
        let name = "message",
          data = "";
        for (const line of block.split("\n")) {
          if (line.startsWith("event: ")) name = line.slice(7);
          else if (line.startsWith("data: ")) data += line.slice(6);
        }
        if (data) yield { name, data };
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

const LONGEST_WAIT_S = 30;
const ANEW = "anew";
/** Longer than a server that lives is silent. */
const SILENCE_MS = 25000;

/**
 * Watches for ever. `on` has a function for each event, and `state(name, message)`. Returns a function that starts
 * anew.
 */
export function watch(path, on) {
  let abort = new AbortController(),
    wake = () => {},
    wait = 0,
    clock = 0;
  const until = (start) =>
    new Promise((done) => {
      wake = done;
      start?.(done);
    });
  const alive = () => {
    clearTimeout(clock);
    const mine = abort;
    clock = setTimeout(() => mine.abort(new Error("the server is silent")), SILENCE_MS);
  };
  const once = async () => {
    alive();
    const response = await ask(path, { signal: abort.signal });
    if (response.status === 401) {
      clearTimeout(clock);
      on.state("locked", key.get() ? "this key is not known" : "a key is needed");
      await until();
      return;
    }
    if (!response.ok) throw new Error(await problem(response));
    for await (const { name, data } of events(response, alive)) {
      wait = 0;
      on[name]?.(JSON.parse(data));
    }
    throw new Error("the server has ended the stream");
  };
  (async () => {
    for (;;) {
      abort = new AbortController();
      try {
        await once();
      } catch (error) {
        clearTimeout(clock);
        if (abort.signal.reason === ANEW) {
          on.state("connecting", "connecting");
          continue;
        }
        wait = Math.min(LONGEST_WAIT_S, wait ? wait * 2 : 1);
        on.state("lost", `${error.message}; trying again in ${wait} s`);
        await until((done) => setTimeout(done, wait * 1000));
      }
    }
  })();
  return () => {
    wait = 0;
    abort.abort(ANEW);
    wake();
  };
}
