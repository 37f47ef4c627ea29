// Calls to the server that this page came from, with the key that the user gave.

const STORED_KEY = "jaxpaged-key";

/** What a call failed of, in words for the user. */
export class ApiError extends Error {
  /**
   * @param {string} message
   * @param {{status?: number, retryAfter?: number | null}} [facts]
   */
  constructor(message, { status = 0, retryAfter = null } = {}) {
    super(message);
    this.name = "ApiError";
    this.status = status;
    /** Seconds, if the server said so. */
    this.retryAfter = retryAfter;
  }
}

/**
 * @typedef {object} Options
 * @property {unknown} [body]  makes it a POST of JSON
 * @property {AbortSignal} [signal]
 * @property {string} [id]  the request's id will end in this
 */

export class Api {
  #askForKey;
  #onKey;
  /** @type {Promise<string | null> | null} */
  #asking = null;
  /** @type {string | null} */
  #key;

  /**
   * @param {(rejected: boolean) => Promise<string | null>} askForKey  null: the user gave up
   * @param {(known: boolean) => void} onKey  there is a key now, or none any more
   */
  constructor(askForKey, onKey) {
    this.#askForKey = askForKey;
    this.#onKey = onKey;
    this.#key = readKey();
    onKey(this.#key !== null);
  }

  forgetKey() {
    this.#keep(null);
  }

  /**
   * Resolves to a response with a good status. Relative paths, so that it works under any root.
   *
   * @param {string} path  without leading slash
   * @param {Options} [options]
   * @returns {Promise<Response>} rejects with `ApiError`, or an AbortError when stopped
   */
  async call(path, options = {}) {
    const { signal } = options;
    for (;;) {
      const used = this.#key;
      const response = await this.#send(path, options);
      if (response.ok) return response;
      if (response.status !== 401) throw await failure(response);
      response.body?.cancel().catch(() => {});
      if (this.#key !== used) continue; // another call has asked meanwhile
      this.#asking ??= this.#askForKey(used !== null).finally(() => (this.#asking = null));
      const key = await this.#asking;
      signal?.throwIfAborted();
      if (key === null) {
        throw new ApiError("The server wants a key, and none was given.", { status: 401 });
      }
      this.#keep(key);
    }
  }

  /**
   * @param {string} path
   * @param {Options} options
   */
  async #send(path, { body, signal, id }) {
    /** @type {Record<string, string>} */
    const headers = {};
    if (id !== undefined) headers["X-Request-Id"] = id;
    if (this.#key !== null) headers["Authorization"] = `Bearer ${this.#key}`;
    if (body !== undefined) headers["Content-Type"] = "application/json";
    try {
      return await fetch(new URL(path, document.baseURI), {
        method: body === undefined ? "GET" : "POST",
        headers,
        body: body === undefined ? undefined : JSON.stringify(body),
        signal,
        cache: "no-store",
        credentials: "same-origin",
        redirect: "error", // a key must not follow a redirect
      });
    } catch (error) {
      if (signal?.aborted) throw error;
      throw new ApiError("The server cannot be reached. Is it still running?");
    }
  }

  /** @param {string | null} key */
  #keep(key) {
    this.#key = key;
    this.#onKey(key !== null);
    try {
      if (key === null) sessionStorage.removeItem(STORED_KEY);
      else sessionStorage.setItem(STORED_KEY, key);
    } catch {
      // Storage may be forbidden; the key then lasts until the page is loaded again.
    }
  }
}

function readKey() {
  try {
    return sessionStorage.getItem(STORED_KEY);
  } catch {
    return null;
  }
}

/** @param {Response} response */
async function failure(response) {
  let message = `The server answered with status ${response.status}.`;
  try {
    const told = (await response.json())?.error?.message;
    if (typeof told === "string" && told !== "") message = told;
  } catch {
    // Not JSON: a proxy's page, most likely.
  }
  const seconds = Number.parseFloat(response.headers.get("Retry-After") ?? "");
  const retryAfter = Number.isFinite(seconds) ? seconds : null;
  return new ApiError(message, { status: response.status, retryAfter });
}
