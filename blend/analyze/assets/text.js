// The prompt's text, coloured by a score.

const shownScore = { name: null, only: false };

function scoreTop(prompt, family) {
  const values = prompt.scores.filter((s) => s.family === family).flatMap((s) => s.values).filter((v) => v !== null).sort((a, b) => a - b);
  return Math.max(1e-12, values[Math.floor(0.98 * (values.length - 1))] ?? 0);
}

// Scores that may be negative (sums of z-scores) start at their own least value.
function scoreFloor(score) {
  return Math.min(0, ...score.values.filter((v) => v !== null));
}

function showText(prompt) {
  const initial = prompt.scores.findIndex((s) => s.name === (shownScore.name ?? prompt.shown));
  const controls = document.getElementById("text-controls");
  choice(controls, prompt.scores.map((s) => s.label), Math.max(0, initial), (index) => {
    shownScore.name = prompt.scores[index].name;
    colourText(prompt, prompt.scores[index]);
  });
  const only = document.createElement("label");
  only.innerHTML = `<input type="checkbox"${shownScore.only ? " checked" : ""}> dim rows that are not recomputed`;
  only.firstChild.addEventListener("change", (event) => {
    shownScore.only = event.target.checked;
    document.getElementById("text").classList.toggle("only", shownScore.only);
  });
  controls.append(only);
}

function colourText(prompt, score) {
  const recomputed = new Set(prompt.recomputed);
  const top = scoreTop(prompt, score.family), floor = scoreFloor(score);
  const share = (v) => { const s = clamp((v - floor) / (top - floor)); return score.sqrt ? Math.sqrt(s) : s; };
  const token = (i) => {
    const v = score.values[i];
    const colour = v === null ? "" : ` style="background:rgba(var(--heat),${(0.72 * share(v)).toFixed(3)})"`;
    return `<span data-row="${i}"${recomputed.has(i) ? ' class="row"' : ""}${colour}>${escapeText(prompt.tokens[i])}</span>`;
  };
  const parts = prompt.segments.map((segment) => {
    const rows = Array.from({ length: segment.stop - segment.start }, (_, k) => segment.start + k);
    const done = rows.filter((r) => recomputed.has(r)).length;
    return `<h4>${escapeText(titled(segment))} \u00b7 ${rows.length} tokens \u00b7 ${done} recomputed</h4>${rows.map(token).join("")}`;
  });
  const place = document.getElementById("text");
  const scrolled = place.scrollTop;
  place.innerHTML = parts.join("");
  place.scrollTop = scrolled;
  place.classList.toggle("only", shownScore.only);
  const ramp = `linear-gradient(90deg,${[0, 0.18, 0.36, 0.54, 0.72].map((a) => `rgba(var(--heat),${a})`).join(",")})`;
  document.getElementById("text-legend").innerHTML =
    `<span>${escapeText(score.label)}: ${brief(floor)}<i class="ramp" style="background:${ramp}"></i>${brief(top)} and more${score.sqrt ? " (square-root scale)" : ""}</span>` +
    `<span><i class="swatch" style="border-top-color:var(--mark)"></i>underlined: recomputed</span><span>the prefix is exact, the question always recomputed: they have no score</span>`;
  document.getElementById("reading-text").textContent = textReading(prompt, score, recomputed);
}

function textReading(prompt, score, recomputed) {
  const scored = score.values.map((v, i) => [v, i]).filter(([v]) => v !== null);
  const chosen = scored.filter(([, i]) => recomputed.has(i)).length;
  const total = scored.reduce((sum, [v]) => sum + v, 0);
  const held = scored.reduce((sum, [v, i]) => sum + (recomputed.has(i) ? v : 0), 0);
  const best = scored.slice().sort((a, b) => b[0] - a[0]).slice(0, 5).map(([, i]) => `\u201c${prompt.tokens[i].trim() || "\u21b5"}\u201d`);
  const holds = floorless(score) ? ` and hold ${percent(held / Math.max(total, 1e-30))} of this score` : "";
  return `${chosen} of ${scored.length} context rows are recomputed (${percent(chosen / Math.max(1, scored.length))})${holds}; the highest score: ${best.join(", ")}.`;
}

const floorless = (score) => scoreFloor(score) === 0;
const brief = (v) => (v === null ? "\u2013" : v === 0 ? "0" : Math.abs(v) >= 0.01 && Math.abs(v) < 1000 ? String(+v.toPrecision(3)) : v.toExponential(1));

function tokenTip(prompt, row) {
  const segment = prompt.segments.find((s) => row < s.stop);
  const lines = prompt.scores.filter((s) => s.values[row] !== null).map((s) => `${s.label}: ${brief(s.values[row])}`);
  const head = `\u201c${prompt.tokens[row].replace(/\n/g, "\u21b5")}\u201d \u00b7 row ${row}, token ${row - segment.start} of ${titled(segment)}, ${prompt.kinds[row]}`;
  return [head, prompt.recomputed.includes(row) ? "recomputed" : "kept as stored", ...lines].join("\n");
}
