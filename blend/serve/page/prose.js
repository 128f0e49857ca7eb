// Renders the marks that models write: paragraphs, headings, lists, code, bold. Everything else stays text.

import { el } from "./dom.js";

export class Prose {
  constructor() {
    this.element = el("div", { class: "prose" });
    this.blocks = [];
    this.text = "";
    this.planned = false;
  }

  // At most once a frame, and only changed blocks: selections in others stay.
  show(text) {
    this.text = text;
    if (this.planned) return;
    this.planned = true;
    requestAnimationFrame(() => this.planned && this.draw());
  }

  finish() {
    this.draw();
  }

  draw() {
    this.planned = false;
    const blocks = split(this.text);
    blocks.forEach((block, i) => {
      if (block === this.blocks[i]) return;
      const node = render(block);
      if (this.element.children[i]) this.element.children[i].replaceWith(node);
      else this.element.append(node);
    });
    while (this.element.children.length > blocks.length) this.element.lastChild.remove();
    this.blocks = blocks;
  }
}

const FENCE = /^\s*```/;
const ITEM = /^\s*(?:[-*+]|\d+[.)])\s+/;

// Splits into blocks: a fence with its content, or lines up to an empty one.
function split(text) {
  const blocks = [];
  let open = [];
  let fenced = false;
  const end = () => {
    if (open.length) blocks.push(open.join("\n"));
    open = [];
  };
  for (const line of text.split("\n")) {
    if (FENCE.test(line)) {
      if (!fenced) end();
      open.push(line);
      if (fenced) end();
      fenced = !fenced;
    } else if (fenced || line.trim()) {
      if (!fenced && (/^#{1,6} /.test(line) || (ITEM.test(line) && open.length && !ITEM.test(open[0])))) end();
      open.push(line);
    } else end();
  }
  end();
  return blocks;
}

function render(block) {
  const lines = block.split("\n");
  if (FENCE.test(block)) {
    const closed = lines.length > 1 && FENCE.test(lines.at(-1));
    return el("pre", {}, el("code", {}, lines.slice(1, closed ? -1 : undefined).join("\n")));
  }
  if (/^#{1,6} /.test(block)) return el("p", { class: "heading", role: "heading", "aria-level": "4" }, inline(block.replace(/^#+ /, "")));
  if (ITEM.test(block)) return list(lines);
  return el("p", {}, inline(block));
}

function list(lines) {
  const ordered = /^\s*\d/.test(lines[0]);
  const items = [];
  for (const line of lines) {
    if (ITEM.test(line)) items.push(line.replace(ITEM, ""));
    else items[items.length - 1] += `\n${line.trim()}`;
  }
  return el(ordered ? "ol" : "ul", { start: ordered ? parseInt(lines[0], 10) : null }, items.map((item) => el("li", {}, inline(item))));
}

// `code` and **bold**; an unpaired mark stays text.
function inline(text) {
  return text.split(/(`[^`\n]+`|\*\*[^*\n]+\*\*)/).map((part) => {
    if (/^`[^`]+`$/.test(part)) return el("code", {}, part.slice(1, -1));
    if (/^\*\*[^*]+\*\*$/.test(part)) return el("strong", {}, part.slice(2, -2));
    return part;
  });
}
