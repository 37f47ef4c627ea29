// The block table of each running request: its pages in order, each with the block that holds it.

import { make, plural, setText } from "./dom.js";
import { nameOf } from "./pool.js";

/** A longer table is shown by its first and last pages, until the rest is asked for. */
const MOST_PAGES = 48;
const FIRST_PAGES = 16;
const MOST_REQUESTS = 24;

/** @typedef {import("./pool.js").Pool} Pool */
/** @typedef {import("./pool.js").Request} Request */

/**
 * @typedef {object} Card
 * @property {HTMLElement} item
 * @property {HTMLElement} name
 * @property {HTMLElement} you
 * @property {HTMLElement} facts
 * @property {HTMLButtonElement} head
 * @property {Group[]} groups
 * @property {boolean} whole  all pages are shown
 *
 * @typedef {object} Group
 * @property {HTMLElement} row
 * @property {HTMLElement} pages
 * @property {HTMLButtonElement} more
 * @property {Chip[]} chips
 *
 * @typedef {{item: HTMLElement, page: HTMLElement, block: HTMLElement, id: number}} Chip
 */

export class BlockTables {
  #pool;
  #list;
  #more;
  #onPick;
  /** @type {Map<number, Card>} */
  #cards = new Map();
  /** The request that is kept in view by a click. @type {number | null} */
  #pinned = null;
  /** Ends of the ids of the user's own requests. @type {Set<string>} */
  #own = new Set();

  /**
   * @param {Pool} pool
   * @param {HTMLElement} list
   * @param {HTMLElement} more  says how many requests are not shown
   * @param {(picked: {key: number | null, block: number | null}) => void} onPick
   *   what is pointed at: a request, one of its blocks, or nothing
   */
  constructor(pool, list, more, onPick) {
    this.#pool = pool;
    this.#list = list;
    this.#more = more;
    this.#onPick = onPick;
  }

  get pinned() {
    return this.#pinned;
  }

  /** @param {Set<string>} ids */
  setOwn(ids) {
    this.#own = ids;
  }

  /** @param {Request} request */
  isOwn({ id }) {
    return this.#own.has(id);
  }

  update() {
    const requests = [...this.#pool.requests.values()];
    const running = requests.filter(({ status }) => status === "running");
    const preempted = requests.filter(({ status }) => status === "preempted");
    const candidates = [...running, ...preempted];
    const own = candidates.filter((request) => this.isOwn(request));
    const others = candidates.filter((request) => !this.isOwn(request));
    const shown = [...own, ...others].slice(0, MOST_REQUESTS);
    const keys = new Set(shown.map(({ key }) => key));
    for (const [key, card] of this.#cards) {
      if (keys.has(key)) continue;
      card.item.remove();
      this.#cards.delete(key);
      if (this.#pinned === key) this.#pin(null);
    }
    shown.forEach((request, index) => {
      const card = this.#cards.get(request.key) ?? this.#makeCard(request);
      if (this.#list.children[index] !== card.item) {
        this.#list.insertBefore(card.item, this.#list.children[index] ?? null);
      }
      this.#updateCard(card, request);
    });
    const hidden = this.#pool.running + preempted.length - shown.length;
    const waiting = this.#pool.waiting - preempted.length;
    const notes = [];
    if (shown.length === 0) notes.push("No request is running.");
    if (hidden > 0) notes.push(`${plural(hidden, "more request")} not shown.`);
    if (waiting > 0) notes.push(`${plural(waiting, "request")} waiting for blocks or a turn.`);
    setText(this.#more, notes.join(" "));
  }

  /**
   * The page chips of a request that are in view, with the blocks that they stand for.
   *
   * @param {number} key
   * @returns {{element: Element, block: number}[]}
   */
  chips(key) {
    const groups = this.#cards.get(key)?.groups ?? [];
    return groups.flatMap(({ chips }) =>
      chips.map(({ block, id }) => ({ element: block, block: id })),
    );
  }

  /**
   * Mark the pages that lie in this block.
   *
   * @param {number | null} block
   */
  choose(block) {
    for (const { groups } of this.#cards.values()) {
      for (const { chips } of groups) {
        for (const chip of chips) {
          chip.item.classList.toggle("chosen", block !== null && block !== 0 && chip.id === block);
        }
      }
    }
  }

  /** @param {number | null} key */
  #pin(key) {
    this.#pinned = key;
    for (const [other, { head }] of this.#cards) {
      head.setAttribute("aria-pressed", String(other === key));
    }
    this.#onPick({ key, block: null });
  }

  /** @param {Request} request */
  #makeCard(request) {
    const { key, tables } = request;
    const name = make("span", { class: "request-id" }, nameOf(request));
    const you = make("span", { class: "tag", hidden: true }, "yours");
    const facts = make("span", { class: "facts" });
    const attributes = { type: "button", class: "request-head", "aria-pressed": "false" };
    const head = make("button", attributes, name, you, facts);
    const item = make("li", { class: "request" }, head);
    /** @type {Card} */
    const card = { item, name, you, facts, head, groups: [], whole: false };
    for (let group = 0; group < tables.length; group += 1) this.#makeGroup(card, key, group);
    const pick = () => this.#onPick({ key, block: null });
    const drop = () => this.#onPick({ key: this.#pinned, block: null });
    item.addEventListener("pointerover", ({ target }) => {
      this.#onPick({ key, block: blockOf(target) });
    });
    item.addEventListener("pointerleave", drop);
    head.addEventListener("focus", pick);
    head.addEventListener("blur", drop);
    head.addEventListener("click", () => this.#pin(this.#pinned === key ? null : key));
    this.#cards.set(key, card);
    return card;
  }

  /**
   * @param {Card} card
   * @param {number} key
   * @param {number} group
   */
  #makeGroup(card, key, group) {
    const window = this.#pool.windows[group] ?? null;
    const many = this.#pool.windows.length > 1;
    const label = window === null ? "full attention" : `window of ${window}`;
    const pages = make("ol", { class: "pages", "aria-label": `Pages, ${label}` });
    const more = make("button", { type: "button", class: "quiet", hidden: true });
    more.addEventListener("click", () => {
      card.whole = !card.whole;
      this.update();
    });
    const row = make("div", { class: "group" }, pages, more);
    if (many) row.prepend(make("span", { class: "group-name" }, label));
    pages.addEventListener("focusin", ({ target }) => {
      this.#onPick({ key, block: blockOf(target) });
    });
    pages.addEventListener("focusout", () => this.#onPick({ key: this.#pinned, block: null }));
    pages.addEventListener("keydown", moveFocus);
    card.item.append(row);
    card.groups.push({ row, pages, more, chips: [] });
  }

  /**
   * @param {Card} card
   * @param {Request} request
   */
  #updateCard(card, request) {
    card.you.hidden = !this.isOwn(request);
    setText(card.facts, describe(request));
    card.item.classList.toggle("preempted", request.status === "preempted");
    while (card.groups.length < request.tables.length) {
      this.#makeGroup(card, request.key, card.groups.length);
    }
    card.groups.forEach((group, index) => {
      const table = request.tables[index] ?? [];
      const long = table.length > MOST_PAGES;
      group.more.hidden = !long;
      if (long) {
        const left = table.length - MOST_PAGES;
        setText(group.more, card.whole ? "Show fewer" : `Show ${left} more pages`);
      }
      const pages = pagesToShow(table.length, card.whole);
      this.#updateChips(group, request, table, pages);
    });
  }

  /**
   * @param {Group} group
   * @param {Request} request
   * @param {number[]} table
   * @param {number[]} pages
   */
  #updateChips({ chips, pages: list }, request, table, pages) {
    while (chips.length > pages.length) chips.pop()?.item.remove();
    while (chips.length < pages.length) {
      const page = make("span", { class: "page-number" });
      const block = make("span", { class: "block" });
      const item = make("li", { tabindex: chips.length === 0 ? "0" : "-1" }, page, block);
      list.append(item);
      chips.push({ item, page, block, id: -1 });
    }
    const size = this.#pool.blockSize;
    pages.forEach((page, index) => {
      const chip = chips[index];
      const id = table[page];
      const state = this.#pool.state(id);
      const filled = Math.min(1, Math.max(0, (request.computed - page * size) / size));
      chip.id = id;
      setText(chip.page, String(page));
      setText(chip.block, id === 0 ? "–" : String(id));
      const skips = index > 0 && pages[index - 1] !== page - 1;
      setClass(chip.item, skips ? "after-gap" : "");
      setClass(chip.block, `block ${state}${filled < 1 ? " partial" : ""}`);
      chip.block.style.setProperty("--filled", `${Math.round(filled * 100)}%`);
      const label = id === 0
        ? `Page ${page}: behind the window, its block was given back`
        : `Page ${page}: block ${id}, ${state}`;
      if (chip.item.getAttribute("aria-label") !== label) {
        chip.item.setAttribute("aria-label", label);
        chip.item.dataset.block = String(id);
      }
    });
  }
}

/** @param {Request} request */
function describe(request) {
  const { status, tokens, prompt, computed, cached, preemptions } = request;
  const parts = [`${prompt} prompt${cached > 0 ? ` (${cached} from cache)` : ""}`];
  if (status === "preempted") parts.push("gave its blocks back, waits to be recomputed");
  else if (tokens === prompt && computed < prompt) parts.push(`${computed} computed`);
  else parts.push(`+ ${tokens - prompt} written`);
  if (preemptions > 0) parts.push(`preempted ${preemptions}×`);
  return parts.join(" · ");
}

/**
 * @param {number} length
 * @param {boolean} whole
 */
function pagesToShow(length, whole) {
  const pages = [...Array(length).keys()];
  if (whole || length <= MOST_PAGES) return pages;
  return [...pages.slice(0, FIRST_PAGES), ...pages.slice(length - (MOST_PAGES - FIRST_PAGES))];
}

/**
 * @param {Element} element
 * @param {string} name
 */
function setClass(element, name) {
  if (element.className !== name) element.className = name;
}

/** @param {EventTarget | null} target */
function blockOf(target) {
  const item = target instanceof Element ? target.closest("li") : null;
  const block = Number(item?.dataset.block ?? 0);
  return block > 0 ? block : null;
}

/** One stop of the Tab key a table; arrows go on from there. @param {KeyboardEvent} event */
function moveFocus(event) {
  const item = event.target instanceof Element ? event.target.closest("li") : null;
  const list = item?.parentElement;
  if (!item || !list) return;
  const to = {
    ArrowLeft: item.previousElementSibling,
    ArrowRight: item.nextElementSibling,
    Home: list.firstElementChild,
    End: list.lastElementChild,
  }[event.key];
  if (!(to instanceof HTMLElement)) return;
  event.preventDefault();
  item.tabIndex = -1;
  to.tabIndex = 0;
  to.focus();
}
