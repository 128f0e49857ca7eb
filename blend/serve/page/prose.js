// Draws the Markdown of an answer. marked reads it; elements are built here from text nodes, so links, images and HTML stay text.

import { el } from "./dom.js";
import { lexer } from "./marked.js";

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
    requestAnimationFrame(() => this.planned && this.finish());
  }

  finish() {
    this.planned = false;
    const blocks = blocksOf(this.text);
    blocks.forEach((block, i) => {
      if (block.raw === this.blocks[i]?.raw) return;
      const node = draw(block);
      if (this.element.children[i]) this.element.children[i].replaceWith(node);
      else this.element.append(node);
    });
    while (this.element.children.length > blocks.length) this.element.lastChild.remove();
    this.blocks = blocks;
  }
}

const blocksOf = (text) => lexer(text).filter(({ type }) => type !== "space");

const BLOCKS = {
  heading: (token) => el("p", { class: "heading", role: "heading", "aria-level": "4" }, inside(token)),
  // Models like to fence the Markdown that they are asked for.
  code: (token) => (/^(markdown|md)\b/i.test(token.lang) ? el("div", {}, blocksOf(token.text).map(draw)) : el("pre", {}, el("code", {}, token.text))),
  blockquote: (token) => el("blockquote", {}, token.tokens.map(draw)),
  hr: () => el("hr"),
  list: (token) => el(token.ordered ? "ol" : "ul", { start: token.start || null }, token.items.map((item) => el("li", {}, inside(item)))),
  table: (token) => el("div", { class: "table", tabindex: "0", role: "group", "aria-label": "Table" }, el("table", {}, el("thead", {}, row(token.header, "th")), el("tbody", {}, token.rows.map((cells) => row(cells, "td"))))),
  paragraph: (token) => el("p", {}, inside(token)),
};

const INLINE = {
  strong: (token) => el("strong", {}, inside(token)),
  em: (token) => el("em", {}, inside(token)),
  del: (token) => el("del", {}, inside(token)),
  codespan: (token) => el("code", {}, token.text),
  escape: (token) => token.text,
  br: () => "\n",
  space: () => "",
  text: (token) => (token.tokens ? el("span", {}, inside(token)) : token.text),
};

const row = (cells, tag) => el("tr", {}, cells.map((cell) => el(tag, { class: cell.align }, inside(cell))));

// Blocks outside lists are elements, so that they can be counted.
const draw = (token) => BLOCKS[token.type]?.(token) ?? el("p", {}, token.raw.trim());

const inside = (token) => token.tokens.map((part) => (BLOCKS[part.type] ?? INLINE[part.type] ?? ((other) => other.raw))(part));
