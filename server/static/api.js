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

export class Api {
  #askForKey;
  /** @type {Promise<string | null> | null} */
  #asking = null;
  /** @type {string | null} */
  #key;

  /** @param {(rejected: boolean) => Promise<string | null>} askForKey  null: the user gave up */
  constructor(askForKey) {
    this.#askForKey = askForKey;
    this.#key = readKey();
  }

  get hasKey() {
    return this.#key !== null;
  }

  forgetKey() {
    this.#keep(null);
  }

  /**
   * Resolves to a response with a good status. Relative paths, so that it works under any root.
   *
   * @param {string} path  without leading slash
   * @param {{body?: unknown, signal?: AbortSignal}} [options]  a body makes it a POST of JSON
   * @returns {Promise<Response>} rejects with `ApiError`, or an AbortError when stopped
   */
  async call(path, { body, signal } = {}) {
    for (;;) {
      const used = this.#key;
      const response = await this.#send(path, body, signal);
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
   * @param {unknown} body
   * @param {AbortSignal} [signal]
   */
  async #send(path, body, signal) {
    /** @type {Record<string, string>} */
    const headers = {};
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
