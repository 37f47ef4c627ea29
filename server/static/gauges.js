// The figures above the grid, and the counts beside the legend.

import { byId, count, plural, setText } from "./dom.js";

/** The rate is an average over so much. */
const RATE_SECONDS = 3;

export class Gauges {
  #pool;
  /** Tokens written so far, by the server's clock. @type {{seconds: number, tokens: number}[]} */
  #written = [];
  #shownAt = 0;

  /** @param {import("./pool.js").Pool} pool */
  constructor(pool) {
    this.#pool = pool;
  }

  /** What comes next does not follow from what was shown last. */
  startOver() {
    this.#written = [];
  }

  /** The pool has changed. */
  show() {
    const { counters, counts, usable, held, running, waiting, blockSize, seconds } = this.#pool;
    this.#shownAt = performance.now();
    this.#written.push({ seconds, tokens: counters.generation_tokens ?? 0 });
    setText(byId("gauge-running"), count(running));
    setText(byId("gauge-waiting"), count(waiting));
    const used = usable > 0 ? held / usable : 0;
    setText(byId("gauge-kv"), percent(used));
    byId("gauge-kv-bar").style.setProperty("--share", `${(100 * used).toFixed(1)}%`);
    const { prefix_query_tokens: queries = 0, prefix_hit_tokens: hits = 0 } = counters;
    setText(byId("gauge-hits"), queries > 0 ? percent(hits / queries) : "–");
    byId("gauge-hits").title = `${count(hits)} of ${count(queries)} prompt tokens looked up`;
    setText(byId("gauge-preemptions"), count(counters.preemptions ?? 0));
    setText(byId("gauge-copies"), count(counters.copied_blocks ?? 0));
    byId("gauge-copies").title = `${plural(counters.forks ?? 0, "sequence")} began as a fork`;
    this.showRate();
    for (const entry of document.querySelectorAll("#legend [data-state]")) {
      const { state } = /** @type {HTMLElement} */ (entry).dataset;
      const number = entry.querySelector(".number");
      if (number) setText(number, count(counts[state ?? ""] ?? 0));
    }
    setText(byId("grid-summary"), `${plural(usable, "block")} of ${plural(blockSize, "token")}`);
    const states = ["free", "cached", "held", "shared"];
    const summary = states.map((state) => `${counts[state] ?? 0} ${state}`).join(", ");
    const label = `KV cache, last two minutes. Now: ${summary}.`;
    byId("timeline").setAttribute("aria-label", label);
  }

  /** It falls while nothing happens. */
  showRate() {
    const written = this.#written;
    const now = this.#pool.seconds + (performance.now() - this.#shownAt) / 1000;
    while (written.length > 1 && written[1].seconds < now - RATE_SECONDS) written.shift();
    const first = written[0];
    const last = written.at(-1);
    if (first === undefined || last === undefined) return;
    const rate = (last.tokens - first.tokens) / Math.max(now - first.seconds, 0.2);
    const idle = now - last.seconds > RATE_SECONDS;
    setText(byId("gauge-rate"), idle ? "0" : rate.toFixed(rate < 100 ? 1 : 0).replace(/\.0$/, ""));
  }
}

/** @param {number} share */
function percent(share) {
  const value = 100 * share;
  return `${value > 0 && value < 10 ? value.toFixed(1) : Math.round(value)}%`;
}
