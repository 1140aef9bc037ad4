// Asks the server as any client does, and shows which token came from where.

import { sourceBar } from "./chart.js";
import { $, count, el, say, seconds } from "./dom.js";
import { explanation } from "./requests.js";
import { events, post, problem } from "./stream.js";

/** Tokens of a prompt that are shown; of a longer one its two ends. */
const MOST_SHOWN = 1500;

export class Asking {
  constructor(requests) {
    this.requests = requests;
    this.bar = sourceBar();
    $("ask-hit").append(this.bar.node);
    $("ask").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    $("prompt").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("ask").requestSubmit();
    });
    $("ask-stop").addEventListener("click", () => this.abort?.abort());
    $("ask-why").addEventListener("click", () => this.requests.show({ id: this.id, engine_id: null }));
  }

  async send() {
    const text = $("prompt").value,
      chat = $("ask-kind").value === "chat";
    const given = chat ? { messages: [{ role: "user", content: text }] } : { prompt: text };
    this.abort = new AbortController();
    this.id = `page-${crypto.getRandomValues(new Uint32Array(2)).join("")}`;
    $("ask-go").disabled = true;
    $("ask-stop").disabled = false;
    $("ask-result").hidden = true;
    say($("ask-status"), "asked");
    const began = performance.now();
    try {
      const pieces = await this.tokens(given);
      await this.stream(chat, given, pieces, began);
    } catch (error) {
      say($("ask-status"), error.name === "AbortError" ? "stopped" : error.message);
    } finally {
      $("ask-go").disabled = false;
      $("ask-stop").disabled = true;
    }
  }

  /** The prompt's tokens as pieces of text. */
  async tokens(given) {
    const response = await post("tokenize", { ...given, return_token_strs: true }, { signal: this.abort.signal });
    if (!response.ok) throw new Error(await problem(response));
    const { tokens, token_strs: strings } = await response.json();
    return strings ? readable(strings, given.prompt ?? given.messages[0].content) : tokens.map(String);
  }

  async stream(chat, given, pieces, began) {
    const body = {
      ...given,
      max_tokens: Number($("ask-most").value),
      temperature: Number($("ask-temperature").value),
      stream: true,
      stream_options: { include_usage: true, continuous_usage_stats: true },
    };
    const response = await post(chat ? "v1/chat/completions" : "v1/completions", body, {
      signal: this.abort.signal,
      headers: { "X-Request-Id": this.id },
    });
    if (!response.ok) throw new Error(await problem(response));
    const answer = el("span", { class: "token generated" });
    let usage = null,
      first = null;
    this.show(pieces, null, answer);
    for await (const { data } of events(response)) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      this.id = chunk.id ?? this.id;
      usage = chunk.usage ?? usage;
      const choice = chunk.choices?.[0],
        piece = choice?.text ?? choice?.delta?.content ?? "";
      if (piece) {
        first ??= performance.now();
        answer.append(piece);
        showEnd();
        say($("ask-status"), `generating`);
      }
    }
    await this.sources(pieces, usage, answer);
    const took = (ms) => seconds(ms / 1000);
    say(
      $("ask-status"),
      `${count(usage?.completion_tokens ?? 0)} tokens in ${took(performance.now() - began)}` +
        (first === null ? "" : `, the first after ${took(first - began)}`),
    );
  }

  /** Which prompt token came from where: as the server explains it, else by the counts of `usage`, in their order. */
  async sources(pieces, usage, answer) {
    const found = await explanation({ id: this.id, engine_id: null }),
      hit = found.parts?.[0]?.hit;
    const tiers = usage?.prompt_tokens_details?.cached_tokens_by_tier ?? {};
    const device = hit?.device_tokens ?? tiers.device ?? 0,
      host = hit?.host_tokens ?? tiers.host ?? 0,
      remote = hit?.remote_tokens ?? tiers.remote ?? 0;
    const ranges = hit?.sources ?? [
      [0, device, "device"],
      [device, device + host, "host"],
      [device + host, device + host + remote, "remote"],
      [device + host + remote, pieces.length, "computed"],
    ];
    this.bar.update({ device, host, remote, prompt: pieces.length });
    this.show(pieces, ranges, answer);
  }

  show(pieces, ranges, answer) {
    const shown = [];
    const put = (start, end, source) => {
      const texts = pieces.slice(start, end);
      if (!texts.length) return;
      shown.push(
        el(
          "span",
          { class: `run ${source ?? "unknown"}` },
          el("span", { class: "hidden" }, ` from ${source ?? "where is not known yet"}: `),
          ...texts.map((text) => el("span", { class: "token" }, text)),
        ),
      );
    };
    const cut =
      pieces.length > MOST_SHOWN ? [MOST_SHOWN / 2, pieces.length - MOST_SHOWN / 2] : [pieces.length, pieces.length];
    for (const [start, end, source] of ranges ?? [[0, pieces.length, null]]) {
      put(start, Math.min(end, cut[0]), source);
      if (start < cut[1] && end > cut[0])
        shown.push(
          el(
            "span",
            { class: `cut ${source}` },
            ` … ${count(Math.min(end, cut[1]) - Math.max(start, cut[0]))} tokens … `,
          ),
        );
      put(Math.max(start, cut[1]), end, source);
    }
    shown.push(el("span", { class: "run generated" }, el("span", { class: "hidden" }, " generated: "), answer));
    $("ask-tokens").replaceChildren(...shown);
    $("ask-result").hidden = false;
    showEnd();
  }
}

/** The answer stands at the end. */
function showEnd() {
  $("ask-tokens").scrollTop = $("ask-tokens").scrollHeight;
}

// --- names of tokens as text ----------------------------------------------------------------------

/** The letters that byte-level vocabularies write bytes as. */
const BYTE_OF = new Map();
for (let byte = 0, other = 256; byte < 256; byte++) {
  const plain = (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
  BYTE_OF.set(String.fromCodePoint(plain ? byte : other++), byte);
}

/** Names of tokens as pieces of the text that they are of. */
export function readable(strings, text) {
  if (strings.some((s) => /[ĠĊ]/.test(s)) && strings.every((s) => [...s].every((letter) => BYTE_OF.has(letter)))) {
    const decoder = new TextDecoder();
    return strings.map((s) => decoder.decode(Uint8Array.from(s, (letter) => BYTE_OF.get(letter)), { stream: true }));
  }
  const areWords = strings.length > 2 && text.replace(/\s+/g, " ").includes(strings.slice(1).join(" "));
  return strings.map((s) => (areWords ? `${s} ` : s.replaceAll("▁", " ").replaceAll("<0x0A>", "\n")));
}
