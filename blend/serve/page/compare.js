// How two answers to the same question differ.

import { el, seconds } from "./dom.js";

const COLD = "Full prefill computes every token anew, also what an earlier prompt left in memory.";

// A line that exists from the start, so that nothing moves when it is filled: {element, show(blended, full)}.
export function verdict() {
  const element = el("p", { class: "verdict", role: "status" }, `Asked twice, one after the other: blended, then with full prefill. ${COLD}`);
  return { element, show: (blended, full) => element.replaceChildren(...said(blended, full)) };
}

function said(blended, full) {
  const [fast, slow] = [blended, full].map((view) => view.opened?.figures.ttft_s);
  if (!fast || !slow) return [likeness(blended.text, full.text)];
  const took = el("b", {}, `${seconds(fast)} instead of ${seconds(slow)}`);
  // Both ran full prefill: the difference of their times is chance.
  if (blended.opened.figures.method === "full") return [took, ` to the first token. Nothing was blended, so this says nothing of blending. ${likeness(blended.text, full.text)}`];
  const times = slow / fast;
  const speed = times >= 1 ? `${times.toFixed(1)} times as fast` : `${(1 / times).toFixed(1)} times as slow`;
  return [took, ` to the first token: blending was ${speed}. ${COLD} ${likeness(blended.text, full.text)}`];
}

function likeness(one, other) {
  const [a, b] = [one, other].map((text) => text.trim().split(/\s+/));
  const differs = a.findIndex((word, i) => word !== b[i]);
  if (differs < 0 && a.length === b.length) return "Both answers are the same.";
  const same = differs < 0 ? a.length : differs;
  return same ? `The answers are the same for ${same} ${same === 1 ? "word" : "words"}, then differ.` : "The answers differ from the first word.";
}
