// Server-sent events read with fetch: unlike EventSource that can send a key in a header, POST,
// and be stopped.

/**
 * @typedef {object} ServerEvent
 * @property {string} event  its type, "message" if the server names none
 * @property {string} data
 */

/** Cuts text that comes in arbitrary pieces into events. Lines may end in LF, CRLF or CR. */
export class EventParser {
  #rest = "";
  #event = "";
  /** @type {string[]} */
  #data = [];
  #afterCarriageReturn = false;

  /**
   * @param {string} text
   * @returns {ServerEvent[]} the events that it completes
   */
  push(text) {
    /** @type {ServerEvent[]} */
    const complete = [];
    if (text === "") return complete;
    // A CR at the very end of the last piece may have been half of a CRLF.
    let start = this.#afterCarriageReturn && text[0] === "\n" ? 1 : 0;
    this.#afterCarriageReturn = text.endsWith("\r");
    const ending = /\r\n|\r|\n/g;
    ending.lastIndex = start;
    for (let found = ending.exec(text); found !== null; found = ending.exec(text)) {
      const line = this.#rest + text.slice(start, found.index);
      this.#rest = "";
      start = ending.lastIndex;
      this.#line(line, complete);
    }
    this.#rest += text.slice(start);
    return complete;
  }

  /**
   * @param {string} line
   * @param {ServerEvent[]} complete
   */
  #line(line, complete) {
    if (line === "") {
      if (this.#data.length > 0) {
        complete.push({ event: this.#event || "message", data: this.#data.join("\n") });
      }
      this.#event = "";
      this.#data = [];
      return;
    }
    const colon = line.indexOf(":");
    if (colon === 0) return; // a comment keeps the connection alive
    const name = colon < 0 ? line : line.slice(0, colon);
    let value = colon < 0 ? "" : line.slice(colon + 1);
    if (value.startsWith(" ")) value = value.slice(1);
    if (name === "event") this.#event = value;
    if (name === "data") this.#data.push(value);
  }
}

/**
 * The events of a response body. A last event without its blank line was cut off and is dropped.
 *
 * @param {ReadableStream<Uint8Array>} body
 * @returns {AsyncGenerator<ServerEvent, void, void>}
 */
export async function* readEvents(body) {
  const reader = body.getReader();
  const decoder = new TextDecoder(); // keeps the bytes of a character that is cut in two
  const parser = new EventParser();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      yield* parser.push(decoder.decode(value, { stream: true }));
    }
  } finally {
    reader.cancel().catch(() => {}); // whoever stops reading is not interested in the rest
  }
}
