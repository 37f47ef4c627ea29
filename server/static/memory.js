// The side of the page that shows the server's memory, live.

import { byId, count, make, plural, setText } from "./dom.js";
import { BlockGrid } from "./grid.js";
import { Pool, nameOf } from "./pool.js";
import { readEvents } from "./sse.js";
import { BlockTables } from "./tables.js";
import { Timeline } from "./timeline.js";

const MOST_EVENTS = 30;
const MOST_LINKS = 64;
const LONGEST_PAUSE = 15;
const RATE_SECONDS = 3;

/** @typedef {import("./pool.js").Request} Request */
/** @typedef {import("./pool.js").Effect} Effect */

export class MemoryView {
  #api;
  #pool = new Pool();
  #grid;
  #tables;
  #timeline = new Timeline(byId("timeline"), byId("timeline-label"));
  /** @type {AbortController | null} */
  #connection = null;
  #wanted = false;
  #paused = false;
  /** @type {Set<string>} */
  #own = new Set();
  /** @type {{key: number | null, block: number | null}} */
  #picked = { key: null, block: null };
  /** @type {number | null} */
  #inspected = null;
  /** Tokens written, by the server's clock. @type {{seconds: number, tokens: number}[]} */
  #written = [];
  #receivedAt = 0;
  /** As they were last. @type {Record<string, number> | null} */
  #counters = null;

  /** @param {import("./api.js").Api} api */
  constructor(api) {
    this.#api = api;
    this.#grid = new BlockGrid(
      this.#pool,
      { frame: byId("grid"), cells: byId("grid-cells"), over: byId("grid-over") },
      (block, byKey) => this.#inspect(block, byKey),
    );
    this.#tables = new BlockTables(this.#pool, byId("requests"), byId("requests-more"), (picked) =>
      this.#pick(picked),
    );
    byId("memory-scroll").addEventListener("scroll", () => this.#drawLinks(), { passive: true });
    byId("grid").addEventListener("scroll", () => this.#drawLinks(), { passive: true });
    new ResizeObserver(() => this.#drawLinks()).observe(byId("memory-scroll"));
    byId("pause").addEventListener("click", () => this.#pause(!this.#paused));
    for (const swatch of document.querySelectorAll("#legend [data-state]")) {
      const { state } = /** @type {HTMLElement} */ (swatch).dataset;
      swatch.addEventListener("pointerenter", () => this.#chooseState(state ?? ""));
      swatch.addEventListener("pointerleave", () => this.#showPicked());
    }
    setInterval(() => this.#tick(), 1000);
  }

  get pool() {
    return this.#pool;
  }

  /** Listen while this side can be seen, and not otherwise. @param {boolean} visible */
  setVisible(visible) {
    this.#wanted = visible;
    this.#connectOrNot();
  }

  /** The user's requests, by their ids. @param {string} id @param {boolean} active */
  setOwn(id, active) {
    const end = id.slice(-8); // what the server shows of an id
    if (active) this.#own.add(end);
    else this.#own.delete(end);
    this.#tables.setOwn(this.#own);
    this.#showRequests();
  }

  restyle() {
    this.#grid.restyle();
    this.#timeline.restyle();
  }

  // ---------------------------------------------------------------- the stream

  /** @param {boolean} paused */
  #pause(paused) {
    this.#paused = paused;
    const button = byId("pause");
    button.setAttribute("aria-pressed", String(paused));
    setText(button, paused ? "Resume" : "Pause");
    this.#connectOrNot();
  }

  #connectOrNot() {
    const wanted = this.#wanted && !this.#paused;
    if (wanted && this.#connection === null) {
      this.#connection = new AbortController();
      this.#stayConnected(this.#connection.signal);
    } else if (!wanted && this.#connection !== null) {
      this.#connection.abort();
      this.#connection = null;
      this.#setState("idle", this.#paused ? "paused" : "not watching");
    }
  }

  /** @param {AbortSignal} signal */
  async #stayConnected(signal) {
    for (let pause = 1; !signal.aborted; pause = Math.min(2 * pause, LONGEST_PAUSE)) {
      let why = "The server ended the stream";
      this.#setState("wait", "connecting");
      try {
        const response = await this.#api.call("debug/live", { signal });
        if (response.body === null) throw new Error("The answer has no body.");
        for await (const { event, data } of readEvents(response.body)) {
          if (signal.aborted) return;
          this.#receive(event, JSON.parse(data));
          pause = 1;
        }
      } catch (error) {
        if (signal.aborted) return;
        why = error instanceof Error ? error.message : String(error);
        if (/** @type {{status?: number}} */ (error).status === 401) {
          // The user has just declined to give a key: do not ask at once again.
          this.#pause(true);
          this.#setState("off", "needs a key");
          return;
        }
      }
      this.#setState("off", `${why.replace(/\.$/, "")}; again in ${pause} s`);
      await sleep(pause * 1000, signal);
    }
  }

  /** @param {string} event @param {any} told */
  #receive(event, told) {
    this.#receivedAt = performance.now();
    if (event === "status") {
      const [done, total] = told.progress ?? [0, 0];
      const programs = total > 0 ? `, ${done} of ${total} programs compiled` : "";
      this.#setState("wait", `the model is loading${programs}`);
    } else if (event === "end") this.#setState("off", "the server is stopping");
    else if (event === "whole") {
      this.#timeline.clear();
      this.#written = [];
      this.#counters = null;
      this.#apply(this.#pool.replace(told));
    } else if (event === "change") this.#apply(this.#pool.change(told));
  }

  /** @param {Effect} effect */
  #apply(effect) {
    const draining = this.#pool.status === "draining";
    this.#setState(draining ? "wait" : "live", draining ? "draining" : "live");
    if (effect.blocks === null) this.#grid.drawAll();
    else this.#grid.drawSome(effect.blocks);
    if (effect.hits.length > 0) this.#grid.flash(effect.hits, "hit");
    if (effect.evicted.length > 0) this.#grid.flash(effect.evicted, "evicted");
    this.#written.push({
      seconds: this.#pool.seconds,
      tokens: this.#pool.counters.generation_tokens ?? 0,
    });
    this.#timeline.add(this.#pool);
    this.#timeline.draw();
    this.#tell(effect);
    this.#showGauges();
    this.#showRequests();
  }

  /** @param {"live" | "wait" | "off" | "idle"} kind @param {string} text */
  #setState(kind, text) {
    byId("live-state").dataset.kind = kind;
    setText(byId("live-text"), text);
  }

  // ---------------------------------------------------------------- figures

  #showGauges() {
    const { counters, counts, usable, held, running, waiting } = this.#pool;
    setText(byId("gauge-running"), count(running));
    setText(byId("gauge-waiting"), count(waiting));
    const used = usable > 0 ? held / usable : 0;
    setText(byId("gauge-kv"), percent(used));
    byId("gauge-kv-bar").style.setProperty("--share", `${(100 * used).toFixed(1)}%`);
    const { prefix_query_tokens: queries = 0, prefix_hit_tokens: hits = 0 } = counters;
    setText(byId("gauge-hits"), queries > 0 ? percent(hits / queries) : "–");
    byId("gauge-hits").title = `${count(hits)} of ${count(queries)} prompt tokens looked up`;
    setText(byId("gauge-preemptions"), count(counters.preemptions ?? 0));
    setText(byId("gauge-rate"), this.#rate());
    byId("tile-copies").hidden = counters.copies === undefined;
    setText(byId("gauge-copies"), count(counters.copies ?? 0));
    for (const swatch of document.querySelectorAll("#legend [data-state]")) {
      const { state } = /** @type {HTMLElement} */ (swatch).dataset;
      const number = swatch.querySelector(".number");
      if (number) setText(number, count(counts[state ?? ""] ?? 0));
    }
    const summary =
      `${plural(usable, "block")} of ${this.#pool.blockSize} tokens: ${counts.free ?? 0} free, ` +
      `${counts.cached ?? 0} cached, ${counts.held ?? 0} held, ${counts.shared ?? 0} shared`;
    setText(byId("grid-summary"), `${count(usable)} blocks of ${this.#pool.blockSize} tokens`);
    byId("timeline").setAttribute("aria-label", `KV cache, last two minutes. Now: ${summary}.`);
  }

  #rate() {
    const now = this.#pool.seconds + (performance.now() - this.#receivedAt) / 1000;
    while (this.#written.length > 1 && this.#written[1].seconds < now - RATE_SECONDS) {
      this.#written.shift();
    }
    const first = this.#written[0];
    const last = this.#written.at(-1);
    if (first === undefined || last === undefined || now - last.seconds > RATE_SECONDS) return "0";
    const seconds = Math.max(now - first.seconds, 0.2);
    return ((last.tokens - first.tokens) / seconds).toFixed(1).replace(/\.0$/, "");
  }

  #tick() {
    if (this.#connection === null || byId("live-state").dataset.kind !== "live") return;
    setText(byId("gauge-rate"), this.#rate());
    this.#timeline.draw();
  }

  // ---------------------------------------------------------------- what happened

  /**
   * In words. The counters also tell what came and went between two looks.
   *
   * @param {Effect} effect
   */
  #tell({ hits, evicted, admitted, preempted, left }) {
    const more = this.#counted();
    for (const request of admitted) {
      const { prompt, cached } = request;
      const found = `${plural(prompt, "prompt token")}, ${cached || "none"} of them cached`;
      this.#log("in", `${nameOf(request)} was let in: ${found}.`);
    }
    const reused = more("prefix_hit_tokens");
    if (hits.length > 0) {
      this.#log("hit", `Prefix hit: ${blocksInWords(hits)} taken over as they were.`);
    } else if (reused > 0) {
      this.#log("hit", `Prefix hit: ${plural(reused, "token")}, gone again before the next look.`);
    }
    if (evicted.length > 0) {
      this.#log("evict", `Evicted: ${blocksInWords(evicted)} given out for new content.`);
    }
    for (const request of preempted) {
      const what = "was preempted: its blocks went back, it will be recomputed";
      this.#log("preempt", `${nameOf(request)} ${what}.`);
    }
    const brief = more("preemptions") - preempted.length;
    if (brief > 0) this.#log("preempt", `${plural(brief, "preemption")} between two looks.`);
    for (const request of left) {
      this.#log("out", `${nameOf(request)} has left, with ${plural(request.tokens, "token")}.`);
    }
    const copies = more("copies");
    if (copies > 0) this.#log("copy", `${plural(copies, "block")} copied on write.`);
  }

  /** By how much a counter has grown since this was asked last. */
  #counted() {
    const before = this.#counters;
    const now = (this.#counters = this.#pool.counters);
    return (/** @type {string} */ name) => {
      const first = before?.[name];
      return first === undefined ? 0 : (now[name] ?? first) - first;
    };
  }

  /** @param {string} kind @param {string} text */
  #log(kind, text) {
    const list = byId("events");
    const time = new Date().toLocaleTimeString("en-GB");
    list.prepend(make("li", { class: kind }, make("time", {}, time), text));
    while (list.children.length > MOST_EVENTS) list.lastElementChild?.remove();
    byId("events-none").hidden = true;
  }

  // ---------------------------------------------------------------- pointing at things

  #showRequests() {
    this.#tables.update();
    const own = [...this.#pool.requests.values()].filter((r) => this.#tables.isOwn(r));
    this.#grid.mark(new Set(own.flatMap(({ tables }) => tables.flat().filter(Boolean))));
    this.#showPicked();
    if (this.#inspected !== null) this.#describe(this.#inspected);
  }

  /** @param {{key: number | null, block: number | null}} picked */
  #pick(picked) {
    this.#picked = picked;
    this.#showPicked();
    if (picked.block !== null) this.#describe(picked.block);
    else if (this.#inspected === null) this.#describe(null);
  }

  #showPicked() {
    const { key, block } = this.#picked;
    const request = key === null ? undefined : this.#pool.requests.get(key);
    const blocks = block !== null ? [block] : (request?.tables.flat() ?? []);
    this.#grid.choose(new Set(blocks.filter(Boolean)));
    this.#tables.choose(block ?? this.#inspected);
    this.#drawLinks();
  }

  /** @param {string} state */
  #chooseState(state) {
    const ids = [...this.#pool.states.keys()];
    this.#grid.choose(new Set(ids.filter((id) => this.#pool.state(id) === state)));
  }

  /** @param {number | null} block @param {boolean} byKey */
  #inspect(block, byKey) {
    this.#inspected = block;
    // Read out what the keys lead to, not what a pointer passes over.
    byId("inspector").ariaLive = byKey ? "polite" : "off";
    this.#tables.choose(block);
    this.#describe(block);
  }

  /** @param {number | null} block */
  #describe(block) {
    const none = "Point at a block or a request; or tab to the grid and use the arrow keys.";
    const known = block !== null && block < this.#pool.states.length;
    setText(byId("inspector"), known ? this.#inWords(block) : none);
  }

  /** @param {number} block */
  #inWords(block) {
    const state = this.#pool.state(block);
    if (state === "null") return "Block 0 is the null block: always zero, never given out.";
    if (state === "free") return `Block ${block} is free and holds nothing of use.`;
    if (state === "cached") {
      return `Block ${block} is free, and cached: a prompt that begins alike takes it over.`;
    }
    const size = this.#pool.blockSize;
    const holders = this.#pool.holders(block).map(({ request, page }) => {
      const last = Math.min((page + 1) * size, Math.max(request.computed, page * size + 1)) - 1;
      return `${nameOf(request)} (page ${page}, tokens ${page * size}–${last})`;
    });
    const shown = holders.slice(0, 4).join(", ");
    const more = holders.length > 4 ? ` and ${holders.length - 4} more` : "";
    const how = state === "shared" ? `shared by ${this.#pool.shared.get(block) ?? 2}` : "held by";
    return `Block ${block} is ${how}${state === "shared" ? ": " : " "}${shown}${more}.`;
  }

  /** Lines from the pages of the request that is pointed at to their blocks. */
  #drawLinks() {
    const { key, block } = this.#picked;
    const layer = byId("links");
    const origin = layer.getBoundingClientRect();
    const view = byId("memory-scroll").getBoundingClientRect();
    const chips = key === null ? [] : this.#tables.chips(key);
    const lines = [];
    for (const chip of chips) {
      if (chip.block === 0 || (block !== null && chip.block !== block)) continue;
      const to = this.#grid.centre(chip.block);
      const from = chip.element.getBoundingClientRect();
      const middle = { x: from.left + from.width / 2, y: from.top };
      if (to === null || middle.y > view.bottom || to.y < view.top) continue;
      const shift = (/** @type {{x: number, y: number}} */ { x, y }) => [x - origin.left, y - origin.top];
      lines.push(curve(...shift(middle), ...shift(to)));
      if (lines.length === MOST_LINKS) break;
    }
    const path = /** @type {SVGPathElement} */ (layer.firstElementChild);
    if (path.getAttribute("d") !== lines.join("")) path.setAttribute("d", lines.join(""));
  }
}

/**
 * @param {number} x1
 * @param {number} y1
 * @param {number} x2
 * @param {number} y2
 */
function curve(x1, y1, x2, y2) {
  const bend = (y1 - y2) / 2;
  const at = (/** @type {number} */ v) => v.toFixed(1);
  return `M${at(x1)} ${at(y1)}C${at(x1)} ${at(y1 - bend)} ${at(x2)} ${at(y2 + bend)} ${at(x2)} ${at(y2)}`;
}

/** @param {number} share */
function percent(share) {
  const value = 100 * share;
  return `${value > 0 && value < 10 ? value.toFixed(1) : Math.round(value)}%`;
}

/** @param {number[]} blocks */
function blocksInWords(blocks) {
  if (blocks.length === 1) return `block ${blocks[0]}`;
  const shown = blocks.slice(0, 6).join(", ");
  return blocks.length <= 6 ? `blocks ${shown}` : `${blocks.length} blocks (${shown}, …)`;
}

/** @param {number} ms @param {AbortSignal} signal */
function sleep(ms, signal) {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, ms);
    signal.addEventListener("abort", () => (clearTimeout(timer), resolve(undefined)), { once: true });
  });
}
