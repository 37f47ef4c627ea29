// What happened in the memory, in words, newest first.

import { byId, make, plural } from "./dom.js";
import { nameOf } from "./pool.js";

const MOST_LINES = 50;
const MOST_NAMED = 6;

export class Happenings {
  #list = byId("events");
  /** As they were last. @type {Record<string, number> | null} */
  #counters = null;
  /** What was told last of evictions. @type {{line: Element, blocks: number[]} | null} */
  #evicted = null;

  /** What comes next does not follow from what was told last. */
  startOver() {
    this.#counters = null;
  }

  /**
   * The counters also tell what came and went between two looks.
   *
   * @param {import("./pool.js").Effect} effect
   * @param {Record<string, number>} counters
   */
  tell({ hits, evicted, copies, admitted, preempted, left }, counters) {
    const before = this.#counters;
    this.#counters = counters;
    const more = (/** @type {string} */ name) => {
      const now = counters[name] ?? 0;
      return now - (before?.[name] ?? now);
    };
    for (const [request, ...others] of together(admitted)) {
      const { prompt, cached } = request;
      const found = `${plural(prompt, "prompt token")}, ${cached || "none"} of them cached`;
      const shared = others.length > 0 ? `; ${others.length + 1} sequences share them` : "";
      this.#add("in", `${nameOf(request)} was let in: ${found}${shared}.`);
    }
    const reused = more("prefix_hit_tokens");
    if (hits.length > 0) this.#add("hit", `Prefix hit: ${inWords(hits)} used again.`);
    else if (reused > 0) this.#add("hit", `Prefix hit: ${plural(reused, "token")} used again.`);
    if (evicted.length > 0) this.#tellEvicted(evicted);
    for (const request of preempted) {
      const what = "was preempted: its blocks went back, it will be recomputed";
      this.#add("preempt", `${nameOf(request)} ${what}.`);
    }
    const unseen = more("preemptions") - preempted.length;
    if (unseen > 0) this.#add("preempt", `${plural(unseen, "preemption")} between two looks.`);
    for (const request of left) {
      this.#add("out", `${nameOf(request)} has left, with ${plural(request.tokens, "token")}.`);
    }
    const copied = more("copied_blocks");
    if (copied > 0) this.#add("copy", `Copied on write: ${copiesInWords(copies, copied)}.`);
  }

  /**
   * They go a few at a time: one line for all of them, until something else happens.
   *
   * @param {number[]} blocks
   */
  #tellEvicted(blocks) {
    let all = blocks;
    if (this.#evicted !== null && this.#evicted.line === this.#list.firstElementChild) {
      this.#evicted.line.remove();
      all = [...this.#evicted.blocks, ...blocks];
    }
    const line = this.#add("evict", `Evicted: ${inWords(all)} given out for new content.`);
    this.#evicted = { line, blocks: all };
  }

  /** @param {string} kind @param {string} text */
  #add(kind, text) {
    const time = new Date().toLocaleTimeString("en-GB");
    const line = make("li", { class: kind }, make("time", {}, time), text);
    this.#list.prepend(line);
    while (this.#list.children.length > MOST_LINES) this.#list.lastElementChild?.remove();
    byId("events-none").hidden = true;
    return line;
  }
}

/**
 * Samples of one prompt, or beams of a search: they are let in together.
 *
 * @param {import("./pool.js").Request[]} requests
 * @returns {import("./pool.js").Request[][]}
 */
function together(requests) {
  /** @type {Map<string, import("./pool.js").Request[]>} */
  const groups = new Map();
  for (const request of requests) {
    const name = `${request.place} ${request.id}`;
    groups.set(name, [...(groups.get(name) ?? []), request]);
  }
  return [...groups.values()];
}

/**
 * @param {[number, number][]} copies  the last of them
 * @param {number} count
 */
function copiesInWords(copies, count) {
  const named = copies.slice(-MOST_NAMED).map(([from, to]) => `${from} to ${to}`);
  if (count === 1 && named.length === 1) return `block ${named[0]}`;
  const more = count > named.length ? ", …" : "";
  return `${plural(count, "block")} (${named.join(", ")}${more})`;
}

/** @param {number[]} blocks */
function inWords(blocks) {
  if (blocks.length === 1) return `block ${blocks[0]}`;
  const named = blocks.slice(0, MOST_NAMED).join(", ");
  if (blocks.length <= MOST_NAMED) return `blocks ${named}`;
  return `${blocks.length} blocks (${named}, …)`;
}
