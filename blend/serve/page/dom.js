// Builds elements from text nodes only, so that no document or answer becomes markup; and this tab's storage.

export const byId = (id) => document.getElementById(id);

// el("p", { class: "note", onclick: f }, "text", child): null, undefined and false are skipped.
export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

// One line in a paragraph of class "trouble"; an empty one hides it.
export function showLine(paragraph, line) {
  paragraph.textContent = line;
  paragraph.hidden = !line;
}

// For screen readers only.
export function announce(line) {
  byId("status").textContent = line;
}

// A word with an explanation: a title for the pointer, text below it for the keyboard.
export const term = (word, meaning) => el("span", { class: "term", tabindex: "0", title: meaning }, word);

// Storage of this tab that survives a reload; null if nothing can be read.
export function kept(name) {
  try {
    return JSON.parse(sessionStorage.getItem(`kvblend.${name}`));
  } catch {
    return null;
  }
}

export function keep(name, value) {
  try {
    sessionStorage.setItem(`kvblend.${name}`, JSON.stringify(value));
  } catch {
    // Beyond the browser's quota: keep nothing rather than an old state.
    sessionStorage.removeItem(`kvblend.${name}`);
  }
}

export const count = (number, one, many = `${one}s`) => `${number.toLocaleString("en")} ${number === 1 ? one : many}`;

export function seconds(value) {
  if (value < 0.0995) return `${(1000 * value).toFixed(value < 0.00995 ? 1 : 0)} ms`;
  return `${value.toFixed(value < 9.95 ? 2 : 1)} s`;
}
