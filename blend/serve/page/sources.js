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

// Learned text is no source: it may be an earlier turn. Empty without passages.
export function sourcesView(passages) {
  const numbered = passages.map((passage, index) => ({ ...passage, number: index + 1 }));
  return [
    ...listView("Sources", numbered.filter(({ kind }) => kind !== "learned")),
    ...listView("Text of the conversation", numbered.filter(({ kind }) => kind === "learned")),
  ];
}

function listView(name, passages) {
  if (!passages.length) return [];
  const hits = passages.filter(({ hit }) => hit).length;
  return [
    el(
      "div",
      { class: "sources", role: "group", "aria-label": name },
      el("h3", {}, `${name} `, el("span", { class: "count" }, term(`${count(hits, "hit")} of ${passages.length}`, `${HIT} ${MISS}`))),
      el("ol", {}, passages.map(sourceView)),
    ),
  ];
}

function sourceView(source) {
  const title = source.title || source.document || source.id || source.text.trim().slice(0, 80) || "Untitled";
  const facts = [KINDS[source.kind] ?? source.kind, count(source.tokens, "token")];
  if (source.document && source.document !== title) facts.unshift(source.document);
  if (source.score !== null && source.score !== undefined) facts.push(`score ${source.score.toFixed(2)}`);
  return el(
    "li",
    {},
    el(
      "details",
      { "data-passage": String(source.number) },
      el(
        "summary",
        {},
        el("span", { class: "number", "aria-hidden": "true" }, String(source.number)),
        el("span", { class: "title" }, title),
        el("span", { class: source.hit ? "badge hit" : "badge miss", title: source.hit ? HIT : MISS }, source.hit ? "hit" : "miss"),
        el("span", { class: "soft" }, facts.join(" · ")),
      ),
      el("p", { class: "passage", tabindex: "0", role: "group", "aria-label": `Text of ${title}` }, source.text),
      el("p", { class: "soft" }, source.hit ? HIT : MISS),
    ),
  );
}
