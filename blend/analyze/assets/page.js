const data = JSON.parse(document.getElementById("data").textContent);
const put = (id, markup) => { document.getElementById(id).innerHTML = markup; };
const say = (id, text) => { document.getElementById(id).textContent = text; };
const { mean, axes, head } = data;
const layerNames = mean.sparsity.visible.map((_, i) => String(i));
let prompt = data.prompts[0];

function showHead() {
  const of = data.records.length === 1 ? "one prompt" : `${data.records.length} prompts`;
  say("subtitle", `${data.model} \u00b7 ${data.workload}, ${of} \u00b7 selector ${data.config.selector} at ratio ${data.config.ratio} \u00b7 ${data.created.slice(0, 16).replace("T", " ")} UTC`);
  const average = data.records.length === 1 ? "" : " on average";
  const figures = [
    [Math.round(head.tokens).toLocaleString("en"), `tokens in ${+head.chunks.toFixed(1)} chunks${average}; ${Math.round(head.recomputed)} rows recomputed`],
    [percent(head.computed_share), "of full recompute's row \u00d7 layer work is done"],
    [String(Math.round(head.keys_90)), "keys hold 90% of a row's attention"],
    [percent(head["below_0.001"]), "of attention weights are below 0.001"],
    [percent(head.top_15_share), "of the squared deviation of values is held by 15% of the rows"],
    [`${percent(head.value_deviation_before)} \u2192 ${percent(head.value_deviation_after)}`, "deviation of values, before and after blending"],
    [`${percent(head.cross_full)}`, `of attention goes to other chunks; ${percent(head.cross_read_restored)} of what the question reads of it is restored`],
    [`${head.variation_reuse.toFixed(3)} \u2192 ${head.variation_blended.toFixed(3)}`, "distance of the question's attention to full recompute, before and after"],
  ];
  put("figures", figures.map(([value, words]) => `<div><b>${value}</b><span>${escapeText(words)}</span></div>`).join(""));
  put("notes", data.notes.map((note) => `<p>${escapeText(note)}</p>`).join(""));
  say("command", data.command);
  document.querySelectorAll("[data-reading]").forEach((place) => { place.textContent = data.readings[place.dataset.reading]; });
  document.querySelectorAll(".scope").forEach((place) => { place.textContent = data.records.length > 1 ? `Mean over ${data.records.length} prompts, unless a picture names one prompt.` : ""; place.hidden = data.records.length < 2; });
}

const column = (matrix, index) => matrix.map((row) => row[index]);

function showMeans() {
  const { cross } = mean;
  put("cross", lineChart({
    series: [
      { name: "full recompute", values: cross.full, color: "var(--grey)", dash: "7 4" },
      { name: "after blending", values: cross.blended, color: "var(--blue)" },
      { name: "plain reuse (none, by construction)", values: cross.full.map(() => 0), color: "var(--orange)", dash: "2 3" },
    ], xLabel: "layer", yLabel: "share of a context row's attention", label: "Attention to other chunks by layer" }));
  put("variation", lineChart({
    series: [
      { name: "plain reuse", values: cross.variation_reuse, color: "var(--orange)", dash: "7 4" },
      { name: "after blending", values: cross.variation_blended, color: "var(--blue)" },
    ], yFormat: (v) => v.toFixed(2), xLabel: "layer", yLabel: "total variation (0 to 1)", label: "Distance of the question's attention by layer" }));
  for (const part of ["values", "keys"]) {
    const found = mean[part];
    put(`deviation-${part}`, lineChart({
      series: [
        { name: "mean row, reused", values: found.mean_before, color: "var(--orange)", dash: "7 4" },
        { name: "mean row, blended", values: found.mean_after, color: "var(--blue)" },
      ],
      bands: [
        { name: "reused: 5% to 95% of rows", low: column(found.before, 0), high: column(found.before, 4), color: "var(--orange)", opacity: 0.14 },
        { name: "reused: middle half", low: column(found.before, 1), high: column(found.before, 3), color: "var(--orange)", opacity: 0.24 },
      ], xLabel: "layer", yLabel: "distance / norm", label: `Deviation of ${part} by layer` }));
  }
  const tops = axes.top.map((share, i) => ({ name: `top ${percent(share)} of rows`, values: column(mean.values.top, i), color: ["var(--blue)", "var(--orange)", "var(--grey)"][i], dash: ["", "7 4", "2 3"][i] }));
  put("top", lineChart({ series: tops, xLabel: "layer", yLabel: "share of the squared deviation", label: "Share of deviation that the top rows hold, by layer" }));
  const rho = mean.values.correlation;
  put("correlation", heatmap({ matrix: rho, rows: layerNames, columns: layerNames, share: (v) => v, text: null, tip: (i, j, v) => `layers ${i} and ${j}\ncorrelation ${v.toFixed(2)}`, rowLabel: "layer", columnLabel: "layer (layer 0 deviates by rounding alone)", label: "Rank correlation between layers", square: false }) + rampLegend("Spearman's rho", "0 or less", "1"));
  places("starts", mean.places.by_start, axes.starts, "tokens from the chunk's first");
  places("ends", mean.places.by_end, axes.ends, "tokens from the chunk's last");
  places("kinds", mean.places.by_kind, axes.kinds, "");
  headMaps();
}

function places(id, counts, names, xLabel) {
  put(id, barChart({
    categories: [...names], series: [{ name: "rows among the highest", values: counts.map(([all, high]) => (all ? high / all : null)), color: "var(--blue)" }],
    counts: counts.map(([all]) => +all.toFixed(all < 10 && data.records.length > 1 ? 1 : 0)),
    baseline: { value: axes.high, name: `${percent(axes.high)}: what chance gives` }, xLabel, yLabel: `share of rows among the highest ${percent(axes.high)}`, label: xLabel || "By kind of word" }));
}

function headMaps() {
  const heads = mean.sparsity.keys[0].map((_, i) => String(i));
  const draw = (id, found, index, words, format, legendText) => {
    const matrix = found.map((layer) => column(layer, index));
    const top = Math.max(...matrix.flat()), low = Math.min(...matrix.flat());
    const span = Math.max(1e-12, top - low);
    put(id, heatmap({ matrix, rows: layerNames, columns: heads, share: (v) => (v - low) / span, tip: (i, j, v) => `layer ${i}, head ${j}\n${words}: ${format(v)}`, rowLabel: "layer", columnLabel: "head", label: words, square: false }) + rampLegend(legendText, format(low), format(top)));
  };
  choice(document.getElementById("keys-controls"), axes.masses.map((m) => `${percent(m)} of the mass`), 0, (i) => draw("keys", mean.sparsity.keys, i, `keys that hold ${percent(axes.masses[i])}`, (v) => v.toFixed(0), "keys (mean over rows)"));
  choice(document.getElementById("below-controls"), axes.thresholds.map((t) => `below ${t}`), 1, (i) => draw("below", mean.sparsity.below, i, `weights below ${axes.thresholds[i]}`, (v) => percent(v, 1), "share of weights"));
}

function layerGroups() {
  const depth = layerNames.length, third = Math.max(1, Math.round(depth / 3));
  const groups = [["all layers", 0, depth], ["early", 0, third], ["middle", third, depth - third], ["late", depth - third, depth]].filter(([, a, b]) => b > a);
  return groups.map(([name, a, b]) => ({ name: b - a === depth ? name : `${name}: layers ${a}\u2013${b - 1}`, layers: Array.from({ length: b - a }, (_, i) => a + i) }));
}

const average = (arrays) => arrays[0].map((_, i) => arrays.reduce((sum, a) => sum + a[i], 0) / arrays.length);

function chunkMap() {
  const groups = layerGroups(), names = prompt.segments.map((s) => s.name);
  choice(document.getElementById("chunk-controls"), groups.map((g) => g.name), 0, (index) => {
    const matrix = names.map((_, i) => average(groups[index].layers.map((l) => prompt.chunk_attention[l][i])).map((v, j) => (j > i ? null : v)));
    const few = names.length <= 14;
    put("chunk-map", heatmap({ matrix, rows: names, columns: names, share: Math.sqrt, text: few ? (v) => (v >= 0.0095 ? Math.round(100 * v) : "") : null, tip: (i, j, v) => `${titled(prompt.segments[i])}\nattends to ${titled(prompt.segments[j])}\n${percent(v, 2)} of its attention`, rowLabel: "rows of", columnLabel: `attend to (numbers: % of the row's attention)`, label: "Attention chunk by chunk", square: true }) + rampLegend("share of attention, square-root scale", "0", "100%"));
  });
  say("reading-chunk-map", prompt.chunk_reading);
}

// "3 \u00b7 Title" of each chunk, or "chunk 3" where chunks have no titles.
const chunkNames = () => prompt.segments.slice(1, -1).map((s, i) => (s.title ? `${i + 1} \u00b7 ${s.title}` : s.name));
const titled = (segment) => (segment.title ? `${segment.name} \u00b7 ${segment.title}` : segment.name);

function questionChart() {
  const names = chunkNames(), tips = prompt.segments.slice(1, -1).map(titled);
  const [full, reuse, blended] = prompt.question_attention.map((layers) => average(layers).slice(1, -1));
  put("question", rowChart({ names, tips, series: [
    { name: "full recompute", values: full, color: "var(--grey)" }, { name: "plain reuse", values: reuse, color: "var(--orange)" }, { name: "after blending", values: blended, color: "var(--blue)" },
  ], yFormat: (v) => percent(v, 1), wide: innerWidth > 800, xLabel: "share of the question's attention, mean over layers", label: "What the question reads" }));
  say("reading-question", prompt.question_reading);
  const { before, after } = prompt.chunk_deviation;
  put("chunk-deviation", rowChart({ names, tips, series: [{ name: "reused", values: before, color: "var(--orange)" }, { name: "blended", values: after, color: "var(--blue)" }], yFormat: (v) => percent(v, 1), wide: false, xLabel: "distance / norm, mean over rows and layers", label: "Deviation by chunk" }));
  const worst = before.indexOf(Math.max(...before));
  say("reading-chunks", `Chunk ${worst + 1} deviates most: ${percent(before[worst], 1)} before, ${percent(after[worst], 1)} after; chunk 1, right behind the prefix, ${percent(before[0], 1)}.`);
}

function picture() {
  const found = prompt.pictures;
  document.getElementById("picture-figure").hidden = !found;
  if (!found) return;
  const controls = document.getElementById("picture-controls");
  controls.innerHTML = `<label>layer <select>${found.layers.map((p, i) => `<option value="${i}"${i === found.shown ? " selected" : ""}>${p.layer}, head ${p.head}</option>`).join("")}</select></label>`;
  const select = controls.querySelector("select");
  select.addEventListener("change", () => draw(+select.value));
  const draw = (index) => {
    found.shown = index;
    const { cells, width } = found, shown = found.layers[index];
    const bytes = Uint8Array.from(atob(shown.cells), (c) => c.charCodeAt(0));
    put("picture", `<div class="picture"><canvas width="${cells}" height="${cells}" role="img" aria-label="Attention token by token"></canvas>${boundaries(cells, width)}</div>` + rampLegend(`largest weight in a cell of ${width} \u00d7 ${width} tokens, log scale`, "0.0001 or less", "1"));
    const canvas = document.querySelector("#picture canvas"), context = canvas.getContext("2d");
    const image = context.createImageData(cells, cells);
    for (let i = 0, k = 0; i < cells; i++) for (let j = 0; j <= i; j++, k++) image.data.set([...rgb(bytes[k] / 255), 255], 4 * (i * cells + j));
    context.putImageData(image, 0, 0);
    const owner = (cell) => titled(prompt.segments.find((s) => cell * width < s.stop) ?? prompt.segments.at(-1));
    canvas.addEventListener("mousemove", (event) => {
      const box = canvas.getBoundingClientRect();
      const [j, i] = [event.clientX - box.left, event.clientY - box.top].map((v) => Math.max(0, Math.min(cells - 1, Math.floor((v / box.width) * cells))));
      const weight = j <= i ? 10 ** (-4 * (1 - bytes[(i * (i + 1)) / 2 + j] / 255)) : 0;
      canvas.dataset.tip = j > i ? "" : `rows ${i * width}\u2013${(i + 1) * width - 1} (${owner(i)})\nattend to ${j * width}\u2013${(j + 1) * width - 1} (${owner(j)})\nlargest weight ${brief(weight)}`;
    });
    let strong = 0;
    for (const b of bytes) strong += b > 127;
    say("reading-picture", `Layer ${shown.layer}, head ${shown.head}: ${percent(strong / bytes.length, 1)} of the cells below the diagonal hold a weight above 0.01; rows run down, the keys they read run right, both in prompt order.`);
  };
  draw(found.shown);
}

// The segments' borders, and their names right of the diagonal, where there is no attention.
function boundaries(cells, width) {
  let free = 0;
  const marks = prompt.segments.map((s, i) => {
    const [start, stop] = [s.start / width, s.stop / width], middle = Math.max((start + stop) / 2, free);
    const line = i ? `<path d="M0 ${start}H${start}V${cells}" stroke="var(--orange)" stroke-width="0.5" fill="none" opacity="0.8"/>` : "";
    free = middle + cells / 42;
    const fits = stop - start > cells / 60 && stop < 0.88 * cells;
    return line + (fits ? `<text x="${stop + cells / 100}" y="${middle + cells / 120}" style="font-size:${cells / 44}px">${escapeText(s.name)}</text>` : "");
  });
  return `<svg viewBox="0 0 ${cells} ${cells}" aria-hidden="true">${marks.join("")}</svg>`;
}

function records() {
  document.getElementById("section-records").hidden = data.records.length < 2;
  const seen = new Set(data.prompts.map((p) => p.id));
  const columns = [["tokens", (r) => Math.round(r.tokens)], ["rows recomputed", (r) => Math.round(r.recomputed)], ["keys for 90 %", (r) => Math.round(r.keys_90)], ["value deviation before", (r) => percent(r.value_deviation_before, 1)], ["after", (r) => percent(r.value_deviation_after, 1)], ["attention to other chunks", (r) => percent(r.cross_full, 1)], ["question's distance before", (r) => r.variation_reuse.toFixed(3)], ["after", (r) => r.variation_blended.toFixed(3)]];
  const rows = data.records.map((r) => `<tr><td title="${escapeText(r.id)}">${seen.has(r.id) ? "" : "\u00b7 "}${escapeText(r.question)}</td>${columns.map(([, f]) => `<td>${f(r)}</td>`).join("")}</tr>`);
  put("records", `<table><thead><tr><th>question</th>${columns.map(([n]) => `<th>${n}</th>`).join("")}</tr></thead><tbody>${rows.join("")}</tbody></table>`);
}

function promptChooser() {
  if (data.prompts.length < 2) return;
  const bar = document.createElement("div");
  bar.className = "controls";
  bar.innerHTML = `<label>prompt <select>${data.prompts.map((p, i) => `<option value="${i}">${escapeText(p.question)}</option>`).join("")}</select></label>`;
  bar.querySelector("select").addEventListener("change", (event) => { prompt = data.prompts[+event.target.value]; showPrompt(); });
  document.getElementById("text-controls").before(bar);
}

function showPrompt() {
  showText(prompt);
  questionChart();
  chunkMap();
  picture();
}

document.addEventListener("mousemove", (event) => {
  const tip = document.getElementById("tip"), place = event.target;
  const row = place.dataset?.row;
  const said = row !== undefined ? tokenTip(prompt, +row) : place.dataset?.tip;
  tip.hidden = !said;
  if (!said) return;
  tip.textContent = said;
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - box.width - 8))}px`;
  tip.style.top = `${event.clientY + 18 + box.height > innerHeight ? Math.max(4, event.clientY - box.height - 12) : event.clientY + 18}px`;
});

function showAll() {
  showMeans();
  showPrompt();
}
showHead();
promptChooser();
records();
showAll();
dark.addEventListener("change", showAll);
