// The grid of all blocks: a canvas of cells, and another one on top for what passes.

import { prefersLessMotion } from "./dom.js";

const LARGEST_PITCH = 26;
const SMALLEST_PITCH = 4;
const WANTED_HEIGHT = 236;
const FLASH_MS = 1100;
/** Around the cells, for outlines: of the frame, in the style sheet, and of the canvas. */
const PADDING = 2;
const EDGE = 2;

const COLOURS = "free cached held shared null ink panel line flash mark".split(" ");

/** @typedef {import("./pool.js").Pool} Pool */

/**
 * Colours of the states, as the style sheet has them now.
 *
 * @returns {Record<string, string>}
 */
export function readColours() {
  const style = getComputedStyle(document.body);
  const probe = document.createElement("i");
  probe.hidden = true;
  document.body.append(probe);
  /** @type {Record<string, string>} */
  const colours = {};
  for (const name of COLOURS) {
    // Through a property of an element: the variable itself may be a light-dark() pair.
    probe.style.color = `var(--${name})`;
    colours[name] = getComputedStyle(probe).color || style.color;
  }
  probe.remove();
  return colours;
}

export class BlockGrid {
  #pool;
  #frame;
  #cells;
  #over;
  #onPoint;
  #pitch = LARGEST_PITCH;
  #columns = 1;
  #colours = readColours();
  /** @type {Map<number, {since: number, kind: string}>} */
  #flashes = new Map();
  /** @type {Set<number>} */
  #marked = new Set();
  /** @type {Set<number>} */
  #chosen = new Set();
  /** The block that the pointer or the arrow keys are on. @type {number | null} */
  #cursor = null;
  #waiting = 0;

  /**
   * @param {Pool} pool
   * @param {{frame: HTMLElement, cells: HTMLCanvasElement, over: HTMLCanvasElement}} elements
   *   the frame scrolls and takes the focus
   * @param {(block: number | null, byKey: boolean) => void} onPoint
   */
  constructor(pool, { frame, cells, over }, onPoint) {
    this.#pool = pool;
    this.#frame = frame;
    this.#cells = cells;
    this.#over = over;
    this.#onPoint = onPoint;
    new ResizeObserver(() => this.drawAll()).observe(frame);
    over.addEventListener("pointermove", (event) => this.#point(this.#blockUnder(event), false));
    over.addEventListener("pointerdown", (event) => this.#point(this.#blockUnder(event), false));
    over.addEventListener("pointerleave", () => this.#point(null, false));
    frame.addEventListener("keydown", (event) => this.#key(event));
    frame.addEventListener("focus", () => this.#point(this.#cursor ?? 0, true));
    frame.addEventListener("blur", () => this.#point(null, false));
  }

  /** The colours may have changed. */
  restyle() {
    this.#colours = readColours();
    this.drawAll();
  }

  /** Lay the grid out for the pool's size and the room there is, and draw everything. */
  drawAll() {
    const blocks = this.#pool.states.length;
    const width = this.#frame.clientWidth - 2 * (PADDING + EDGE);
    if (blocks === 0 || width <= 0) return;
    let pitch = LARGEST_PITCH;
    const height = () => Math.ceil(blocks / Math.floor(width / pitch)) * pitch;
    while (pitch > SMALLEST_PITCH && height() > WANTED_HEIGHT) pitch -= 1;
    this.#pitch = pitch;
    this.#columns = Math.max(1, Math.floor(width / pitch));
    const rows = Math.ceil(blocks / this.#columns);
    Object.assign(this.#frame.dataset, { blocks, pitch, columns: this.#columns });
    for (const canvas of [this.#cells, this.#over]) {
      size(canvas, Math.min(blocks, this.#columns) * pitch + 2 * EDGE, rows * pitch + 2 * EDGE);
    }
    const pen = this.#pen(this.#cells);
    for (let block = 0; block < blocks; block += 1) this.#drawCell(pen, block);
    this.#drawOver();
  }

  /** @param {Iterable<number>} blocks */
  drawSome(blocks) {
    const pen = this.#pen(this.#cells);
    for (const block of blocks) this.#drawCell(pen, block);
  }

  /**
   * Draw attention to blocks for a moment.
   *
   * @param {Iterable<number>} blocks
   * @param {"hit" | "evicted" | "source" | "copy"} kind
   */
  flash(blocks, kind) {
    const since = performance.now();
    for (const block of blocks) this.#flashes.set(block, { since, kind });
    this.#drawOver();
  }

  /**
   * Blocks with an outline: those of the user's own request.
   *
   * @param {Set<number>} blocks
   */
  mark(blocks) {
    this.#marked = blocks;
    this.#drawOver();
  }

  /**
   * Blocks to stand out while all others step back; none: nothing does.
   *
   * @param {Set<number>} blocks
   */
  choose(blocks) {
    if (blocks.size === 0 && this.#chosen.size === 0) return;
    this.#chosen = blocks;
    this.#drawOver();
  }

  /**
   * The middle of a block on the screen, or null if it is scrolled out of sight.
   *
   * @param {number} block
   */
  centre(block) {
    const box = this.#cells.getBoundingClientRect();
    const frame = this.#frame.getBoundingClientRect();
    const [x, y] = this.#corner(block);
    const middle = { x: box.left + x + this.#pitch / 2, y: box.top + y + this.#pitch / 2 };
    return middle.y < frame.top || middle.y > frame.bottom ? null : middle;
  }

  /** @param {number} block @returns {[number, number]} */
  #corner(block) {
    const column = block % this.#columns;
    const row = Math.floor(block / this.#columns);
    return [EDGE + column * this.#pitch, EDGE + row * this.#pitch];
  }

  /** @param {HTMLCanvasElement} canvas */
  #pen(canvas) {
    const pen = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
    const scale = devicePixelRatio || 1;
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    return pen;
  }

  get #side() {
    return this.#pitch - (this.#pitch >= 8 ? 2 : 1);
  }

  /**
   * Each state has a shape as well as a colour, where cells are large enough for one.
   *
   * @param {CanvasRenderingContext2D} pen
   * @param {number} block
   */
  #drawCell(pen, block) {
    const [x, y] = this.#corner(block);
    const side = this.#side;
    const state = this.#pool.state(block);
    pen.clearRect(x, y, this.#pitch, this.#pitch);
    pen.fillStyle = pen.strokeStyle = this.#colours[state];
    pen.lineWidth = 1;
    if (state === "null" && side >= 6) {
      pen.strokeRect(x + 0.5, y + 0.5, side - 1, side - 1);
      drawCross(pen, x, y, side);
      return;
    }
    pen.fillRect(x, y, side, side);
    if (side < 6) return;
    pen.fillStyle = this.#colours.panel;
    if (state === "cached") pen.fillRect(x + 2, y + 2, side - 4, side - 4);
    if (state === "shared") this.#drawHolders(pen, block, x, y, side);
  }

  /**
   * @param {CanvasRenderingContext2D} pen
   * @param {number} block
   * @param {number} x
   * @param {number} y
   * @param {number} side
   */
  #drawHolders(pen, block, x, y, side) {
    const holders = this.#pool.shared.get(block) ?? 2;
    if (side >= 12 && holders < 10) {
      pen.fillStyle = "#1a1205";
      pen.font = `600 ${Math.round(side * 0.68)}px ui-monospace, monospace`;
      pen.textAlign = "center";
      pen.textBaseline = "middle";
      pen.fillText(String(holders), x + side / 2, y + side / 2 + 0.5);
    } else pen.fillRect(x + side / 2 - 1, y + 1, 2, side - 2);
  }

  /** Soon, and once for all changes until then. */
  #drawOver() {
    if (this.#waiting !== 0) return;
    this.#waiting = requestAnimationFrame(() => {
      this.#waiting = 0;
      this.#drawOverNow();
    });
  }

  #drawOverNow() {
    const pen = this.#pen(this.#over);
    pen.clearRect(0, 0, this.#over.width, this.#over.height);
    if (this.#chosen.size > 0) {
      pen.globalAlpha = 0.62;
      pen.fillStyle = this.#colours.panel;
      pen.fillRect(0, 0, this.#over.width, this.#over.height);
      pen.globalAlpha = 1;
      for (const block of this.#chosen) {
        const [x, y] = this.#corner(block);
        pen.clearRect(x - 1, y - 1, this.#pitch, this.#pitch);
      }
    }
    const outlined = this.#chosen.size > 0 ? this.#chosen : this.#marked;
    pen.strokeStyle = this.#colours.mark;
    pen.lineWidth = this.#pitch >= 8 ? 2 : 1;
    for (const block of outlined) this.#outline(pen, block);
    if (this.#cursor !== null) {
      pen.strokeStyle = this.#colours.ink;
      pen.lineWidth = 2.5;
      this.#outline(pen, this.#cursor, 1);
    }
    this.#drawFlashes(pen);
  }

  /** @param {CanvasRenderingContext2D} pen */
  #drawFlashes(pen) {
    const now = performance.now();
    const still = prefersLessMotion();
    for (const [block, { since, kind }] of this.#flashes) {
      const age = (now - since) / FLASH_MS;
      if (age >= 1 || block >= this.#pool.states.length) {
        this.#flashes.delete(block);
        continue;
      }
      pen.globalAlpha = still ? 1 : 1 - age;
      pen.strokeStyle = this.#colours[kind === "evicted" ? "ink" : "flash"];
      pen.lineWidth = this.#pitch >= 8 ? 2.5 : 1.5;
      pen.setLineDash(kind === "source" || kind === "copy" ? [3, 2] : []);
      // Out of a block that was taken over as it is; into one that has just got its content.
      const away = kind === "hit" ? age : kind === "copy" ? 1 - age : 0;
      this.#outline(pen, block, still ? 1 : 1 + away * this.#pitch * 0.4);
    }
    pen.globalAlpha = 1;
    pen.setLineDash([]);
    if (this.#flashes.size === 0) return;
    // Without motion it is enough to look again when they have to go.
    if (still) setTimeout(() => this.#drawOver(), FLASH_MS);
    else this.#drawOver();
  }

  /**
   * @param {CanvasRenderingContext2D} pen
   * @param {number} block
   * @param {number} [out]
   */
  #outline(pen, block, out = 0.5) {
    const [x, y] = this.#corner(block);
    pen.strokeRect(x - out, y - out, this.#side + 2 * out, this.#side + 2 * out);
  }

  /** @param {PointerEvent} event */
  #blockUnder(event) {
    const column = Math.floor((event.offsetX - EDGE) / this.#pitch);
    const row = Math.floor((event.offsetY - EDGE) / this.#pitch);
    const block = row * this.#columns + column;
    const inside = column >= 0 && column < this.#columns && block >= 0;
    return inside && block < this.#pool.states.length ? block : null;
  }

  /**
   * @param {number | null} block
   * @param {boolean} byKey
   */
  #point(block, byKey) {
    if (block === this.#cursor && !byKey) return;
    this.#cursor = block;
    this.#drawOver();
    this.#onPoint(block, byKey);
  }

  /** @param {KeyboardEvent} event */
  #key(event) {
    const last = this.#pool.states.length - 1;
    const at = this.#cursor ?? 0;
    /** @type {Record<string, number>} */
    const targets = {
      ArrowLeft: at - 1,
      ArrowRight: at + 1,
      ArrowUp: at - this.#columns,
      ArrowDown: at + this.#columns,
      PageUp: at - 10 * this.#columns,
      PageDown: at + 10 * this.#columns,
      Home: 0,
      End: last,
    };
    const target = targets[event.key];
    if (target === undefined || last < 0 || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    const block = Math.min(Math.max(target, 0), last);
    this.#point(block, true);
    const [, y] = this.#corner(block);
    const { scrollTop, clientHeight } = this.#frame;
    if (y < scrollTop) this.#frame.scrollTop = y;
    if (y + this.#pitch > scrollTop + clientHeight) {
      this.#frame.scrollTop = y + this.#pitch - clientHeight;
    }
  }
}

/**
 * @param {HTMLCanvasElement} canvas
 * @param {number} width
 * @param {number} height
 */
function size(canvas, width, height) {
  const scale = devicePixelRatio || 1;
  canvas.width = Math.ceil(width * scale);
  canvas.height = Math.ceil(height * scale);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
}

/**
 * @param {CanvasRenderingContext2D} pen
 * @param {number} x
 * @param {number} y
 * @param {number} side
 */
function drawCross(pen, x, y, side) {
  pen.beginPath();
  pen.moveTo(x, y);
  pen.lineTo(x + side, y + side);
  pen.moveTo(x + side, y);
  pen.lineTo(x, y + side);
  pen.stroke();
}
