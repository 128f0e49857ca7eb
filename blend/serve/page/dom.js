// Elements without markup: whatever a document or an answer holds becomes a text node and nothing else. And this tab's storage.

export const byId = (id) => document.getElementById(id);

// el("p", { class: "note", onclick: f }, "text", child): null, undefined and false are left out, of attributes and of children.
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
export function tell(paragraph, line) {
  paragraph.textContent = line;
  paragraph.hidden = !line;
}

// Said by a screen reader when it has nothing else to say; seen by nobody.
export function announce(line) {
  byId("status").textContent = line;
}

// A word with its explanation, for the pointer as a title and for the keyboard as text below it.
export const term = (word, meaning) => el("span", { class: "term", tabindex: "0", title: meaning }, word);

// What a reload keeps, in this tab alone; null where there is nothing that can be read.
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
    // Too much for the browser's quota: better nothing than an earlier state.
    sessionStorage.removeItem(`kvblend.${name}`);
  }
}

export const count = (number, one, many = `${one}s`) => `${number.toLocaleString("en")} ${number === 1 ? one : many}`;

export function seconds(value) {
  if (value < 0.0995) return `${(1000 * value).toFixed(value < 0.00995 ? 1 : 0)} ms`;
  return `${value.toFixed(value < 9.95 ? 2 : 1)} s`;
}
