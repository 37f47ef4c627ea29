// A few real prompts at once, so that there is something to see: they begin alike, and so share the
// blocks of their beginning. All in one request: a browser has few connections to one server.

import { ApiError } from "./api.js";
import { byId, plural, setText } from "./dom.js";
import { inWords } from "./chat.js";
import { readEvents } from "./sse.js";

const MOST_TOKENS = 160;
const BEGINNING =
  "The following are questions of a curious child, each with the answer of a patient teacher, " +
  "who explains things in plain words, gives one short example, and never uses a term without " +
  "saying what it means.\n\nQuestion: ";
const QUESTIONS = [
  "Why is the sky blue?",
  "What is a prime number?",
  "How does a bicycle stay upright?",
  "What does a compiler do?",
  "Why do leaves change colour?",
  "What is the difference between weather and climate?",
  "How does a vaccine work?",
  "What is a black hole?",
  "Why is bread soft?",
  "How do birds find their way?",
  "What is inflation?",
  "Why does ice float?",
];

export class Traffic {
  #api;
  /** Prompts without a complete answer. */
  #open = 0;
  #stop = new AbortController();

  /** @param {import("./api.js").Api} api */
  constructor(api) {
    this.#api = api;
    byId("traffic").addEventListener("submit", (/** @type {Event} */ event) => {
      event.preventDefault();
      this.#send(byId("traffic-count").valueAsNumber);
    });
    byId("traffic-stop").addEventListener("click", () => {
      this.#stop.abort();
      this.#stop = new AbortController();
    });
  }

  /** @param {number} number */
  async #send(number) {
    const { signal } = this.#stop;
    const first = Math.floor(Math.random() * QUESTIONS.length);
    const prompt = Array.from({ length: number }, (_, i) => {
      return `${BEGINNING}${QUESTIONS[(first + i) % QUESTIONS.length]}\nAnswer:`;
    });
    const model = byId("model").value || undefined;
    const body = { model, prompt, max_tokens: MOST_TOKENS, stream: true };
    let open = number;
    let failure = "";
    this.#count(number);
    try {
      const response = await this.#api.call("v1/completions", { body, signal });
      if (response.body === null) throw new ApiError("The answer has no body.");
      for await (const { data } of readEvents(response.body)) {
        if (data === "[DONE]") break;
        const { error, choices } = JSON.parse(data);
        if (error) throw new ApiError(String(error.message));
        for (const { finish_reason: reason } of choices ?? []) {
          if (!reason) continue;
          open -= 1;
          this.#count(-1);
        }
      }
    } catch (error) {
      if (!signal.aborted) failure = inWords(error);
    } finally {
      this.#count(-open, failure);
    }
  }

  /** @param {number} change @param {string} [failure] */
  #count(change, failure = "") {
    this.#open += change;
    byId("traffic-stop").hidden = this.#open === 0;
    const going = this.#open > 0 ? `${plural(this.#open, "answer")} to come` : "";
    setText(byId("traffic-note"), failure || going);
  }
}
