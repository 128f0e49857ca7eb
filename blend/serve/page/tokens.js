// The prompt by tokens: coloured by the selector's score, recomputed ones underlined.

import { count, el } from "./dom.js";

const STEPS = 12; // .heat1 to .heat12 in answer.css
const SLICE = 1500;
const PARTS = { prefix: "Before the passages", chunk: "Passage", text: "Text between", suffix: "The question" };

// Drawn when opened: a prompt has thousands of tokens.
export function tokensView(trace, sources) {
  if (!trace.length) return [];
  const recomputed = trace.filter((token) => token.recomputed).length;
  const summary = el("summary", {}, el("span", { class: "title" }, "The prompt’s tokens"), el("span", { class: "soft" }, `${recomputed.toLocaleString("en")} of ${count(trace.length, "token")} recomputed`));
  const details = el("details", { class: "tokens" }, summary);
  details.addEventListener("toggle", () => details.children.length === 1 && details.append(...drawn(trace, sources)));
  return [details];
}

function drawn(trace, sources) {
  const share = scale(trace);
  const told = el("p", { class: "told", role: "status" }, "Point at a token, or use the arrow keys.");
  const spans = [];
  const text = el("div", { class: "text", tabindex: "0", role: "group", "aria-label": "The prompt, token by token" });
  const parts = partsOf(trace, sources);
  const draw = (at) => {
    const stop = Math.min(parts.length, at + Math.max(1, pieces(parts, at)));
    for (const part of parts.slice(at, stop)) text.append(partView(part, trace, share, spans));
    if (stop < parts.length) requestAnimationFrame(() => draw(stop));
  };
  draw(0);
  pointing(text, spans, trace, told);
  return [legend(trace), text, told];
}

// Parts drawn in one frame.
function pieces(parts, at) {
  let tokens = 0;
  const last = parts.findIndex((part, i) => i >= at && (tokens += part.stop - part.start) >= SLICE);
  return last < 0 ? parts.length - at : last - at + 1;
}

// Groups tokens by part, and splits passages by the sources' lengths.
function partsOf(trace, sources) {
  const parts = [];
  trace.forEach((token, i) => {
    if (token.part === parts.at(-1)?.part) parts.at(-1).stop = i + 1;
    else parts.push({ part: token.part, start: i, stop: i + 1 });
  });
  const lengths = sources.map((source) => source.tokens);
  const passages = parts.filter((part) => part.part === "chunk").reduce((sum, part) => sum + part.stop - part.start, 0);
  if (lengths.reduce((sum, length) => sum + length, 0) !== passages) return parts;
  return cut(parts, sources);
}

function cut(parts, sources) {
  let next = 0;
  return parts.flatMap((part) => {
    if (part.part !== "chunk") return [part];
    const found = [];
    for (let start = part.start; start < part.stop; next++) {
      const stop = Math.min(part.stop, start + sources[next].tokens);
      if (stop > start) found.push({ part: "chunk", start, stop, title: sources[next].title, number: next + 1, hit: sources[next].hit });
      start = stop;
    }
    return found;
  });
}

function partView(part, trace, share, spans) {
  const tokens = trace.slice(part.start, part.stop);
  const recomputed = tokens.filter((token) => token.recomputed).length;
  const known = part.hit === undefined ? "" : part.hit ? "known" : "new";
  const name = [part.number ? `Passage ${part.number}` : (PARTS[part.part] ?? part.part), known, part.title, count(tokens.length, "token"), `${recomputed} recomputed`];
  const nodes = tokens.map((token, i) => {
    const span = document.createElement("span");
    span.className = `${token.recomputed ? "row " : ""}${scored(token) ? `heat${Math.round(STEPS * share(token.score))}` : ""}`;
    span.textContent = token.text;
    spans[part.start + i] = span;
    return span;
  });
  return el("div", { class: `part ${known}` }, el("h4", {}, name.filter(Boolean).join(" · ")), nodes);
}

// Only rows of passages are selected by score; the scores of what precedes them would outshine theirs.
const scored = (token) => token.part === "chunk" && token.score !== null;

// Position of a score between the minimum (at most 0) and the 98th percentile; the square root shows small ones.
function scale(trace) {
  const scores = trace.filter(scored).map((token) => token.score).sort((a, b) => a - b);
  const floor = Math.min(0, scores[0] ?? 0);
  const top = Math.max(floor + 1e-12, scores[Math.floor(0.98 * (scores.length - 1))] ?? 0);
  return (score) => Math.sqrt(Math.max(0, Math.min(1, (score - floor) / (top - floor))));
}

function pointing(text, spans, trace, told) {
  let shown = -1;
  const show = (i) => {
    spans[shown]?.classList.remove("pointed");
    shown = i;
    spans[i].classList.add("pointed");
    const { text: word, score, recomputed } = trace[i];
    told.textContent = `“${word.replaceAll("\n", "↵")}” · token ${i + 1} · ${recomputed ? "recomputed" : "kept as it was"} · ${score === null ? "no score" : `score ${Number(score.toPrecision(3))}`}`;
  };
  text.addEventListener("pointerover", (event) => {
    const i = event.target.localName === "span" ? spans.indexOf(event.target) : -1;
    if (i >= 0) show(i);
  });
  text.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step || !spans[shown + step]) return;
    event.preventDefault();
    show(shown + step);
    spans[shown].scrollIntoView({ block: "nearest" });
  });
}

function legend(trace) {
  return el(
    "p",
    { class: "key" },
    trace.some(scored) ? el("span", {}, "score: low ", el("i", { class: "ramp", "aria-hidden": "true" }), " high") : el("span", {}, "no scores: nothing was chosen by them"),
    el("span", {}, el("i", { class: "underline", "aria-hidden": "true" }), "underlined: recomputed"),
  );
}
