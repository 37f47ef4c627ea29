// The server's memory as the live stream tells it: blocks, and the requests that hold them.

/**
 * @typedef {"null" | "free" | "cached" | "held" | "shared"} State
 *
 * @typedef {object} Request
 * @property {number} key
 * @property {string} id  the end of what its client calls it
 * @property {number} place  which of the client's prompts it answers
 * @property {number} sample  which of that prompt's answers it is
 * @property {"running" | "waiting" | "preempted"} status
 * @property {number} tokens  prompt and answer so far
 * @property {number} computed  tokens whose KV is in the blocks
 * @property {number} prompt
 * @property {number} cached  prompt tokens found in the cache when it was let in
 * @property {number} preemptions
 * @property {number[][]} tables  for each group of layers the block of each page; 0: left behind
 *
 * @typedef {object} Effect
 * @property {number[] | null} blocks  whose look may have changed; null: all
 * @property {number[]} hits  taken over as they were
 * @property {number[]} evicted  cached ones given out for something else
 * @property {[number, number][]} copies  made before a write: from which block to which
 * @property {Request[]} admitted  they run now
 * @property {Request[]} preempted  they gave their blocks back and wait
 * @property {Request[]} left  they have ended, or wait too far back to be listed
 */

/** @type {Record<string, State>} */
export const STATES = { 0: "null", f: "free", c: "cached", h: "held", s: "shared" };

export class Pool {
  /** Letters of STATES, one a block. @type {string[]} */
  states = [];
  /** Holders of shared blocks. @type {Map<number, number>} */
  shared = new Map();
  /** Running ones first, then the next that wait. @type {Map<number, Request>} */
  requests = new Map();
  blockSize = 0;
  /** @type {(number | null)[]} */
  windows = [];
  running = 0;
  waiting = 0;
  status = "";
  /** By the server's clock, when all this was so. */
  seconds = 0;
  /** @type {Record<string, number>} */
  counts = {};
  /** Since the server's start. @type {Record<string, number>} */
  counters = {};

  /**
   * @param {any} told  the data of a `whole` event
   * @returns {Effect}
   */
  replace(told) {
    const before = this.requests;
    this.#gauges(told);
    this.blockSize = told.block_size;
    this.windows = told.windows;
    this.states = [...told.states];
    this.shared = new Map(numbered(told.shared));
    this.requests = new Map(told.requests.map((/** @type {Request} */ r) => [r.key, r]));
    const left = [...before.values()].filter(({ key }) => !this.requests.has(key));
    const nothing = { hits: [], evicted: [], copies: [], admitted: [], preempted: [] };
    return { blocks: null, ...nothing, left };
  }

  /**
   * @param {any} told  the data of a `change` event
   * @returns {Effect}
   */
  change(told) {
    this.#gauges(told);
    /** @type {Set<number>} */
    const blocks = new Set();
    for (const [first, letters] of told.blocks) {
      for (let i = 0; i < letters.length; i += 1) {
        if (this.states[first + i] === letters[i]) continue;
        this.states[first + i] = letters[i];
        if (letters[i] !== "s") this.shared.delete(first + i);
        blocks.add(first + i);
      }
    }
    for (const [block, holders] of numbered(told.shared)) {
      this.shared.set(block, holders);
      blocks.add(block);
    }
    const { hits, evicted, copies } = told;
    return { blocks: [...blocks], hits, evicted, copies, ...this.#changeRequests(told.requests) };
  }

  get usable() {
    return Math.max(0, this.states.length - 1);
  }

  get held() {
    return (this.counts.held ?? 0) + (this.counts.shared ?? 0);
  }

  /** @param {number} block @returns {State} */
  state(block) {
    return STATES[this.states[block]] ?? "free";
  }

  /**
   * Who holds a block, and as which of its pages.
   *
   * @param {number} block
   * @returns {{request: Request, group: number, page: number}[]}
   */
  holders(block) {
    /** @type {{request: Request, group: number, page: number}[]} */
    const found = [];
    for (const request of block === 0 ? [] : this.requests.values()) {
      request.tables.forEach((table, group) => {
        const page = table.indexOf(block);
        if (page >= 0) found.push({ request, group, page });
      });
    }
    return found;
  }

  /** @param {any} told */
  #gauges(told) {
    this.running = told.running;
    this.waiting = told.waiting;
    this.status = told.status;
    this.seconds = told.seconds;
    this.counts = told.counts;
    this.counters = told.counters;
  }

  /** @param {{order?: number[], new?: Request[], changed?: any[]}} changes */
  #changeRequests({ order, new: fresh = [], changed = [] }) {
    const before = new Map([...this.requests].map(([key, { status }]) => [key, status]));
    for (const request of fresh) this.requests.set(request.key, request);
    for (const { key, tables, ...facts } of changed) {
      const request = this.requests.get(key);
      if (request === undefined) continue;
      Object.assign(request, facts);
      for (const change of tables ?? []) applyTable(request, change);
    }
    const all = [...this.requests.values()];
    const turned = (/** @type {string} */ status) =>
      all.filter((r) => r.status === status && before.get(r.key) !== status);
    const admitted = turned("running");
    const preempted = turned("preempted").filter((r) => before.has(r.key));
    if (order === undefined) return { admitted, preempted, left: [] };
    const listed = new Set(order);
    const left = all.filter(({ key }) => !listed.has(key));
    const known = this.requests;
    this.requests = new Map();
    for (const key of order) {
      const request = known.get(key);
      if (request !== undefined) this.requests.set(key, request);
    }
    return { admitted, preempted, left };
  }
}

/**
 * A change is [group, leading null entries, where to cut, ids to append].
 *
 * @param {Request} request
 * @param {any[]} change
 */
function applyTable(request, [group, behind, at, ids]) {
  const table = request.tables[group];
  table.length = at;
  for (const id of ids) table.push(id);
  table.fill(0, 0, behind);
}

/** What a request is called on the page. @param {Request} request */
export function nameOf({ id, place, sample }) {
  return `…${id}${place > 0 ? ` #${place + 1}` : ""}${sample > 0 ? ` (${sample + 1})` : ""}`;
}

/** @param {Record<string, number>} object @returns {[number, number][]} */
function numbered(object) {
  return Object.entries(object).map(([id, value]) => [Number(id), value]);
}
