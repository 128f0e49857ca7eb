// Marks the sentences of an answer with the passage that holds most of their words. The model names no sources; this compares words.

import { el } from "./dom.js";

const LEAST_SHARE = 0.6; // of a sentence's words, by weight, that the passage must hold
const LEAST_WORDS = 3;
const PARTS = "p:not(.heading), li, pre, td";
const SENTENCES = new Intl.Segmenter("en", { granularity: "sentence" });

const wordsOf = (text) => new Set(text.toLowerCase().match(/[\p{L}\p{N}_]+/gu));

// prose: the element of a whole answer. passages: of its prompt, in order.
export function cite(prose, passages) {
  const sources = passages.map(({ kind, title, text }, index) => ({ kind, title, number: index + 1, words: wordsOf(`${title} ${text}`) })).filter(({ kind }) => kind !== "learned");
  for (const part of prose.querySelectorAll(PARTS)) {
    if (part.querySelector(PARTS)) continue;
    const cited = sentencesOf(part).map(({ index, segment }) => ({ end: index + segment.trimEnd().length, source: best(wordsOf(segment), sources) }));
    // From the end, so that places before it stay true; neighbours with one source share a mark.
    cited.forEach(({ source }, i) => source && source === cited[i + 1]?.source && (cited[i].source = null));
    cited.reverse().forEach(({ end, source }) => source && insert(part, end, link(source)));
  }
}

const sentencesOf = (part) => (part.localName === "pre" ? [{ index: 0, segment: part.textContent }] : [...SENTENCES.segment(part.textContent)]);

// A word weighs more the fewer passages hold it: words of all passages say little of where a sentence comes from.
function best(words, sources) {
  if (words.size < LEAST_WORDS) return null;
  const weigh = (some) => some.reduce((sum, word) => sum + Math.log(1 + sources.length / Math.max(1, sources.filter((source) => source.words.has(word)).length)), 0);
  const held = sources.map((source) => weigh([...words].filter((word) => source.words.has(word))));
  const most = Math.max(...held);
  return most >= LEAST_SHARE * weigh([...words]) ? sources[held.indexOf(most)] : null;
}

function link({ number, title }) {
  const meaning = `Passage ${number}${title && `, ${title}`}: it holds most of these words. The page compared them; the model names no sources.`;
  return el("button", { type: "button", class: "cite", title: meaning, onclick: (event) => reveal(event.target.closest(".turn"), number) }, `[${number}]`);
}

// end: where in the part's text.
function insert(part, end, mark) {
  const texts = document.createTreeWalker(part, NodeFilter.SHOW_TEXT);
  while (texts.nextNode() && texts.currentNode.length < end) end -= texts.currentNode.length;
  let before = texts.currentNode;
  if (end < before.length) before.splitText(end);
  while (before.parentNode !== part && !before.nextSibling) before = before.parentNode; // behind code and bold, not within
  before.after(mark);
}

function reveal(turn, number) {
  const details = turn.querySelector(`[data-passage="${number}"]`);
  details.open = true;
  details.querySelector("summary").focus();
}
