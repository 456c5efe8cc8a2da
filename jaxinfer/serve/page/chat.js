// The conversation: what was said, what is being said, and what went wrong.

import { streamChat } from "./api.js";
import { byId, element } from "./dom.js";
import { copyText, render } from "./render.js";

const EXAMPLES = [
  "Explain what a prefix cache does, in three sentences.",
  "Write a Python function that merges two sorted lists.",
  "Give me five names for a small coffee shop.",
];

export class Chat {
  constructor({ settings, onRefused }) {
    this.settings = settings;
    this.onRefused = onRefused;
    this.messages = [];
    this.running = null; // the AbortController of the answer that streams
    this.log = byId("log");
    this.prompt = byId("prompt");
    this.composer = byId("composer");
    this.addListeners();
  }

  addListeners() {
    this.composer.addEventListener("submit", (event) => {
      event.preventDefault();
      this.send(this.prompt.value);
    });
    this.prompt.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.composer.requestSubmit();
      }
    });
    this.prompt.addEventListener("input", () => this.fit());
    byId("stop").addEventListener("click", () => this.stop());
    byId("clear").addEventListener("click", () => this.clear());
    addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.stop();
    });
    for (const text of EXAMPLES) {
      const button = element("button", { type: "button" }, text);
      button.addEventListener("click", () => this.send(text));
      byId("examples").append(button);
    }
  }

  fit() {
    this.prompt.style.height = "auto";
    this.prompt.style.height = `${this.prompt.scrollHeight + 2}px`;
  }

  stop() {
    this.running?.abort();
  }

  clear() {
    this.stop();
    this.messages = [];
    for (const shown of this.log.querySelectorAll(".message")) shown.remove();
    byId("empty").hidden = false;
    this.prompt.focus();
  }

  async send(text) {
    if (this.running || !text.trim()) return;
    this.prompt.value = "";
    this.fit();
    byId("empty").hidden = true;
    this.show("user", text);
    await this.answer({ role: "user", content: text });
  }

  async answer(question) {
    this.messages.push(question);
    const shown = this.show("assistant", "");
    const messages = this.messages;
    const reply = { role: "assistant", content: "" };
    const controller = (this.running = new AbortController());
    this.setRunning(true);
    const timing = new Timing();
    try {
      const system = this.settings.system();
      const all = system ? [{ role: "system", content: system }, ...messages] : messages;
      for await (const chunk of streamChat({ ...this.settings.sampling(), messages: all }, controller.signal)) {
        timing.take(chunk);
        const delta = chunk.choices?.[0]?.delta;
        if (delta?.reasoning_content) shown.think(delta.reasoning_content);
        if (delta?.content) {
          reply.content += delta.content;
          shown.write(reply.content);
        }
      }
      shown.end(timing.summary());
    } catch (error) {
      const retry = () => this.retry(shown, question);
      if (controller.signal.aborted) shown.end(timing.summary("stopped"));
      else shown.fail(error, retry);
      if (error.status === 401) this.onRefused(retry);
    } finally {
      // A question without an answer is not part of the conversation, lest what was refused once is so ever after.
      if (reply.content) messages.push(reply);
      else messages.pop();
      this.running = null;
      this.setRunning(false);
    }
  }

  async retry(shown, question) {
    if (this.running || !shown.root.isConnected) return;
    const asked = this.messages.indexOf(question);
    if (asked >= 0) this.messages.splice(asked, 2);
    shown.root.remove();
    await this.answer(question);
  }

  setRunning(running) {
    byId("send").hidden = running;
    byId("stop").hidden = !running;
    this.log.setAttribute("aria-busy", String(running));
    if (document.activeElement === document.body || this.composer.contains(document.activeElement)) this.prompt.focus();
  }

  show(role, text) {
    const message = new Message(role, this.log);
    if (text) message.write(text);
    message.scroll(true);
    return message;
  }
}

class Message {
  constructor(role, log) {
    this.log = log;
    this.text = "";
    this.body = element("div", { className: "body" });
    this.foot = element("div", { className: "foot" });
    const name = element("div", { className: "role" }, role === "user" ? "You" : "Model");
    this.root = element("article", { className: `message ${role}` }, name, this.body, this.foot);
    if (role === "assistant") this.root.classList.add("streaming");
    log.append(this.root);
  }

  write(text) {
    this.text = text;
    this.draw();
  }

  think(text) {
    this.thought = (this.thought ?? "") + text;
    this.draw();
  }

  draw() {
    if (this.frame) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = null;
      this.drawNow();
    });
  }

  drawNow() {
    const follow = this.atEnd();
    const open = this.body.querySelector("details")?.open ?? false;
    const thought = this.thought
      ? [element("details", { open }, element("summary", {}, "Reasoning"), element("p", {}, this.thought))]
      : [];
    this.body.replaceChildren(...thought, ...render(this.text));
    this.scroll(follow);
  }

  end(summary) {
    this.root.classList.remove("streaming");
    this.drawNow();
    const copy = element("button", { type: "button", className: "link" }, "Copy");
    copy.addEventListener("click", () => copyText(this.text, copy));
    this.foot.replaceChildren(element("span", {}, summary), ...(this.text ? [copy] : []));
  }

  fail(error, retry) {
    const follow = this.atEnd();
    this.root.classList.remove("streaming");
    this.root.classList.add("failed");
    const again = element("button", { type: "button" }, "Try again");
    again.addEventListener("click", retry);
    const title = error.status === 429 ? "The server is busy" : error.status ? `Error ${error.status}` : "No answer";
    const alert = element("div", { className: "error", role: "alert" });
    alert.append(element("strong", {}, title), element("p", {}, error.message), again);
    this.foot.replaceChildren(alert);
    this.scroll(follow);
  }

  atEnd() {
    return this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < 80;
  }

  scroll(follow) {
    if (follow) this.log.scrollTop = this.log.scrollHeight;
  }
}

// When the parts of an answer came, and how many tokens it has.
class Timing {
  constructor() {
    this.start = performance.now();
    this.chunks = 0;
  }

  take(chunk) {
    this.usage = chunk.usage ?? this.usage;
    const choice = chunk.choices?.[0];
    this.reason = choice?.finish_reason ?? this.reason;
    if (choice?.delta?.content || choice?.delta?.reasoning_content) {
      this.last = performance.now();
      this.first ??= this.last;
      this.chunks += 1;
    }
  }

  summary(reason = this.reason) {
    const tokens = this.usage?.completion_tokens;
    const parts = tokens === undefined ? [] : [`${tokens} tokens`];
    const seconds = (this.last - this.first) / 1000;
    const count = tokens ?? this.chunks;
    if (count > 1 && seconds > 0) parts.push(`${((count - 1) / seconds).toFixed(1)} tokens/s`);
    if (this.first) parts.push(`first after ${Math.round(this.first - this.start)} ms`);
    if (this.usage?.prompt_tokens_details?.cached_tokens) {
      parts.push(`${this.usage.prompt_tokens_details.cached_tokens} prompt tokens cached`);
    }
    if (reason && reason !== "stop") parts.push(reason === "length" ? "length limit reached" : reason);
    return parts.join(" · ");
  }
}
