// Small helpers to build the page. Text goes in as text nodes only.

/**
 * @template {keyof HTMLElementTagNameMap} T
 * @param {T} tag
 * @param {Record<string, string | boolean | null>} [attributes]  null and false: left out
 * @param {...(Node | string)} children
 * @returns {HTMLElementTagNameMap[T]}
 */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

/**
 * The element of the page with this id, which has to be there.
 *
 * @param {string} id
 * @returns {any}
 */
export function byId(id) {
  const element = document.getElementById(id);
  if (element === null) throw new Error(`no element #${id}`);
  return element;
}

/**
 * Change text only where it differs, so that nothing is laid out anew for nothing.
 *
 * @param {Element} element
 * @param {string} text
 */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/**
 * @param {string} text
 * @returns {Promise<boolean>} whether it worked
 */
export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // Not allowed, or not there without https.
  }
  const area = make("textarea", { "aria-hidden": "true", class: "off-screen" });
  area.value = text;
  document.body.append(area);
  area.select();
  try {
    return document.execCommand("copy");
  } catch {
    return false;
  } finally {
    area.remove();
  }
}

/**
 * A button that copies, and says so.
 *
 * @param {() => string} text
 * @param {string} label
 */
export function copyButton(text, label = "Copy") {
  const button = make("button", { type: "button", class: "quiet" }, label);
  button.addEventListener("click", async () => {
    setText(button, (await copyText(text())) ? "Copied" : "Could not copy");
    setTimeout(() => setText(button, label), 1500);
  });
  return button;
}

/**
 * A quantity of something, with thin spaces between thousands.
 *
 * @param {number} value
 */
export function count(value) {
  return value.toLocaleString("en-US").replaceAll(",", "\u202f");
}

/**
 * @param {number} value
 * @param {string} one
 * @param {string} [many]
 */
export function plural(value, one, many = `${one}s`) {
  return `${count(value)} ${value === 1 ? one : many}`;
}

export function prefersLessMotion() {
  return matchMedia("(prefers-reduced-motion: reduce)").matches;
}
