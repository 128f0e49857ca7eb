// What an answer was given from. Nothing here is made up by the model: the server says what stood in the prompt.

import { count, el } from "./dom.js";

const KINDS = {
  document: "sent along",
  retrieved: "found in the corpus",
  pasted: "found in the message",
  learned: "learned from earlier messages",
};

// Nothing where there are no sources.
export function sourcesView(sources) {
  if (!sources.length) return [];
  const hits = sources.filter((source) => source.hit).length;
  return [
    el(
      "div",
      { class: "sources", role: "group", "aria-label": "Sources" },
      el("h3", {}, "Sources ", el("span", { class: "count" }, `${hits} of ${count(sources.length, "stored cache")} found`)),
      el("ol", {}, sources.map(sourceView)),
    ),
  ];
}

function sourceView(source, index) {
  const title = source.title || source.document || source.id || source.text.trim().slice(0, 80) || "Untitled";
  const facts = [KINDS[source.kind] ?? source.kind, count(source.tokens, "token")];
  if (source.score !== null && source.score !== undefined) facts.push(`score ${source.score.toFixed(2)}`);
  return el(
    "li",
    {},
    el(
      "details",
      {},
      el(
        "summary",
        {},
        el("span", { class: "number", "aria-hidden": "true" }, String(index + 1)),
        el("span", { class: "title" }, title),
        el("span", { class: source.hit ? "badge hit" : "badge miss" }, source.hit ? "hit" : "miss"),
        el("span", { class: "soft" }, facts.join(" · ")),
      ),
      el("p", { class: "passage", tabindex: "0", role: "group", "aria-label": `Text of ${title}` }, source.text),
      el("p", { class: "soft" }, source.hit ? "Its cache came out of the store." : "It had no cache in the store and was computed for this answer."),
    ),
  );
}
