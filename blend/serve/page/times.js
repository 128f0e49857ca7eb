// Where the time to the first token went, beside what full prefill of the same prompt would have taken.

import { el, seconds } from "./dom.js";

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
const COLOURS = 8;

export function timeView(figures) {
  const parts = stagesOf(figures);
  const whole = parts.reduce((sum, part) => sum + part.took, 0);
  const longest = Math.max(whole, figures.full_s ?? 0);
  const name = figures.method === "full" ? "Full prefill" : "Blended";
  return el(
    "div",
    { class: "times", role: "group", "aria-label": "Where the time went" },
    el("h3", {}, "Time to the first token ", el("span", { class: "count" }, comparison(figures))),
    row(name, whole, parts, longest),
    figures.method !== "full" && figures.full_s !== null && figures.full_s !== undefined ? row("Full prefill", figures.full_s, [{ name: "full", took: figures.full_s }], longest) : null,
    el("ul", { class: "legend" }, parts.map((part) => el("li", {}, swatch(part), `${part.label} `, el("b", {}, seconds(part.took))))),
    notes(figures).map((line) => el("p", { class: "remark" }, line)),
  );
}

function stagesOf(figures) {
  const found = [["waited", figures.waited_s ?? 0], ...Object.entries(figures.stages ?? {})];
  const said = found.reduce((sum, [, took]) => sum + took, 0);
  found.push(["other", figures.ttft_s - said]);
  // What is too short to be seen is told with the rest.
  const short = found.filter(([name, took]) => name !== "other" && took < 0.005 * figures.ttft_s);
  const parts = found.filter(([, took]) => took >= 0.005 * figures.ttft_s && took > 0).map(([name, took], i) => ({ name, label: STAGES[name] ?? name, took, colour: i % COLOURS }));
  const rest = short.reduce((sum, [, took]) => sum + took, 0);
  const other = parts.find((part) => part.name === "other");
  if (other) other.took += rest;
  return parts;
}

function comparison(figures) {
  if (figures.method === "full") return "nothing was blended";
  if (!figures.full_s) return "full prefill is not measured yet";
  const times = figures.full_s / figures.ttft_s;
  return times >= 1.05 ? `${times.toFixed(1)} times as fast as full prefill` : "no faster than full prefill";
}

function notes(figures) {
  const lines = [...(figures.notes ?? [])];
  // What earlier turns of the conversation blended is part of this prompt, whether or not anything was added to it.
  const nothing = figures.method === "full" ? "Nothing was blended" : "Nothing more was blended";
  if (figures.reason) lines.unshift(`${nothing}: ${figures.reason}.`.replace(/\.\.$/, "."));
  return lines;
}

// Widths are set on the element's own style: a style attribute would break the policy that keeps foreign styles out.
function row(name, took, parts, longest) {
  const bar = el("div", { class: "bar", "aria-hidden": "true" }, parts.map(piece));
  bar.style.width = `${(100 * took) / longest}%`;
  return el("div", { class: "timed" }, el("span", { class: "name" }, name), el("div", { class: "track", "aria-hidden": "true" }, bar), el("b", {}, seconds(took)));
}

function piece(part) {
  const node = el("span", { class: part.name === "full" ? "piece full" : `piece stage${part.colour}`, title: `${part.label ?? "full prefill, by this machine’s profile"} ${seconds(part.took)}` });
  // Shares below 1 in all would leave a part of the bar empty.
  node.style.flexGrow = String(1000 * part.took);
  return node;
}

const swatch = (part) => el("i", { class: `swatch stage${part.colour}`, "aria-hidden": "true" });
