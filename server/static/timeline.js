// How much of the memory was in use over the last two minutes.

import { readColours } from "./grid.js";

const SPAN_SECONDS = 120;
const LAYERS = /** @type {const} */ (["shared", "held", "cached"]);

/** @typedef {{at: number, shared: number, held: number, cached: number}} Point  shares, 0..1 */

export class Timeline {
  #canvas;
  #colours = readColours();
  /** @type {Point[]} */
  #points = [];

  /** @param {HTMLCanvasElement} canvas */
  constructor(canvas) {
    this.#canvas = canvas;
    new ResizeObserver(() => this.draw()).observe(canvas);
  }

  restyle() {
    this.#colours = readColours();
    this.draw();
  }

  /** @param {import("./pool.js").Pool} pool */
  add(pool) {
    const usable = pool.usable || 1;
    const { shared = 0, held = 0, cached = 0 } = pool.counts;
    const at = performance.now() / 1000;
    this.#points.push({
      at,
      shared: shared / usable,
      held: held / usable,
      cached: cached / usable,
    });
    // One older point is kept, as it says how it was at the left edge.
    while (this.#points.length > 1 && this.#points[1].at < at - SPAN_SECONDS) this.#points.shift();
  }

  /** What was before is not known to lead up to what comes. */
  clear() {
    this.#points = [];
  }

  draw() {
    const { clientWidth: width, clientHeight: height } = this.#canvas;
    if (width === 0) return;
    const scale = devicePixelRatio || 1;
    this.#canvas.width = Math.round(width * scale);
    this.#canvas.height = Math.round(height * scale);
    const pen = /** @type {CanvasRenderingContext2D} */ (this.#canvas.getContext("2d"));
    pen.scale(scale, scale);
    const now = performance.now() / 1000;
    pen.strokeStyle = this.#colours.free;
    pen.lineWidth = 1;
    for (const share of [0, 0.5, 1]) {
      const y = Math.round((1 - share) * (height - 1)) + 0.5;
      pen.beginPath();
      pen.moveTo(0, Math.min(y, height - 0.5));
      pen.lineTo(width, Math.min(y, height - 0.5));
      pen.stroke();
    }
    const x = (/** @type {number} */ at) => width * (1 - (now - at) / SPAN_SECONDS);
    /** @type {number[]} */
    let floor = this.#points.map(() => 0);
    for (const layer of LAYERS) {
      const top = this.#points.map((point, i) => floor[i] + point[layer]);
      pen.fillStyle = this.#colours[layer];
      pen.globalAlpha = layer === "cached" ? 0.4 : 1;
      this.#points.forEach((point, i) => {
        const left = Math.max(0, x(point.at));
        const right = i + 1 < this.#points.length ? x(this.#points[i + 1].at) : width;
        const tall = (top[i] - floor[i]) * height;
        if (right > left && tall > 0) {
          pen.fillRect(left, height * (1 - top[i]), right - left + 0.3, tall);
        }
      });
      floor = top;
    }
    pen.globalAlpha = 1;
  }
}
