"use strict";
// Pictures as SVG text. Colours are CSS variables; only the sequential scale depends on the theme and is computed here.

const dark = matchMedia("(prefers-color-scheme: dark)");
const RAMPS = {
  light: ["#f4f7fb", "#c6dbef", "#6baed6", "#2171b5", "#08306b"],
  dark: ["#1b212b", "#184773", "#2b7bba", "#86bce0", "#eaf3fb"],
};

const escapeText = (text) => String(text).replace(/[&<>"]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[c]);
const percent = (v, digits = 0) => (v === null || v === undefined ? "\u2013" : `${(100 * v).toFixed(digits)}%`);
const clamp = (v) => Math.max(0, Math.min(1, v));

function rgb(share) {
  const stops = RAMPS[dark.matches ? "dark" : "light"];
  const place = clamp(share) * (stops.length - 1);
  const low = Math.min(stops.length - 2, Math.floor(place));
  const channel = (stop, i) => parseInt(stops[stop].slice(1 + 2 * i, 3 + 2 * i), 16);
  return [0, 1, 2].map((i) => Math.round(channel(low, i) + (place - low) * (channel(low + 1, i) - channel(low, i))));
}
const fill = (share) => `rgb(${rgb(share).join(",")})`;
function inkOn(share) {
  const [r, g, b] = rgb(share);
  return 0.299 * r + 0.587 * g + 0.114 * b > 140 ? "#10151c" : "#ffffff";
}

// A round step for about `count` ticks up to `top`.
function ticks(top, count = 4) {
  const raw = top / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= raw);
  const found = [];
  for (let v = 0; v <= top * 1.0001; v += step) found.push(v);
  return found;
}

// A picture at its natural size: it shrinks with the window, and grows by a quarter at most, however wide its place is.
function drawing(width, height, label, marks) {
  return `<svg viewBox="0 0 ${width} ${height}" style="max-width:${Math.round(1.25 * width)}px" role="img" aria-label="${escapeText(label)}">${marks}</svg>`;
}

function frame({ width, height, left, bottom, top, yTop, yFormat, yLabel, xLabel }) {
  const right = 12;
  const y = (v) => top + (height - top - bottom) * (1 - v / yTop);
  const lines = ticks(yTop).map((v) => `<line class="grid" x1="${left}" x2="${width - right}" y1="${y(v)}" y2="${y(v)}"/><text class="soft" x="${left - 6}" y="${y(v) + 4}" text-anchor="end">${yFormat(v)}</text>`);
  const labels = `<text class="soft" x="4" y="13">${escapeText(yLabel)}</text><text class="soft" x="${(left + width - right) / 2}" y="${height - 4}" text-anchor="middle">${escapeText(xLabel)}</text>`;
  return { y, right, marks: lines.join("") + labels };
}

// series: {name, values, color, dash}; band: {low, high, color, name}. One point a layer.
function lineChart({ series, bands = [], xLabel, yLabel, yFormat = (v) => percent(v), label }) {
  const [width, height, left, bottom, top] = [560, 270, 54, 40, 26];
  const all = [...series.flatMap((s) => s.values), ...bands.flatMap((b) => b.high)].filter((v) => v !== null);
  const yTop = Math.max(1e-9, ...all) * 1.06;
  const { y, right, marks } = frame({ width, height, left, bottom, top, yTop, yFormat, yLabel, xLabel });
  const count = series[0].values.length;
  const x = (i) => left + 8 + (width - left - right - 16) * (count > 1 ? i / (count - 1) : 0.5);
  const every = Math.ceil(count / 13);
  const names = series[0].values.map((_, i) => (i % every ? "" : `<text class="soft" x="${x(i)}" y="${height - bottom + 16}" text-anchor="middle">${i}</text>`));
  const areas = bands.map((b) => {
    const up = b.high.map((v, i) => `${x(i)},${y(v ?? 0)}`);
    const down = b.low.map((v, i) => `${x(i)},${y(v ?? 0)}`).reverse();
    return `<polygon points="${[...up, ...down].join(" ")}" fill="${b.color}" opacity="${b.opacity ?? 0.2}"/>`;
  });
  const paths = series.map((s) => `<polyline points="${s.values.map((v, i) => `${x(i)},${y(v ?? 0)}`).join(" ")}" fill="none" stroke="${s.color}" stroke-width="2.4" stroke-dasharray="${s.dash ?? ""}"/>`);
  const spots = series[0].values.map((_, i) => {
    const said = series.map((s) => `${s.name}: ${yFormat(s.values[i], 1)}`).join("\n");
    const half = (width - left - right) / Math.max(1, count) / 2;
    return `<rect x="${x(i) - half}" y="${top}" width="${2 * half}" height="${height - top - bottom}" fill="transparent" data-tip="${escapeText(`layer ${i}\n${said}`)}"/>`;
  });
  const keys = [...series.map((s) => ({ name: s.name, color: s.color, dash: s.dash })), ...bands.filter((b) => b.name).map((b) => ({ name: b.name, color: b.color, area: b.opacity ?? 0.2 }))];
  return drawing(width, height, label, marks + names.join("") + areas.join("") + paths.join("") + spots.join("")) + legend(keys);
}

// One group of bars a category; baseline: a dashed line with a name.
function barChart({ categories, series, xLabel, yLabel, yFormat = (v) => percent(v), label, baseline, counts }) {
  const [width, height, left, bottom, top] = [560, 250, 54, xLabel ? 40 : 24, 26];
  const yTop = Math.max(1e-9, baseline?.value ?? 0, ...series.flatMap((s) => s.values).filter((v) => v !== null)) * (counts ? 1.16 : 1.08);
  const { y, right, marks } = frame({ width, height, left, bottom, top, yTop, yFormat, yLabel, xLabel });
  const slot = (width - left - right) / categories.length;
  const thick = Math.min(34, (slot * 0.78) / series.length);
  const every = Math.ceil((categories.length * Math.max(...categories.map((c) => c.length)) * 7.5) / (width - left));
  const above = [];
  const bars = categories.flatMap((name, i) => [
    i % every ? "" : `<text class="soft" x="${left + slot * (i + 0.5)}" y="${height - bottom + 16}" text-anchor="middle">${escapeText(name)}</text>`,
    ...series.map((s, j) => {
      const v = s.values[i];
      if (v === null) return "";
      const at = left + slot * (i + 0.5) + (j - series.length / 2) * thick;
      const said = `${name}\n${s.name}: ${yFormat(v, 1)}${counts ? `\nof ${counts[i]} rows` : ""}`;
      if (counts) above.push(`<text class="soft count" x="${at + thick / 2}" y="${y(v) - 4}" text-anchor="middle">${counts[i]}</text>`);
      return `<rect x="${at}" y="${y(v)}" width="${thick - 1}" height="${Math.max(0.5, y(0) - y(v))}" fill="${s.color}" data-tip="${escapeText(said)}"/>`;
    }),
  ]);
  const dashed = baseline ? `<line x1="${left}" x2="${width - right}" y1="${y(baseline.value)}" y2="${y(baseline.value)}" stroke="var(--ink)" stroke-dasharray="5 4"/>` : "";
  const keys = [...(counts ? [{ name: "number above a bar: rows there", bare: true }] : []), ...(series.length > 1 ? series.map((s) => ({ name: s.name, color: s.color, box: true })) : []), ...(baseline ? [{ name: baseline.name, color: "var(--ink)", dash: "5 4" }] : [])];
  return drawing(width, height, label, marks + bars.join("") + dashed + above.join("")) + legend(keys);
}

// Bars that lie, a group a row, with the row's name before it. tips: the whole of a name that may be cut.
function rowChart({ names, tips, series, yFormat = (v) => percent(v), xLabel, label, wide }) {
  const [width, left, right, top, thick, between] = [wide ? 1150 : 560, wide ? 400 : 236, 52, 22, 11, 9];
  const most = Math.floor((left - 14) / 7.3);
  const slot = series.length * thick + between;
  const height = top + names.length * slot;
  const xTop = Math.max(1e-9, ...series.flatMap((s) => s.values).filter((v) => v !== null));
  const rows = names.map((name, i) => {
    const y = top + i * slot;
    const said = (s) => `${tips[i]}\n${s.name}: ${yFormat(s.values[i])}`;
    const bars = series.map((s, j) => {
      const long = ((width - left - right) * (s.values[i] ?? 0)) / xTop;
      return `<rect x="${left}" y="${y + j * thick}" width="${Math.max(0.5, long)}" height="${thick - 1}" fill="${s.color}" data-tip="${escapeText(said(s))}"/><text class="soft value" x="${left + long + 5}" y="${y + j * thick + 9}">${escapeText(yFormat(s.values[i]))}</text>`;
    });
    const middle = y + (series.length * thick) / 2 + 4;
    return `<text x="${left - 8}" y="${middle}" text-anchor="end" data-tip="${escapeText(tips[i])}">${escapeText(tail(name, most))}</text>${bars.join("")}`;
  });
  return drawing(width, height, label, `<text class="soft" x="${left}" y="13">${escapeText(xLabel)}</text>${rows.join("")}`) + legend(series.map((s) => ({ name: s.name, color: s.color, box: true })));
}

// The end of a long name, which says most where headings stand in a title.
function tail(name, most) {
  if (name.length <= most) return name;
  const [number, ...rest] = name.split(" \u00b7 ");
  return `${number} \u00b7 \u2026${rest.join(" \u00b7 ").slice(number.length + 4 - most)}`;
}

function legend(keys) {
  const sign = (k) => k.bare ? "" : k.box ? `<i class="box" style="background:${k.color}"></i>` : k.area ? `<i class="box" style="background:${k.color};opacity:${k.area + 0.15}"></i>` : `<i class="swatch" style="border-top-color:${k.color};border-top-style:${!k.dash ? "solid" : k.dash.startsWith("2") ? "dotted" : "dashed"}"></i>`;
  return keys.length ? `<div class="legend">${keys.map((k) => `<span>${sign(k)}${escapeText(k.name)}</span>`).join("")}</div>` : "";
}

function rampLegend(title, low, high) {
  const stops = [0, 0.25, 0.5, 0.75, 1].map(fill).join(",");
  return `<div class="legend"><span>${escapeText(title)}: ${escapeText(low)}<i class="ramp" style="background:linear-gradient(90deg,${stops})"></i>${escapeText(high)}</span></div>`;
}

// matrix[row][column]; share: value -> 0..1 on the scale; text: what stands in a cell (or nothing); null cells stay empty.
function heatmap({ matrix, rows, columns, share, text, tip, rowLabel, columnLabel, label, square = true }) {
  const left = 26 + 7.2 * Math.max(...rows.map((r) => r.length));
  const slanted = Math.max(...columns.map((c) => c.length)) > 3;
  const [top, bottom] = [20, slanted ? 74 : 40];
  const cell = Math.min(60, (560 - left - 6) / columns.length);
  const width = left + cell * columns.length + 6;
  const tall = square ? Math.min(cell, 30) : Math.max(13, Math.min(cell, 20));
  const height = top + rows.length * tall + bottom;
  const rowStep = Math.ceil(13 / tall), columnStep = slanted ? Math.ceil(15 / cell) : Math.ceil(22 / cell);
  const cells = matrix.flatMap((values, i) => values.map((v, j) => {
    if (v === null || v === undefined) return "";
    const at = `x="${left + j * cell}" y="${top + i * tall}"`;
    const said = text ? text(v) : "";
    const inside = said ? `<text x="${left + (j + 0.5) * cell}" y="${top + (i + 0.5) * tall + 4}" text-anchor="middle" style="fill:${inkOn(share(v))};font-size:${Math.min(12.5, cell / 2.6)}px;pointer-events:none">${escapeText(said)}</text>` : "";
    return `<rect ${at} width="${cell - 0.6}" height="${tall - 0.6}" fill="${fill(share(v))}" data-tip="${escapeText(tip(i, j, v))}"/>${inside}`;
  }));
  const rowNames = rows.map((name, i) => (i % rowStep ? "" : `<text class="soft" x="${left - 5}" y="${top + (i + 0.5) * tall + 4}" text-anchor="end">${escapeText(name)}</text>`));
  const below = top + rows.length * tall + 14;
  const columnNames = columns.map((name, j) => {
    if (j % columnStep) return "";
    const at = left + (j + 0.5) * cell;
    return slanted ? `<text class="soft" x="${at}" y="${below - 2}" text-anchor="end" transform="rotate(-40 ${at} ${below - 4})">${escapeText(name)}</text>` : `<text class="soft" x="${at}" y="${below}" text-anchor="middle">${escapeText(name)}</text>`;
  });
  const labels = `<text class="soft" x="4" y="13">${escapeText(rowLabel)}</text><text class="soft" x="${width - 6}" y="${height - 4}" text-anchor="end">${escapeText(columnLabel)}</text>`;
  const least = 12 + 6.4 * columnLabel.length; // so that a few columns do not cut their label off
  const shift = Math.max(0, least - width);
  return drawing(width + shift, height, label, `<g transform="translate(${shift} 0)">${cells.join("")}${rowNames.join("")}${columnNames.join("")}${labels}</g>`);
}

// Buttons of which one is pressed; calls back with its index, once at the start.
function choice(place, names, shown, pick) {
  place.innerHTML = names.map((name) => `<button type="button">${escapeText(name)}</button>`).join("");
  const buttons = [...place.querySelectorAll("button")];
  const press = (index) => {
    buttons.forEach((b, i) => b.setAttribute("aria-pressed", String(i === index)));
    pick(index);
  };
  buttons.forEach((b, i) => b.addEventListener("click", () => press(i)));
  press(shown);
}
