// The documents of a corpus: drop files to add them, watch their progress, delete them.

import { getJson, request } from "./api.js";
import { DocumentRow, files, nameOf, working } from "./document_row.js";
import { announce, byId, count, el, showLine } from "./dom.js";

const POLL_MS = 2000;
const SHOWN = 200;
const FILTER_FROM = 12;

export class Documents {
  // corpus(): the chosen corpus's name, or null; onChange(): there may be new corpora; onError(error, place).
  constructor({ corpus, onChange, onError }) {
    Object.assign(this, { corpus, onChange, onError });
    this.listed = [];
    this.rows = new Map();
    this.timer = null;
    this.uploads = [];
    byId("files").addEventListener("change", (event) => {
      this.add([...event.target.files]);
      event.target.value = "";
    });
    byId("filter").addEventListener("input", () => this.show());
    catchDrops((files) => this.add(files));
  }

  query() {
    const corpus = this.corpus();
    return corpus ? `?corpus=${encodeURIComponent(corpus)}` : "";
  }

  async refresh() {
    clearTimeout(this.timer);
    try {
      if (!(await this.look())) return;
    } catch (error) {
      // The next poll may succeed. A missing key is asked for once.
      if (error.status !== 401) this.lookAgain();
      throw error;
    }
    announce("The documents are ready");
    await this.onChange();
  }

  // Returns whether documents were in progress before and none is now.
  async look() {
    const corpus = this.corpus();
    const { data } = await getJson(`v1/documents${this.query()}`);
    if (corpus !== this.corpus()) return false;
    const worked = this.listed.some(working);
    this.listed = files(data);
    this.show();
    this.lookAgain();
    return worked && !data.some(working);
  }

  lookAgain() {
    clearTimeout(this.timer);
    if (this.listed.some(working)) this.timer = setTimeout(() => this.attempt(() => this.refresh()), POLL_MS);
  }

  async attempt(work) {
    try {
      await work();
      showLine(byId("document-trouble"), "");
    } catch (error) {
      this.onError(error, byId("document-trouble"));
    }
  }

  add(files) {
    if (!files.length) return;
    const form = new FormData();
    for (const file of files) form.append("file", file);
    this.attempt(async () => {
      await this.uploading(files, request(`v1/documents${this.query()}`, { method: "POST", body: form }));
      await this.onChange();
      await this.refresh();
    });
  }

  // Shown until the server has all files.
  async uploading(files, sent) {
    const show = (uploads) => {
      this.uploads = uploads;
      const names = uploads.flat();
      showLine(byId("document-note"), names.length ? `Uploading ${names.length === 1 ? names[0].name : count(names.length, "file")}…` : "");
    };
    show([...this.uploads, files]);
    try {
      await sent;
    } finally {
      show(this.uploads.filter((one) => one !== files));
    }
  }

  remove(id) {
    this.attempt(async () => {
      await request(`v1/documents/${encodeURIComponent(id)}${this.query()}`, { method: "DELETE" });
      announce("Document deleted");
      byId("documents-name").focus();
      await this.refresh();
    });
  }

  show() {
    const word = byId("filter").value.trim().toLowerCase();
    const found = this.listed.filter((item) => `${nameOf(item)} ${item.title ?? ""}`.toLowerCase().includes(word));
    byId("filter-field").hidden = this.listed.length < FILTER_FROM;
    byId("document-count").textContent = this.listed.length ? this.listed.length.toLocaleString("en") : "";
    const rows = found.slice(0, SHOWN).map((item) => this.row(item));
    if (found.length > SHOWN) rows.push(el("li", { class: "soft" }, `and ${(found.length - SHOWN).toLocaleString("en")} more: find them by name`));
    if (!this.listed.length) rows.push(el("li", { class: "soft" }, "None yet. Text, HTML, PDF, office files, tables, mails and source code are read."));
    else if (!found.length) rows.push(el("li", { class: "soft" }, "None of that name."));
    place(byId("documents"), rows);
  }

  row(item) {
    if (!this.rows.has(item.id)) this.rows.set(item.id, new DocumentRow(item.id, nameOf(item), (id) => this.remove(id)));
    return this.rows.get(item.id).show(item);
  }
}

// Unchanged rows are not touched: they keep the focus.
function place(list, rows) {
  const wanted = new Set(rows);
  [...list.children].filter((child) => !wanted.has(child)).forEach((child) => child.remove());
  rows.forEach((row, i) => list.children[i] === row || list.insertBefore(row, list.children[i] ?? null));
}

// Files only: dragged text goes where it is dropped.
function catchDrops(onFiles) {
  const holdsFiles = (event) => event.dataTransfer?.types.includes("Files");
  addEventListener("dragover", (event) => {
    if (!holdsFiles(event)) return;
    event.preventDefault();
    document.body.classList.add("dragging");
  });
  addEventListener("dragleave", (event) => event.relatedTarget || document.body.classList.remove("dragging"));
  addEventListener("drop", (event) => {
    document.body.classList.remove("dragging");
    if (!holdsFiles(event)) return;
    event.preventDefault();
    onFiles([...event.dataTransfer.files]);
  });
}
