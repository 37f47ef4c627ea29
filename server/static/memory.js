// The side of the page that shows the server's memory, live.

import { ApiError } from "./api.js";
import { byId, plural, setText } from "./dom.js";
import { Gauges } from "./gauges.js";
import { BlockGrid } from "./grid.js";
import { Happenings } from "./happenings.js";
import { Pool, nameOf } from "./pool.js";
import { readEvents } from "./sse.js";
import { BlockTables } from "./tables.js";
import { Timeline } from "./timeline.js";

const MOST_LINKS = 64;
/** Seconds until a broken connection is tried again. */
const LONGEST_PAUSE = 15;

/** @typedef {import("./pool.js").Request} Request */
/** @typedef {import("./pool.js").Effect} Effect */
/** @typedef {{x: number, y: number}} Point */

export class MemoryView {
  #api;
  #pool = new Pool();
  #grid;
  #tables;
  #timeline = new Timeline(byId("timeline"), byId("timeline-label"));
  #gauges = new Gauges(this.#pool);
  #happenings = new Happenings();
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
        if (error instanceof ApiError && error.status === 401) {
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
    if (event === "status") {
      const [done, total] = told.progress ?? [0, 0];
      const programs = total > 0 ? `, ${done} of ${total} programs compiled` : "";
      this.#setState("wait", `the model is loading${programs}`);
    } else if (event === "end") this.#setState("off", "the server is stopping");
    else if (event === "whole") {
      // What was before is not known to lead up to this.
      for (const part of [this.#timeline, this.#gauges, this.#happenings]) part.startOver();
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
    if (effect.copies.length > 0) {
      this.#grid.flash(effect.copies.map(([from]) => from), "source");
      this.#grid.flash(effect.copies.map(([, to]) => to), "copy");
    }
    this.#timeline.add(this.#pool);
    this.#timeline.draw();
    this.#happenings.tell(effect, this.#pool.counters);
    this.#gauges.show();
    this.#showRequests();
  }

  /** Time goes on though nothing happens. */
  #tick() {
    if (this.#connection === null || byId("live-state").dataset.kind !== "live") return;
    this.#gauges.showRate();
    this.#timeline.draw();
  }

  /** @param {"live" | "wait" | "off" | "idle"} kind @param {string} text */
  #setState(kind, text) {
    byId("live-state").dataset.kind = kind;
    setText(byId("live-text"), text);
  }

  // ---------------------------------------------------------------- pointing at things

  #showRequests() {
    this.#tables.update();
    const own = [...this.#pool.requests.values()].filter((r) => this.#tables.isOwn(r));
    this.#grid.mark(new Set(own.flatMap(({ tables }) => tables.flat().filter(Boolean))));
    this.#showPicked();
    this.#describe(this.#picked.block ?? this.#inspected);
  }

  /** @param {{key: number | null, block: number | null}} picked */
  #pick(picked) {
    this.#picked = picked;
    this.#showPicked();
    this.#describe(picked.block ?? this.#inspected);
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
    const known = block !== null && block < this.#pool.states.length;
    const request = this.#pool.requests.get(this.#picked.key ?? -1);
    setText(byId("inspector"), known ? this.#inWords(block) : requestInWords(request, this.#pool));
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
      lines.push(curve(middle, to, origin));
      if (lines.length === MOST_LINKS) break;
    }
    const path = /** @type {SVGPathElement} */ (layer.firstElementChild);
    if (path.getAttribute("d") !== lines.join("")) path.setAttribute("d", lines.join(""));
  }
}

/**
 * A line between two points of the screen: it leaves one upwards and enters the other from below.
 *
 * @param {Point} from
 * @param {Point} to
 * @param {DOMRect} origin
 */
function curve(from, to, origin) {
  const middle = (from.y + to.y) / 2;
  const at = (/** @type {number} */ x, /** @type {number} */ y) =>
    `${(x - origin.left).toFixed(1)} ${(y - origin.top).toFixed(1)}`;
  return `M${at(from.x, from.y)}C${at(from.x, middle)} ${at(to.x, middle)} ${at(to.x, to.y)}`;
}

/** @param {Request | undefined} request @param {Pool} pool */
function requestInWords(request, pool) {
  if (request === undefined) {
    return "Point at a block or a request; or tab to the grid and use the arrow keys.";
  }
  const blocks = request.tables.flat().filter(Boolean);
  const shared = blocks.filter((block) => pool.state(block) === "shared").length;
  const held = plural(blocks.length, "block");
  return `${nameOf(request)} holds ${held}, ${shared} of them shared with others.`;
}

/** @param {number} ms @param {AbortSignal} signal */
function sleep(ms, signal) {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, ms);
    const stop = () => {
      clearTimeout(timer);
      resolve(undefined);
    };
    signal.addEventListener("abort", stop, { once: true });
  });
}
