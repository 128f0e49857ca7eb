// One answer: its text as it streams, and below it the figures of its prefill.

import { failureOf } from "./api.js";
import { cite } from "./cites.js";
import { announce, count, el, seconds, showLine, term } from "./dom.js";
import { Prose } from "./prose.js";
import { sourcesView } from "./sources.js";
import { timeView } from "./times.js";
import { tokensView } from "./tokens.js";

const NAMES = { blend: "Blended", full: "Full prefill" };
const CUT = "Cut off: the longest answer is set to this many tokens.";
const EMPTY = "The model ended its answer at once, without a word.";
const STOPPED = "Stopped.";
const COMPUTED = "The model computed the KV of these tokens for this answer. The KV of all others was loaded or was in memory.";
const REUSED = "This prompt begins as an earlier one did. The KV of that beginning was still in memory and was used again.";
const SHARED = "Other requests brought this text at the same time. One request computed its KV for all of them.";
const AHEAD = "This answer's request computed the KV of these tokens apart from its prompt, so that other requests could take it, too.";
const EXPECTED = "The server's estimate of how far this answer's distributions are from full recompute's, in nats a token. 0 is exact.";
const INEXACT = " A part of it was blended, so it is near what full prefill gives, but not the same.";

export class AnswerView {
  // shared: the element for sources and tokens; null for the second answer of a comparison. onAgain: regenerates, or null.
  constructor(method, compared, shared, onAgain) {
    Object.assign(this, { method, compared, shared, text: "", error: null, opened: null, usage: null, reason: null, took: 0, complete: false });
    this.prose = new Prose();
    this.wait = el("p", { class: "wait" }, "Reading the prompt…");
    this.note = el("p", { class: "trouble", hidden: true });
    this.facts = el("p", { class: "facts" });
    this.times = el("div");
    this.actions = el("p", { class: "actions", hidden: true }, copier(this), onAgain && el("button", { type: "button", class: "quiet again", onclick: onAgain, title: AGAIN }, compared ? "Regenerate both" : "Regenerate"));
    // A screen reader reads it when it is complete, not token by token.
    this.spoken = el("div", { class: "spoken", "aria-live": "polite", "aria-busy": "true" }, this.prose.element);
    const name = compared && el("h3", { class: "method" }, NAMES[method]);
    this.element = el("div", { class: "answer", role: "group", "aria-label": compared ? `Answer, ${NAMES[method]}` : "Answer" }, name, this.wait, this.spoken, this.note, this.actions, this.facts, this.times);
  }

  // Show the time since the request was sent.
  start() {
    const sent = performance.now();
    this.clock = setInterval(() => {
      this.wait.textContent = `Reading the prompt… ${Math.round((performance.now() - sent) / 1000)} s`;
    }, 1000);
  }

  take(event) {
    if (event.error) throw failureOf(event.error);
    if (event.kvblend) {
      this.open(event.kvblend);
      announce(`Answering after ${seconds(event.kvblend.figures.ttft_s)}`);
    }
    if (event.usage) this.usage = event.usage;
    const [choice] = event.choices ?? [];
    this.reason = choice?.finish_reason ?? this.reason;
    if (choice?.delta?.content) this.add(choice.delta.content);
  }

  open(kvblend) {
    this.opened = kvblend;
    this.endWait();
    this.began = performance.now();
    const { sources = [], trace = [] } = kvblend;
    this.showTimes(null);
    this.shared?.append(...sourcesView(sources), ...tokensView(trace, sources));
    this.showFacts();
  }

  endWait() {
    clearInterval(this.clock);
    this.wait.remove();
  }

  // measured: seconds of full prefill in a comparison, which never shows an estimate.
  showTimes(measured) {
    const view = timeView(this.opened.figures, this.compared ? { measured } : null);
    view.open = this.times.open;
    this.times.replaceWith(view);
    this.times = view;
  }

  add(text) {
    this.text += text;
    this.prose.show(this.text);
  }

  showFacts() {
    const figures = this.opened?.figures;
    if (!figures) return;
    const parts = [`${count(figures.rows, "prompt token")}, `, term(`${figures.rows_computed.toLocaleString("en")} computed`, COMPUTED)];
    const inexact = Boolean(figures.rows_inexact);
    if (figures.rows_reused) parts.push(" · ", term(`${figures.rows_reused.toLocaleString("en")} of an earlier prompt${inexact ? " that was blended" : ""}`, REUSED + (inexact ? INEXACT : "")));
    if (figures.rows_shared) parts.push(" · ", term(`${figures.rows_shared.toLocaleString("en")} shared with other requests`, SHARED));
    if (figures.rows_ahead) parts.push(" · ", term(`${figures.rows_ahead.toLocaleString("en")} computed for all of them`, AHEAD));
    if (figures.quality) parts.push(" · ", term(`expected KL ${figures.quality.kl.toPrecision(2)}`, EXPECTED));
    if (this.usage) parts.push(` · ${count(this.usage.completion_tokens, "answer token")}${this.speed()}`);
    this.facts.replaceChildren(...parts);
  }

  speed() {
    const rate = (this.usage.completion_tokens - 1) / this.took;
    return rate > 0 && this.took > 0 ? ` (${rate.toFixed(rate < 9.95 ? 1 : 0)}/s)` : "";
  }

  close() {
    this.complete = true;
    if (this.reason === "length") this.remark(CUT);
    else if (!this.text) this.remark(EMPTY);
    this.finish();
  }

  stopped() {
    this.remark(STOPPED);
    this.finish();
  }

  fail(error) {
    this.error = error;
    showLine(this.note, error.message);
    this.finish();
  }

  remark(line) {
    this.note.classList.replace("trouble", "remark");
    showLine(this.note, line);
  }

  finish() {
    this.endWait();
    this.took ||= (performance.now() - this.began) / 1000;
    this.prose.finish();
    cite(this.prose.element, this.opened?.sources ?? []);
    this.showFacts();
    this.actions.hidden = false;
    this.actions.firstChild.hidden = !this.text;
    this.spoken.setAttribute("aria-busy", "false");
  }

  // Plain values for a reload; a running answer counts as stopped. Without the trace, which is large.
  record() {
    const { method, text, usage, reason, took, complete } = this;
    const kvblend = this.opened && { ...this.opened, trace: [] };
    const ended = this.spoken.getAttribute("aria-busy") === "false";
    return { method, text, usage, reason, took, complete, kvblend, remark: ended ? this.note.textContent : STOPPED };
  }

  restore({ text, usage, reason, took, complete, kvblend, remark }) {
    Object.assign(this, { usage, reason, took, complete });
    if (kvblend) this.open(kvblend);
    this.add(text);
    this.remark(remark);
    this.finish();
  }
}

const AGAIN = "Ask again with the options as they are now. Words are then drawn at random, so the answer may differ; a comparison draws none.";

function copier(view) {
  const button = el("button", { type: "button", class: "quiet" }, "Copy");
  button.addEventListener("click", async () => {
    await copy(view.text, view.prose.element);
    button.textContent = "Copied";
    announce("Answer copied");
    setTimeout(() => (button.textContent = "Copy"), 2000);
  });
  return button;
}

// Without HTTPS or permission there is no clipboard, but the browser copies a selection.
async function copy(text, element) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    getSelection().selectAllChildren(element);
    document.execCommand("copy");
  }
}
