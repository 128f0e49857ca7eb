// One document of the corpus: its name, its progress, and the button that deletes it.

import { announce, count, el } from "./dom.js";

const STEPS = { queued: "waiting", reading: "being read", indexing: "being indexed", computing: "being computed" };
const DONE = new Set(["ready", "failed"]);

export const nameOf = (item) => item.file || item.title;
export const working = (item) => !DONE.has(item.status);

// One item a file: the records of a file together.
export function files(items) {
  const groups = Map.groupBy(items, (item) => item.file || item.id);
  return [...groups].map(([id, parts]) => (parts.length > 1 ? together(id, parts) : { ...parts[0], id }));
}

function together(id, parts) {
  const sum = (number) => parts.reduce((total, part) => total + number(part), 0);
  return {
    id,
    file: id,
    records: parts.filter((part) => part.id !== id).length,
    status: (parts.find(({ status }) => status === "failed") ?? parts.find(working) ?? parts[0]).status,
    chunks: sum(({ chunks }) => chunks),
    progress: { done: sum(({ progress }) => progress.done), total: sum(({ progress }) => progress.total) },
    reason: parts.map(({ reason }) => reason).find(Boolean),
  };
}

export class DocumentRow {
  constructor(id, name, onDelete) {
    this.state = el("div", { class: "state" });
    this.element = el("li", {}, el("div", { class: "document" }, el("span", { class: "title" }, name), this.state), deleter(id, name, onDelete));
  }

  show(item) {
    this.state.replaceChildren(...stateOf(item));
    return this.element;
  }
}

function stateOf(item) {
  if (item.status === "failed") return [el("span", { class: "soft bad" }, item.reason)];
  return item.reason ? [...progressOf(item), el("span", { class: "soft" }, item.reason)] : progressOf(item);
}

function progressOf(item) {
  if (!working(item)) return item.chunks ? [el("span", { class: "soft" }, factsOf(item).join(" · "))] : [];
  if (!item.progress?.total) return [el("span", { class: "soft" }, STEPS[item.status] ?? item.status)];
  const { done, total } = item.progress;
  const label = `${STEPS[item.status] ?? item.status}: ${Math.floor((100 * done) / total)} %`;
  return [el("span", { class: "soft" }, label), el("progress", { "aria-label": `${nameOf(item)} is ${label}`, max: String(total), value: String(done) })];
}

function factsOf(item) {
  const title = item.title && !nameOf(item).includes(item.title) && item.title;
  return [title, item.records && count(item.records, "record"), count(item.chunks, "passage")].filter(Boolean);
}

// Needs two presses: a deletion is final.
function deleter(id, name, onDelete) {
  const button = el("button", { type: "button", class: "quiet delete", "aria-label": `Delete ${name}` }, "Delete");
  button.addEventListener("blur", () => {
    button.classList.remove("sure");
    button.textContent = "Delete";
  });
  button.addEventListener("click", () => {
    if (button.classList.contains("sure")) return onDelete(id);
    button.classList.add("sure");
    button.textContent = "Really?";
    announce(`Press again to delete ${name} for good`);
  });
  return button;
}
