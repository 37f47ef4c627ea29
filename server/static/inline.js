// The text of a paragraph as nodes: emphasis, code, links. Linear in the length of the text.

import { make } from "./dom.js";

const MOST_URL = 2048;
const MOST_OPENERS = 200;
/** What follows the text of a link: its address, maybe a title, and the closing bracket. */
const TARGET = /^\s*<?([^\s<>()]*(?:\([^\s<>()]*\)[^\s<>()]*)*)>?(?:\s+["'(][^"')\n]*["')])?\s*\)/;

/** Marks that open and close something, longest first. */
const MARKS = ["***", "**", "__", "~~", "*", "_"];
/** @type {Record<string, string[]>} */
const TAGS = {
  "***": ["strong", "em"],
  "**": ["strong"],
  __: ["strong"],
  "~~": ["del"],
  "*": ["em"],
  _: ["em"],
};

/**
 * @typedef {object} Opener
 * @property {string} mark
 * @property {number} at  index in the list of nodes
 */

/**
 * @param {string} text
 * @param {{open?: boolean}} [options]  open: the text goes on; show what has begun as if it ended
 * @returns {(Node | string)[]}
 */
export function inline(text, { open = false } = {}) {
  return new InlineParser(text, open).run();
}

class InlineParser {
  #text;
  #open;
  #at = 0;
  #plain = "";
  /** @type {(Node | string)[]} */
  #nodes = [];
  /** @type {Opener[]} */
  #openers = [];
  /** Lengths of runs of backticks that nothing closes any more. */
  #unclosed = new Set();

  /**
   * @param {string} text
   * @param {boolean} open
   */
  constructor(text, open) {
    this.#text = text;
    this.#open = open;
  }

  run() {
    const special = /[\\`*_~[\]!\n]|https?:\/\//g;
    while (this.#at < this.#text.length) {
      special.lastIndex = this.#at;
      const found = special.exec(this.#text);
      const end = found === null ? this.#text.length : found.index;
      this.#plain += this.#text.slice(this.#at, end);
      this.#at = end;
      if (found !== null && !this.#take(found[0])) this.#literal(found[0].length);
    }
    this.#flush();
    if (this.#open) this.#closeAll();
    return this.#nodes;
  }

  /** @param {string} sign */
  #take(sign) {
    switch (sign) {
      case "\\":
        return this.#escape();
      case "`":
        return this.#code();
      case "\n":
        return this.#lineBreak();
      case "[":
        return this.#opening("[");
      case "!":
        // An image would be fetched from elsewhere: its description stands as a link instead.
        return this.#text[this.#at + 1] === "[" && this.#opening("![");
      case "]":
        return this.#link();
      case "*":
      case "_":
      case "~":
        return this.#emphasis();
      default:
        return this.#bareUrl();
    }
  }

  /** @param {number} length */
  #literal(length) {
    this.#plain += this.#text.slice(this.#at, this.#at + length);
    this.#at += length;
    return true;
  }

  #flush() {
    if (this.#plain !== "") this.#nodes.push(this.#plain);
    this.#plain = "";
  }

  /**
   * What begins here may or may not end; until it does it is text like any other.
   *
   * @param {string} mark
   */
  #opening(mark) {
    if (this.#openers.length >= MOST_OPENERS) this.#openers.splice(0, MOST_OPENERS / 2);
    this.#flush();
    this.#openers.push({ mark, at: this.#nodes.length });
    return this.#literal(mark.length);
  }

  #escape() {
    const next = this.#text[this.#at + 1];
    if (next === undefined || !/[!-/:-@[-`{-~]/.test(next)) return false;
    this.#plain += next;
    this.#at += 2;
    return true;
  }

  #lineBreak() {
    const hard = this.#plain.endsWith("  ");
    this.#plain = this.#plain.trimEnd();
    if (!hard) return this.#literal(1);
    this.#flush();
    this.#nodes.push(make("br"));
    this.#at += 1;
    return true;
  }

  #code() {
    const length = runLength(this.#text, this.#at, "`");
    const start = this.#at + length;
    const end = this.#unclosed.has(length) ? -1 : this.#closingRun(start, length);
    if (end < 0) {
      this.#unclosed.add(length);
      if (!this.#open || length > 2 || start === this.#text.length) return this.#literal(length);
    }
    let code = this.#text.slice(start, end < 0 ? undefined : end).replaceAll("\n", " ");
    if (/^ .*[^ ].* $/.test(code)) code = code.slice(1, -1);
    this.#flush();
    this.#nodes.push(make("code", {}, code));
    this.#at = end < 0 ? this.#text.length : end + length;
    return true;
  }

  /**
   * @param {number} from
   * @param {number} length
   */
  #closingRun(from, length) {
    for (let at = this.#text.indexOf("`", from); at >= 0; at = this.#text.indexOf("`", at)) {
      const run = runLength(this.#text, at, "`");
      if (run === length) return at;
      at += run;
    }
    return -1;
  }

  #emphasis() {
    const sign = this.#text[this.#at];
    const run = runLength(this.#text, this.#at, sign);
    const mark = MARKS.find((m) => m[0] === sign && m.length <= run);
    if (mark === undefined || run > 3) return this.#literal(run);
    const before = this.#text[this.#at - 1] ?? " ";
    const after = this.#text[this.#at + mark.length] ?? " ";
    const canOpen = !/\s/.test(after) && !(sign === "_" && isWord(before));
    const canClose = !/\s/.test(before) && !(sign === "_" && isWord(after));
    if (canClose && this.#close(sign, run)) return true;
    return canOpen ? this.#opening(mark) : this.#literal(mark.length);
  }

  /**
   * @param {string} sign
   * @param {number} run  of such signs in a row
   */
  #close(sign, run) {
    const openers = this.#openers;
    let index = openers.findLastIndex(({ mark }) => mark[0] === sign && mark.length === run);
    if (index < 0) {
      index = openers.findLastIndex(({ mark }) => mark[0] === sign && mark.length < run);
    }
    if (index < 0) return false;
    this.#flush();
    this.#at += openers[index].mark.length;
    this.#wrap(openers[index]);
    openers.length = index; // what has begun inside and not ended stays as it was written
    return true;
  }

  /** Everything since the opener goes into its elements; the mark itself goes. */
  #wrap(/** @type {Opener} */ { mark, at }) {
    const inner = this.#nodes.splice(at);
    if (typeof inner[0] === "string") inner[0] = inner[0].slice(mark.length);
    let children = inner;
    for (const tag of TAGS[mark].toReversed()) {
      children = [make(/** @type {"em"} */ (tag), {}, ...children)];
    }
    this.#nodes.push(...children);
  }

  #closeAll() {
    for (const opener of this.#openers.toReversed()) {
      const strong = opener.mark === "**" || opener.mark === "***";
      if (strong && this.#nodes.length > opener.at) this.#wrap(opener);
    }
  }

  #link() {
    const index = this.#openers.findLastIndex(({ mark }) => mark.endsWith("["));
    if (index < 0) return false;
    const { at, mark } = this.#openers[index];
    this.#openers.length = index;
    if (this.#text[this.#at + 1] !== "(") return false;
    const rest = this.#text.slice(this.#at + 2, this.#at + 2 + MOST_URL);
    const found = TARGET.exec(rest);
    const url = found && webUrl(found[1]);
    if (!found || !url) return false;
    this.#flush();
    const inner = this.#nodes.splice(at);
    if (typeof inner[0] === "string") inner[0] = inner[0].slice(mark.length);
    this.#nodes.push(anchor(url, inner));
    this.#at += 2 + found[0].length;
    return true;
  }

  #bareUrl() {
    const rest = this.#text.slice(this.#at, this.#at + MOST_URL);
    const found = /^https?:\/\/[^\s<>"'`\\^{|}[\]*]+/.exec(rest);
    const written = found?.[0].replace(/[.,;:!?)_]+$/, "");
    const url = written && webUrl(written);
    if (!written || !url) return false;
    this.#flush();
    this.#nodes.push(anchor(url, [written]));
    this.#at += written.length;
    return true;
  }
}

/**
 * @param {string} text
 * @param {number} at
 * @param {string} sign
 */
function runLength(text, at, sign) {
  let end = at;
  while (text[end] === sign) end += 1;
  return end - at;
}

/** @param {string} sign */
function isWord(sign) {
  return /[\p{L}\p{N}_]/u.test(sign);
}

/**
 * An absolute address of the web, or null: no other scheme, and nothing on this very server.
 *
 * @param {string} text
 */
function webUrl(text) {
  if (!/^https?:\/\//i.test(text)) return null;
  try {
    const url = new URL(text);
    return url.protocol === "http:" || url.protocol === "https:" ? url.href : null;
  } catch {
    return null;
  }
}

/**
 * @param {string} url
 * @param {(Node | string)[]} children
 */
function anchor(url, children) {
  return make("a", { href: url, target: "_blank", rel: "noopener noreferrer" }, ...children);
}
