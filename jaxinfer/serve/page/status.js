// What the server does at the moment, asked for once a second while the page is seen.

import { getJson } from "./api.js";
import { byId, element } from "./dom.js";
import { Sparkline } from "./sparkline.js";

const INTERVAL_MS = 1000;

// [title, the tile's value and note, the sparkline's value and limit], from an answer and its difference to the last.
const TILES = [
  ["Generated", (now, rate) => [fixed(rate.generation_tokens), "tokens/s"], (now, rate) => [rate.generation_tokens]],
  ["Prompts", (now, rate) => [fixed(rate.computed_prompt_tokens), "tokens/s"], (now, rate) => [rate.computed_prompt_tokens]],
  [
    "Requests",
    ({ stats }) => [String(stats.num_running), stats.queue_len ? `running, ${stats.queue_len} waiting` : "running"],
    ({ stats }) => [stats.num_running + stats.queue_len],
  ],
  [
    "Pages used",
    ({ stats }) => [percent(stats.pages_used / stats.pages_total), `${short(stats.pages_used)} of ${short(stats.pages_total)}`],
    ({ stats }) => [stats.pages_used / stats.pages_total, 1],
  ],
  [
    "Cache hits",
    ({ stats }) => [percent(stats.prefix_cache_hit_rate), `${short(stats.pages_cached)} pages`],
    ({ stats }) => [stats.prefix_cache_hit_rate, 1],
  ],
  ["First token", (now, rate) => [milliseconds(rate.ttft_s), "lately"], (now, rate) => [rate.ttft_s ?? 0]],
];

const short = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 }).format;
const fixed = (value) => (value >= 100 ? Math.round(value).toLocaleString("en") : value.toFixed(1));
const percent = (share) => `${(100 * share).toFixed(share >= 0.1 || share === 0 ? 0 : 1)}%`;
const milliseconds = (seconds) => (seconds === null ? "–" : `${Math.round(1000 * seconds).toLocaleString("en")} ms`);

export class Status {
  constructor({ onRefused }) {
    this.onRefused = onRefused;
    this.previous = null;
    this.lastTtft = null;
    this.tiles = TILES.map(([title, text, spark]) => new Tile(title, text, spark));
    byId("tiles").append(...this.tiles.map((tile) => tile.root));
    document.addEventListener("visibilitychange", () => this.resume());
    this.resume();
  }

  resume() {
    clearTimeout(this.timer);
    if (!document.hidden) this.poll();
  }

  async poll() {
    try {
      const answer = await getJson("status", AbortSignal.timeout(5000));
      this.show({ ...answer, at: performance.now() });
    } catch (error) {
      this.previous = null;
      if (error.status === 401) {
        setHealth("bad", "API key needed");
        this.onRefused(() => this.resume());
        return;
      }
      setHealth("bad", error.status === 503 ? "not ready" : "unreachable");
    }
    clearTimeout(this.timer);
    if (!document.hidden) this.timer = setTimeout(() => this.poll(), INTERVAL_MS);
  }

  show(now) {
    setHealth(now.state === "ready" ? "good" : "bad", now.state);
    byId("model").textContent = now.model;
    document.title = `${now.model} · jaxinfer`;
    const rate = this.rates(now);
    for (const tile of this.tiles) tile.show(now, rate);
    showFacts(now);
    this.previous = now;
  }

  // Of the time since the last answer; zeros where there is none.
  rates(now) {
    const before = this.previous ?? now;
    const seconds = Math.max(1e-3, (now.at - before.at) / 1000);
    const grown = (name) => Math.max(0, now.totals[name] - before.totals[name]);
    const firsts = grown("first_tokens");
    if (firsts) this.lastTtft = grown("ttft_s") / firsts;
    return {
      generation_tokens: grown("generation_tokens") / seconds,
      computed_prompt_tokens: Math.max(0, grown("prompt_tokens") - grown("cached_prompt_tokens")) / seconds,
      ttft_s: this.lastTtft,
    };
  }
}

class Tile {
  constructor(title, text, spark) {
    this.text = text;
    this.spark = spark;
    this.value = element("span", { className: "value" }, "–");
    this.note = element("span", { className: "note" });
    this.line = new Sparkline();
    const figure = element("div", { className: "figure" }, this.value, this.note);
    this.root = element("div", { className: "tile" }, element("h3", {}, title), figure, this.line.root);
  }

  show(now, rate) {
    [this.value.textContent, this.note.textContent] = this.text(now, rate);
    this.line.add(...this.spark(now, rate));
  }
}

function setHealth(state, text) {
  const shown = byId("health");
  shown.dataset.state = state;
  if (shown.textContent !== text) shown.textContent = text;
}

function showFacts({ model, version, uptime_s: uptime, settings, stats, totals }) {
  const count = (value) => value.toLocaleString("en");
  const facts = [
    ["Model", model],
    ["Architecture", `${settings.architecture}, ${settings.num_layers} layers`],
    ["Parameters in", settings.dtype],
    ["Context", `${count(settings.max_model_len)} tokens`],
    ["Rows", `${settings.max_num_seqs} at once`],
    ["Step budget", `${count(settings.max_num_batched_tokens)} tokens`],
    ["Pages", `${count(stats.pages_total)} of ${settings.page_size} tokens`],
    ["Prefix cache", settings.enable_prefix_caching ? "on" : "off"],
    ["Requests", `${count(totals.requests)} since the start`],
    ["Tokens", `${count(totals.generation_tokens)} generated`],
    ["Preemptions", count(stats.num_preemptions)],
    ["Compiled", `${stats.num_compiles} programs in ${stats.compile_time_s.toFixed(1)} s`],
    ["Up for", duration(uptime)],
    ["Version", version],
  ];
  const list = byId("facts");
  if (list.children.length !== facts.length) {
    list.replaceChildren(...facts.map(([name]) => element("div", {}, element("dt", {}, name), element("dd", {}))));
  }
  facts.forEach(([, text], index) => (list.children[index].lastChild.textContent = text));
}

function duration(seconds) {
  const whole = Math.floor(seconds);
  const [days, hours, minutes] = [Math.floor(whole / 86400), Math.floor(whole / 3600) % 24, Math.floor(whole / 60) % 60];
  if (days) return `${days} d ${hours} h`;
  return hours ? `${hours} h ${minutes} min` : minutes ? `${minutes} min ${whole % 60} s` : `${whole} s`;
}
