// One message of the chat on the page.

import { copyButton, make, setText } from "./dom.js";
import { MarkdownStream } from "./markdown.js";

/** A share of the time at most goes into rendering, however fast or long an answer is. */
const REST_PER_WORK = 6;

/** What the user has said. It can be changed, which asks again from there. */
export class UserMessage {
  /** @param {string} text @param {(text: string) => void} onEdit */
  constructor(text, onEdit) {
    this.text = text;
    this.onEdit = onEdit;
    this.said = make("div", { class: "said" }, text);
    const edit = make("button", { type: "button", class: "quiet" }, "Edit");
    edit.addEventListener("click", () => this.#edit());
    this.actions = make("footer", { class: "actions" }, copyButton(() => text), edit);
    this.element = make(
      "article",
      { class: "message user", "aria-label": "You" },
      this.said,
      this.actions,
    );
  }

  #edit() {
    const area = make("textarea", { "aria-label": "Your message" });
    area.value = this.text;
    area.rows = Math.min(10, this.text.split("\n").length + 1);
    const send = make("button", { type: "submit", class: "primary" }, "Send again");
    const cancel = make("button", { type: "button" }, "Cancel");
    const form = make("form", { class: "edit" }, area, make("div", {}, send, cancel));
    const leave = () => {
      form.replaceWith(this.said);
      this.actions.hidden = false;
    };
    cancel.addEventListener("click", leave);
    form.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        event.stopPropagation(); // it would stop an answer
        leave();
      }
      if (sendsNow(event)) form.requestSubmit();
    });
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (area.value.trim() !== "") this.onEdit(area.value);
    });
    this.said.replaceWith(form);
    this.actions.hidden = true;
    area.focus();
  }
}

/** What the model says, while it does. */
export class AnswerMessage {
  #body = make("div", { class: "body" });
  #thought = make("div", { class: "thought" });
  #thinking = make("details", { hidden: true }, make("summary", {}, "Thinking"), this.#thought);
  #error = make("div", { class: "error", role: "alert", hidden: true });
  #facts = make("span", { class: "facts" });
  #note = make("p", { class: "note", hidden: true });
  #markdown;
  #pending = "";
  #notBefore = 0;
  #scheduled = 0;
  #onGrow;
  text = "";

  /**
   * @param {{onRetry: () => void, onGrow: () => void, announce: (text: string) => void}} callbacks
   */
  constructor({ onRetry, onGrow, announce }) {
    this.#onGrow = onGrow;
    this.#markdown = new MarkdownStream(this.#body, announce);
    const retry = () => {
      const button = make("button", { type: "button", class: "quiet" }, "Retry");
      button.addEventListener("click", onRetry);
      return button;
    };
    this.retryError = retry();
    this.actions = make("footer", { class: "actions" }, copyButton(() => this.text), retry());
    this.actions.append(this.#facts);
    this.element = make(
      "article",
      { class: "message answer waiting", "aria-label": "Model", "aria-busy": "true" },
      this.#thinking,
      this.#body,
      this.#note,
      this.#error,
      this.actions,
    );
  }

  /** @param {string} text */
  think(text) {
    this.#started();
    this.#thinking.hidden = false;
    this.#thought.append(text);
    this.#onGrow();
  }

  /** @param {string} text */
  write(text) {
    this.#started();
    this.text += text;
    this.#pending += text;
    if (this.#scheduled === 0) this.#scheduled = requestAnimationFrame(() => this.#flush());
  }

  /** @param {string} text  tokens, speed and such */
  setFacts(text) {
    setText(this.#facts, text);
  }

  /** @param {string} [note]  why it ended, if that is of interest */
  end(note = "") {
    cancelAnimationFrame(this.#scheduled);
    if (this.#pending !== "") this.#markdown.push(this.#pending);
    this.#pending = "";
    this.#markdown.end();
    this.#started();
    this.element.removeAttribute("aria-busy");
    setText(this.#note, note);
    this.#note.hidden = note === "";
    this.#onGrow();
  }

  /** @param {string} message */
  fail(message) {
    this.end();
    this.#error.replaceChildren(make("span", {}, message), this.retryError);
    this.#error.hidden = false;
    this.#onGrow();
  }

  #started() {
    this.element.classList.remove("waiting");
  }

  #flush() {
    const began = performance.now();
    if (began < this.#notBefore) {
      this.#scheduled = requestAnimationFrame(() => this.#flush());
      return;
    }
    this.#scheduled = 0;
    this.#markdown.push(this.#pending);
    this.#pending = "";
    this.#onGrow();
    this.#notBefore = performance.now() + REST_PER_WORK * (performance.now() - began);
  }
}

/** Enter, unless it is part of something else. @param {KeyboardEvent} event */
export function sendsNow(event) {
  return event.key === "Enter" && !event.shiftKey && !event.isComposing;
}
