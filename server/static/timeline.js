// How much of the memory was in use over the last two minutes.

import { setText } from "./dom.js";
import { readColours } from "./grid.js";

const SPAN_SECONDS = 120;
/** The scale goes up to the first of these that is enough, in shares of the pool. */
const SCALES = [0.05, 0.1, 0.25, 0.5, 1];
const LAYERS = /** @type {const} */ (["shared", "held", "cached"]);

/** @typedef {{at: number, shared: number, held: number, cached: number}} Point  shares, 0..1 */

export class Timeline {
  #canvas;
  #label;
  #colours = readColours();
  /** @type {Point[]} */
  #points = [];

  /** @param {HTMLCanvasElement} canvas @param {HTMLElement} label  says what the top stands for */
  constructor(canvas, label) {
    this.#canvas = canvas;
    this.#label = label;
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
  startOver() {
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
    const most = Math.max(0, ...this.#points.map((p) => p.shared + p.held + p.cached));
    const scaleTop = SCALES.find((share) => share >= most) ?? 1;
    setText(this.#label, `KV cache, up to ${100 * scaleTop}%`);
    this.#drawLines(pen, width, height);
    const x = (/** @type {number} */ at) => width * (1 - (now - at) / SPAN_SECONDS);
    this.#points.forEach((point, i) => {
      // Whole pixels, or the edges of neighbours would shine through.
      const left = Math.max(0, Math.round(x(point.at)));
      const right = i + 1 < this.#points.length ? Math.round(x(this.#points[i + 1].at)) : width;
      let floor = height;
      for (const layer of right > left ? LAYERS : []) {
        const tall = (point[layer] / scaleTop) * height;
        pen.fillStyle = this.#colours[layer];
        pen.globalAlpha = layer === "cached" ? 0.35 : 1;
        pen.fillRect(left, floor - tall, right - left, tall);
        floor -= tall;
      }
    });
  }

  /**
   * @param {CanvasRenderingContext2D} pen
   * @param {number} width
   * @param {number} height
   */
  #drawLines(pen, width, height) {
    pen.strokeStyle = this.#colours.line;
    pen.lineWidth = 1;
    for (const y of [0.5, Math.round(height / 2) + 0.5, height - 0.5]) {
      pen.beginPath();
      pen.moveTo(0, y);
      pen.lineTo(width, y);
      pen.stroke();
    }
  }
}
