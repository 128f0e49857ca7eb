// The stages of the time to the first token, and the time of full prefill, measured or estimated.

import { el, seconds, term } from "./dom.js";

const STAGES = {
  waited: "waiting",
  prepare: "finding passages, reading the text",
  retrieve: "finding passages",
  load: "loading caches",
  reposition: "moving them into place",
  select: "choosing rows",
  recompute: "recomputing",
  first_token: "computing the first token",
  other: "everything else",
};
const ROWS = "A row is the KV of one token in one layer. The selector chooses the rows of the stored caches that are computed again.";
const COLOURS = 8;

// Folded to one line. compared: {measured} with the seconds of full prefill, or null; null without a comparison.
export function timeView(figures, compared = null) {
  const full = fullOf(figures, compared);
  const parts = stagesOf(figures);
  const longest = Math.max(figures.ttft_s, full?.took ?? 0);
  const name = figures.method === "full" ? "Full prefill" : "Blended";
  return el(
    "details",
    { class: "times", "aria-label": "Where the time went" },
    el("summary", {}, el("span", { class: "title" }, `First token after ${seconds(figures.ttft_s)}`), el("span", { class: "soft" }, comparison(figures, full, compared))),
    row(name, figures.ttft_s, parts, longest),
    full && row(full.label, full.took, [full], longest),
    el("ul", { class: "legend" }, parts.map((part) => el("li", {}, swatch(part), part.name === "select" ? term(part.label, ROWS) : part.label, " ", el("b", {}, seconds(part.took))))),
    notes(figures).map((line) => el("p", { class: "remark" }, line)),
  );
}

function stagesOf(figures) {
  const found = [["waited", figures.waited_s ?? 0], ...Object.entries(figures.stages ?? {})];
  const said = found.reduce((sum, [, took]) => sum + took, 0);
  found.push(["other", figures.ttft_s - said]);
  // Stages too short to be seen join the rest.
  const short = found.filter(([name, took]) => name !== "other" && took < 0.005 * figures.ttft_s);
  const parts = found.filter(([, took]) => took >= 0.005 * figures.ttft_s && took > 0).map(([name, took], i) => ({ name, label: STAGES[name] ?? name, took, colour: i % COLOURS }));
  const rest = short.reduce((sum, [, took]) => sum + took, 0);
  const other = parts.find((part) => part.name === "other");
  if (other) other.took += rest;
  return parts;
}

// Full prefill of this prompt as {name, label, took, measured}, or null. Prefers a measurement; a comparison shows no estimate.
function fullOf(figures, compared) {
  if (figures.method === "full") return null;
  const measured = compared ? compared.measured : figures.full_measured_s;
  const took = measured ?? (compared ? null : figures.full_estimated_s);
  return took ? { name: "full", label: `Full prefill, ${measured ? "measured" : "estimated"}`, took, measured: Boolean(measured) } : null;
}

function comparison(figures, full, compared) {
  if (figures.method === "full") return ["nothing was blended", figures.reason].filter(Boolean).join(": ");
  if (!full) return compared ? "full prefill comes next" : "full prefill is not measured yet";
  const times = full.took / figures.ttft_s;
  const speed = times >= 1.05 ? `${times.toFixed(1)} times as fast as full prefill` : "no faster than full prefill";
  return full.measured ? `${speed}, measured` : `estimated ${speed}`;
}

function notes(figures) {
  // Rows that earlier turns blended are part of this prompt, even if it added none.
  const nothing = figures.reason && figures.method !== "full" ? [`Nothing more was blended: ${figures.reason}.`.replace(/\.\.$/, ".")] : [];
  return [...nothing, ...(figures.notes ?? [])];
}

// Widths are set through the DOM: the content security policy forbids style attributes.
function row(name, took, parts, longest) {
  const bar = el("div", { class: "bar", "aria-hidden": "true" }, parts.map(piece));
  bar.style.width = `${(100 * took) / longest}%`;
  return el("div", { class: "timed" }, el("span", { class: "name" }, name), el("div", { class: "track", "aria-hidden": "true" }, bar), el("b", {}, seconds(took)));
}

function piece(part) {
  const node = el("span", { class: part.name === "full" ? "piece full" : `piece stage${part.colour}`, title: `${part.label} ${seconds(part.took)}` });
  // Shares that sum to less than 1 would leave a gap.
  node.style.flexGrow = String(1000 * part.took);
  return node;
}

const swatch = (part) => el("i", { class: `swatch stage${part.colour}`, "aria-hidden": "true" });
