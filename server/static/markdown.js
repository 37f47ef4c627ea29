// Markdown from a model, shown while it is written. The text is not trusted: it only ever becomes
// text nodes in elements that are made here.
//
// Work is in proportion to the text. What is complete (a paragraph, a list item, a row, a line of
// code) is built once and left alone; only the piece that is being written is built again.

import { copyButton, make } from "./dom.js";
import { inline } from "./inline.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)(?:\s+#+)?\s*$/;
const RULE = /^ {0,3}(?:(?:\*\s*){3,}|(?:-\s*){3,}|(?:_\s*){3,})$/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])(?:( {1,4})(.*)|\s*)$/;
const QUOTE = /^ {0,3}> ?(.*)$/;
const TABLE_RULE = /^[\s|:-]*-[\s|:-]*$/;
const BEGUN_MARK = /^\s*(?:[-*+_#>|`~]+|\d{1,9}[.)]?)\s*$/;
/** Quotes and items inside one another; deeper ones are shown as text. */
const MOST_NESTED = 8;

/** Renders text that comes in pieces into an element. */
export class MarkdownStream {
  #blocks;
  #rest = "";

  /**
   * @param {HTMLElement} root
   * @param {(text: string) => void} [onComplete]  gets each piece that is complete, as plain text
   */
  constructor(root, onComplete) {
    this.#blocks = new Blocks(root, 0, onComplete);
  }

  /** @param {string} text */
  push(text) {
    const lines = (this.#rest + text).split("\n");
    this.#rest = /** @type {string} */ (lines.pop());
    for (const line of lines) this.#blocks.line(line);
    this.#blocks.preview(this.#rest);
  }

  /** Nothing comes after this. */
  end() {
    if (this.#rest !== "") this.#blocks.line(this.#rest);
    this.#rest = "";
    this.#blocks.end();
  }
}

/**
 * Lines that belong together and are not complete yet.
 *
 * @typedef {object} Unit
 * @property {"paragraph" | "quote" | "item"} kind
 * @property {string[]} lines
 * @property {number} indent  columns that the later lines of an item are indented by
 * @property {string} fence  of code inside an item, while that goes on
 */

/**
 * @typedef {object} Code
 * @property {string} fence
 * @property {Text} text
 * @property {number} lines  begun so far
 * @property {number} shown  characters of the last of them; -1 if that is complete
 */

/** Turns lines into blocks inside one element: the whole answer, a quote or a list item. */
class Blocks {
  #root;
  #depth;
  #onComplete;
  /** @type {Unit | null} */
  #unit = null;
  /** @type {Code | null} */
  #code = null;
  /** @type {{element: HTMLElement, ordered: boolean} | null} */
  #list = null;
  /** @type {{body: HTMLElement, align: string[]} | null} */
  #table = null;
  /** @type {ChildNode[]} */
  #previewed = [];

  /**
   * @param {HTMLElement} root
   * @param {number} depth
   * @param {(text: string) => void} [onComplete]
   */
  constructor(root, depth, onComplete) {
    this.#root = root;
    this.#depth = depth;
    this.#onComplete = onComplete;
  }

  /** @param {string} written */
  line(written) {
    const line = written.replace(/\r$/, "").replace(/^\t+/, (tabs) => "    ".repeat(tabs.length));
    this.#dropPreview();
    if (this.#code !== null) this.#codeLine(line, this.#code);
    else if (this.#unit?.kind === "item" && belongsToItem(line, this.#unit)) {
      addToItem(line, this.#unit);
    } else this.#start(line);
  }

  /** @param {{open?: boolean}} [options]  open: more is to come of what is shown last */
  end({ open = false } = {}) {
    this.#dropPreview();
    this.#closeUnit(open);
    this.#code = this.#list = this.#table = null;
  }

  /**
   * Show what is not complete, along with the line that is being written.
   *
   * @param {string} line
   */
  preview(line) {
    this.#dropPreview();
    if (this.#code !== null) {
      if (!/^ {0,3}[`~]*\s*$/.test(line)) showCode(line, this.#code);
      return;
    }
    // A copy goes on from here in earnest, and what it has added is taken away again later.
    const trial = new Blocks(this.#root, this.#depth);
    trial.#unit = this.#unit && { ...this.#unit, lines: [...this.#unit.lines] };
    trial.#list = this.#list;
    trial.#table = this.#table;
    const parents = [this.#root, this.#list?.element, this.#table?.body];
    const before = parents.map((parent) => parent?.lastChild ?? null);
    if (line.trim() !== "" && !BEGUN_MARK.test(line)) trial.line(line);
    trial.end({ open: true });
    parents.forEach((parent, index) => {
      let node = before[index] === null ? parent?.firstChild : before[index].nextSibling;
      for (; node; node = node.nextSibling) this.#previewed.push(node);
    });
  }

  #dropPreview() {
    for (const node of this.#previewed) node.remove();
    this.#previewed = [];
  }

  /** @param {string} line */
  #start(line) {
    if (line.trim() === "") {
      this.#closeUnit();
      this.#table = null;
      return;
    }
    if (this.#table !== null && line.includes("|")) {
      this.#row(this.#table, line);
      return;
    }
    this.#table = null;
    const fence = FENCE.exec(line);
    const heading = HEADING.exec(line);
    const item = ITEM.exec(line);
    const quote = QUOTE.exec(line);
    if (fence) this.#startCode(fence[1], fence[2].trim());
    else if (RULE.test(line)) this.#add(make("hr"));
    else if (heading) this.#heading(heading[1].length, heading[2]);
    else if (item && this.#depth < MOST_NESTED) this.#startItem(item);
    else if (quote && this.#depth < MOST_NESTED) this.#extend("quote", quote[1]);
    else if (!this.#startTable(line)) this.#extend("paragraph", line);
  }

  /**
   * A line more of a paragraph or quote, which begins with it if there is none.
   *
   * @param {"paragraph" | "quote"} kind
   * @param {string} line
   */
  #extend(kind, line) {
    const lazy = this.#unit?.kind === "quote" && kind === "paragraph";
    if (this.#unit !== null && (this.#unit.kind === kind || lazy)) {
      this.#unit.lines.push(line);
      return;
    }
    this.#closeUnit();
    this.#list = null;
    this.#unit = { kind, lines: [line], indent: 0, fence: "" };
  }

  /** @param {RegExpExecArray} found */
  #startItem([, indent, mark, space = " ", text = ""]) {
    this.#closeUnit();
    const ordered = mark.length > 1;
    if (this.#list === null || this.#list.ordered !== ordered) {
      const start = ordered ? String(Number.parseInt(mark, 10)) : null;
      const element = ordered ? make("ol", { start }) : make("ul");
      this.#root.append(element);
      this.#list = { element, ordered };
    }
    const width = indent.length + mark.length + space.length;
    this.#unit = { kind: "item", lines: [], indent: width, fence: "" };
    addToItem(text, this.#unit);
  }

  /** @param {boolean} [open] */
  #closeUnit(open = false) {
    const unit = this.#unit;
    this.#unit = null;
    if (unit === null) return;
    let element;
    if (unit.kind === "paragraph") {
      const text = unit.lines.map((line) => line.trimStart()).join("\n");
      element = make("p", {}, ...inline(text, { open }));
    } else {
      element = make(unit.kind === "item" ? "li" : "blockquote");
      const inside = new Blocks(element, this.#depth + 1);
      for (const line of unit.lines) inside.line(line);
      inside.end({ open });
    }
    const parent = unit.kind === "item" ? this.#list?.element : this.#root;
    (parent ?? this.#root).append(element);
    this.#complete(element);
  }

  /** @param {HTMLElement} element */
  #add(element) {
    this.#closeUnit();
    this.#list = null;
    this.#root.append(element);
    this.#complete(element);
  }

  /** @param {HTMLElement} element */
  #complete(element) {
    this.#onComplete?.(element.textContent ?? "");
  }

  /**
   * @param {number} level
   * @param {string} text
   */
  #heading(level, text) {
    // The page has the first two levels to itself.
    const tag = /** @type {"h3"} */ (`h${Math.min(level + 2, 6)}`);
    this.#add(make(tag, {}, ...inline(text)));
  }

  // ---------------------------------------------------------------- code

  /**
   * @param {string} fence
   * @param {string} language
   */
  #startCode(fence, language) {
    const text = document.createTextNode("");
    const button = copyButton(() => text.data, "Copy code");
    const name = make("span", {}, language.split(/\s/, 1)[0] || "code");
    const code = make("pre", { tabindex: "0", "aria-label": "Code" }, make("code", {}, text));
    this.#closeUnit();
    this.#list = null;
    this.#root.append(
      make("figure", { class: "code" }, make("figcaption", {}, name, button), code),
    );
    this.#code = { fence, text, lines: 0, shown: -1 };
  }

  /**
   * @param {string} line
   * @param {Code} code
   */
  #codeLine(line, code) {
    if (closes(line, code.fence)) {
      this.#onComplete?.(`Code, ${code.lines} lines.`);
      this.#code = null;
      return;
    }
    showCode(line, code);
    code.shown = -1;
  }

  // ---------------------------------------------------------------- tables

  /**
   * True if the line makes the one before it the head of a table.
   *
   * @param {string} line
   */
  #startTable(line) {
    const head = this.#unit?.kind === "paragraph" ? this.#unit.lines.at(-1) : undefined;
    if (!head?.includes("|") || !line.includes("|") || !TABLE_RULE.test(line)) return false;
    const align = cells(line).map(alignment);
    const titles = cells(head);
    if (titles.length !== align.length) return false;
    this.#unit?.lines.pop();
    if (this.#unit?.lines.length === 0) this.#unit = null;
    const body = make("tbody");
    const row = make("tr", {}, ...titles.map((text, i) => cell("th", text, align[i])));
    const table = make("table", {}, make("thead", {}, row), body);
    this.#add(make("div", { class: "table", tabindex: "0", "aria-label": "Table" }, table));
    this.#table = { body, align };
    return true;
  }

  /**
   * @param {{body: HTMLElement, align: string[]}} table
   * @param {string} line
   */
  #row({ body, align }, line) {
    const texts = cells(line);
    const row = make("tr", {}, ...align.map((side, i) => cell("td", texts[i] ?? "", side)));
    body.append(row);
    this.#complete(row);
  }
}

/**
 * @param {string} line
 * @param {Unit} unit
 */
function belongsToItem(line, unit) {
  if (unit.fence !== "" || line.trim() === "" || /^ {2}/.test(line)) return true;
  const begins = [FENCE, RULE, HEADING, ITEM, QUOTE].some((pattern) => pattern.test(line));
  return !begins && unit.lines.at(-1)?.trim() !== "";
}

/**
 * @param {string} line
 * @param {Unit} unit
 */
function addToItem(line, unit) {
  const indent = Math.min(unit.indent, line.length - line.trimStart().length);
  const text = line.slice(indent);
  unit.lines.push(text);
  if (unit.fence === "") unit.fence = FENCE.exec(text)?.[1] ?? "";
  else if (closes(text, unit.fence)) unit.fence = "";
}

/**
 * @param {string} line
 * @param {string} fence
 */
function closes(line, fence) {
  const text = line.trim();
  return text.length >= fence.length && text === fence[0].repeat(text.length);
}

/**
 * Append what is not shown yet of the line that is being written.
 *
 * @param {string} line
 * @param {Code} code
 */
function showCode(line, code) {
  if (code.shown < 0) {
    code.text.appendData(code.lines === 0 ? "" : "\n");
    code.lines += 1;
    code.shown = 0;
  }
  code.text.appendData(line.slice(code.shown));
  code.shown = line.length;
}

/** @param {string} line */
function cells(line) {
  const inner = line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "");
  return inner.split(/(?<!\\)\|/).map((text) => text.trim().replaceAll("\\|", "|"));
}

/** @param {string} rule */
function alignment(rule) {
  if (!rule.endsWith(":")) return "";
  return rule.startsWith(":") ? "center" : "right";
}

/**
 * @param {"th" | "td"} tag
 * @param {string} text
 * @param {string} align
 */
function cell(tag, text, align) {
  return make(tag, { class: align || null }, ...inline(text));
}
