// What two answers to the same question differ in.

import { el, seconds } from "./dom.js";

export function verdict(blended, full) {
  const [fast, slow] = [blended, full].map((view) => view.opened?.figures.ttft_s);
  if (!fast || !slow) return el("p", { class: "verdict" }, "The server gave no times to compare.");
  const times = slow / fast;
  const speed = times >= 1 ? `${times.toFixed(1)} times as fast` : `${(1 / times).toFixed(1)} times as slow`;
  return el(
    "p",
    { class: "verdict", role: "status" },
    el("b", {}, `${seconds(fast)} instead of ${seconds(slow)}`),
    ` to the first token: blending was ${speed}. ${likeness(blended.text, full.text)}`,
  );
}

function likeness(one, other) {
  const [a, b] = [one, other].map((text) => text.trim().split(/\s+/));
  const same = a.findIndex((word, i) => word !== b[i]);
  if (same < 0 && a.length === b.length) return "Both answers are the same.";
  const first = same < 0 ? a.length : same;
  return first ? `The answers are the same for ${first} ${first === 1 ? "word" : "words"}, then differ.` : "The answers differ from the first word.";
}
