// The conversation: what is sent, what streams back, and what may be done about it.

import { ApiError } from "./api.js";
import { byId, count, make, setText } from "./dom.js";
import { AnswerMessage, UserMessage, sendsNow } from "./message.js";
import { readEvents } from "./sse.js";

const NEAR_BOTTOM = 60;
const MOST_ANNOUNCED = 20;
/** Milliseconds; a rate over less says nothing. */
const SHORTEST_MEASURE = 100;
/** Seconds until a server that is loading its model is asked again. */
const MOST_WAIT = 3;

/**
 * @typedef {object} Turn
 * @property {"user" | "assistant"} role
 * @property {string} content
 * @property {HTMLElement} element
 *
 * @typedef {object} Progress
 * @property {number} sent  when, in milliseconds
 * @property {number} first  when the first text came; 0: none has
 * @property {number} last
 * @property {any} usage
 * @property {string | null} reason  why it ended
 */

export class Chat {
  #api;
  #onOwn;
  /** @type {Turn[]} */
  #turns = [];
  /** @type {AbortController | null} */
  #running = null;
  #log = byId("log");
  #prompt = byId("prompt");

  /**
   * @param {import("./api.js").Api} api
   * @param {(id: string, active: boolean) => void} onOwn  a request of ours begins or ends
   */
  constructor(api, onOwn) {
    this.#api = api;
    this.#onOwn = onOwn;
    byId("composer").addEventListener("submit", (/** @type {Event} */ event) => {
      event.preventDefault();
      this.#submit();
    });
    this.#prompt.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => {
      if (!sendsNow(event)) return;
      event.preventDefault();
      this.#submit();
    });
    this.#prompt.addEventListener("input", () => this.#fitPrompt());
    byId("stop").addEventListener("click", () => this.#running?.abort());
    byId("new-chat").addEventListener("click", () => this.#truncate(0));
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && !document.querySelector("dialog[open]")) this.#running?.abort();
    });
    for (const example of document.querySelectorAll("#welcome [data-prompt]")) {
      example.addEventListener("click", () => {
        this.#prompt.value = /** @type {HTMLElement} */ (example).dataset.prompt ?? "";
        this.#submit();
      });
    }
  }

  async loadModels() {
    const select = byId("model");
    try {
      const response = await this.#api.call("v1/models");
      const { data } = await response.json();
      /** @type {string[]} */
      const ids = data.map((/** @type {{id: string}} */ { id }) => id);
      select.replaceChildren(...ids.map((id) => make("option", { value: id }, shortName(id))));
      select.title = ids.join(", ");
      select.disabled = false;
      const length = data[0]?.max_model_len;
      const limit = byId("max-tokens");
      if (length) limit.max = String(length);
      if (limit.valueAsNumber > length) limit.value = ""; // all that fit
      setText(byId("composer-note"), "");
    } catch (error) {
      select.replaceChildren(make("option", { value: "" }, "no model yet"));
      setText(byId("composer-note"), inWords(error));
      if (!(error instanceof ApiError) || error.status !== 503) return;
      setTimeout(() => this.loadModels(), 1000 * Math.min(error.retryAfter ?? 1, MOST_WAIT));
    }
  }

  #submit() {
    const text = this.#prompt.value;
    if (text.trim() === "" || this.#running !== null || !this.#samplingIsValid()) return;
    this.#prompt.value = "";
    this.#fitPrompt();
    this.#say(text);
  }

  #samplingIsValid() {
    const form = byId("sampling");
    if (form.checkValidity()) return true;
    byId("sampling-box").open = true;
    form.reportValidity();
    return false;
  }

  /** @param {string} text */
  #say(text) {
    const index = this.#turns.length;
    const message = new UserMessage(text, (changed) => {
      this.#truncate(index);
      this.#say(changed);
    });
    this.#add({ role: "user", content: text, element: message.element });
    this.#answer();
  }

  /** @param {Turn} turn */
  #add(turn) {
    byId("welcome").hidden = true;
    this.#turns.push(turn);
    this.#log.append(turn.element);
    this.#scrollDown(true);
  }

  /** Forget this turn and all that came after it. @param {number} length */
  #truncate(length) {
    this.#running?.abort();
    this.#running = null;
    for (const { element } of this.#turns.splice(length)) element.remove();
    byId("welcome").hidden = this.#turns.length > 0;
    this.#showRunning(false);
    if (length === 0) this.#prompt.focus();
  }

  // ---------------------------------------------------------------- one answer

  async #answer() {
    const index = this.#turns.length;
    const controller = new AbortController();
    const message = new AnswerMessage({
      onRetry: () => {
        this.#truncate(index);
        this.#answer();
      },
      onGrow: () => this.#scrollDown(false),
      announce,
    });
    const body = this.#body();
    /** @type {Turn} */
    const turn = { role: "assistant", content: "", element: message.element };
    this.#running = controller;
    this.#showRunning(true);
    this.#add(turn);
    /** @type {Progress} */
    const progress = { sent: performance.now(), first: 0, last: 0, usage: null, reason: null };
    try {
      await this.#stream(body, message, progress, controller.signal);
      message.end(progress.reason === "length" ? "Cut off at the token limit." : "");
      announce("The answer is complete.");
    } catch (error) {
      if (controller.signal.aborted) message.end("Stopped.");
      else message.fail(inWords(error));
    } finally {
      turn.content = message.text;
      message.setFacts(figures(progress));
      if (this.#running === controller) {
        this.#running = null;
        this.#showRunning(false);
      }
    }
  }

  /**
   * @param {unknown} body
   * @param {AnswerMessage} message
   * @param {Progress} progress
   * @param {AbortSignal} signal
   */
  async #stream(body, message, progress, signal) {
    const id = randomId();
    const own = new Set([id]);
    this.#onOwn(id, true);
    try {
      const response = await this.#api.call("v1/chat/completions", { body, signal, id });
      if (response.body === null) throw new ApiError("The answer has no body.");
      for await (const { data } of readEvents(response.body)) {
        if (data === "[DONE]") return;
        const chunk = JSON.parse(data);
        if (chunk.error) throw new ApiError(String(chunk.error.message ?? "The request failed."));
        if (typeof chunk.id === "string" && !own.has(chunk.id)) {
          own.add(chunk.id);
          this.#onOwn(chunk.id, true);
        }
        take(chunk, message, progress);
      }
      throw new ApiError("The connection was lost before the answer was complete.");
    } catch (error) {
      if (error instanceof ApiError || signal.aborted) throw error;
      throw new ApiError("The connection was lost before the answer was complete.");
    } finally {
      for (const each of own) this.#onOwn(each, false);
    }
  }

  #body() {
    const system = byId("system").value;
    /** @type {{role: string, content: string}[]} */
    const messages = this.#turns.map(({ role, content }) => ({ role, content }));
    if (system.trim() !== "") messages.unshift({ role: "system", content: system });
    return {
      model: byId("model").value || undefined,
      messages,
      stream: true,
      stream_options: { include_usage: true, continuous_usage_stats: true },
      temperature: numberIn("temperature"),
      top_p: numberIn("top-p"),
      top_k: numberIn("top-k"),
      seed: numberIn("seed"),
      max_completion_tokens: numberIn("max-tokens"),
    };
  }

  // ---------------------------------------------------------------- looks

  /** @param {boolean} running */
  #showRunning(running) {
    const hadFocus = document.activeElement === byId(running ? "send" : "stop");
    byId("send").hidden = running;
    byId("stop").hidden = !running;
    if (hadFocus) (running ? byId("stop") : this.#prompt).focus();
    setText(byId("composer-note"), "");
  }

  /** @param {boolean} always */
  #scrollDown(always) {
    const box = byId("log-scroll");
    const far = box.scrollHeight - box.scrollTop - box.clientHeight;
    if (always || far < NEAR_BOTTOM + 200) box.scrollTop = box.scrollHeight;
  }

  #fitPrompt() {
    this.#prompt.style.height = "auto";
    this.#prompt.style.height = `${this.#prompt.scrollHeight + 2}px`;
  }
}

/**
 * @param {any} chunk
 * @param {AnswerMessage} message
 * @param {Progress} progress
 */
function take(chunk, message, progress) {
  const choice = chunk.choices?.[0];
  if (chunk.usage) progress.usage = chunk.usage;
  const thought = choice?.delta?.reasoning ?? choice?.delta?.reasoning_content;
  const text = choice?.delta?.content;
  if (thought || text) {
    progress.last = performance.now();
    if (progress.first === 0) progress.first = progress.last;
  }
  if (thought) message.think(thought);
  if (text) message.write(text);
  if (choice?.finish_reason) progress.reason = choice.finish_reason;
  message.setFacts(figures(progress));
}

/** @param {Progress} progress */
function figures({ sent, first, last, usage }) {
  const parts = [];
  const tokens = usage?.completion_tokens ?? 0;
  if (tokens > 0) parts.push(`${count(tokens)} tokens`);
  if (tokens > 1 && last - first > SHORTEST_MEASURE) {
    parts.push(`${((1000 * (tokens - 1)) / (last - first)).toFixed(1)} tokens/s`);
  }
  if (first > 0) parts.push(`first after ${((first - sent) / 1000).toFixed(2)} s`);
  if (usage?.prompt_tokens) {
    const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    const from = cached > 0 ? `, ${count(cached)} of them cached` : "";
    parts.push(`prompt ${count(usage.prompt_tokens)}${from}`);
  }
  return parts.join(" · ");
}

/** For those who listen rather than look. @param {string} text */
function announce(text) {
  const region = byId("announcer");
  region.append(make("p", {}, text));
  while (region.children.length > MOST_ANNOUNCED) region.firstElementChild?.remove();
}

/** @param {string} id  of an input @returns {number | undefined} */
function numberIn(id) {
  const value = byId(id).valueAsNumber;
  return Number.isNaN(value) ? undefined : value;
}

/** @param {string} id  of a model, maybe a long path */
function shortName(id) {
  return id.length > 40 ? (id.split("/").at(-1) ?? id) : id;
}

/** @param {unknown} error */
export function inWords(error) {
  if (!(error instanceof ApiError)) return `Something went wrong on this page: ${error}`;
  const wait = error.retryAfter === null ? "" : ` Try again in ${error.retryAfter} s.`;
  return /try again/i.test(error.message) ? error.message : error.message + wait;
}

function randomId() {
  const bytes = crypto.getRandomValues(new Uint8Array(8));
  return [...bytes].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}
