// The passages of the prompt, as the server reports them; nothing comes from the model.

import { count, el, term } from "./dom.js";

const KINDS = {
  document: "sent along",
  retrieved: "found in the corpus",
  pasted: "found in the message",
  learned: "in a message",
};

const HIT = "Hit: the store held this passage’s KV cache, so the model did not read the passage again.";
const MISS = "Miss: the store held no KV cache of this passage, so the model computed it for this answer.";

// Empty without sources.
export function sourcesView(sources) {
  if (!sources.length) return [];
  const hits = sources.filter((source) => source.hit).length;
  return [
    el(
      "div",
      { class: "sources", role: "group", "aria-label": "Sources" },
      el("h3", {}, "Sources ", el("span", { class: "count" }, term(`${count(hits, "hit")} of ${sources.length}`, `${HIT} ${MISS}`))),
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
        el("span", { class: source.hit ? "badge hit" : "badge miss", title: source.hit ? HIT : MISS }, source.hit ? "hit" : "miss"),
        el("span", { class: "soft" }, facts.join(" · ")),
      ),
      el("p", { class: "passage", tabindex: "0", role: "group", "aria-label": `Text of ${title}` }, source.text),
      el("p", { class: "soft" }, source.hit ? HIT : MISS),
    ),
  );
}
