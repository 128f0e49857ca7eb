// One answer: its text as it comes, and beneath it what the server says of its prefill.

import { failureOf } from "./api.js";
import { announce, count, el, seconds, tell } from "./dom.js";
import { Prose } from "./prose.js";
import { sourcesView } from "./sources.js";
import { timeView } from "./times.js";
import { tokensView } from "./tokens.js";

const NAMES = { blend: "Blended", full: "Full prefill" };
const CUT = "Cut off: the longest answer is set to this many tokens.";
const EMPTY = "The model ended its answer at once, without a word.";

export class AnswerView {
  // compared: two stand side by side and are named; what both have in common stands under the first alone.
  constructor(method, compared) {
    this.alone = !compared || method === "blend";
    this.text = "";
    this.error = null;
    this.opened = null;
    this.usage = null;
    this.reason = null;
    this.prose = new Prose();
    this.wait = el("p", { class: "wait" }, "Reading the prompt…");
    this.note = el("p", { class: "trouble", hidden: true });
    this.facts = el("p", { class: "facts" });
    this.more = el("div", { class: "more" });
    // Spoken once it is whole: a voice cannot follow tokens.
    this.spoken = el("div", { class: "spoken", "aria-live": "polite", "aria-busy": "true" }, this.prose.element);
    const name = compared && el("h3", { class: "method" }, NAMES[method]);
    this.element = el("div", { class: "answer", role: "group", "aria-label": compared ? `Answer, ${NAMES[method]}` : "Answer" }, name, this.wait, this.spoken, this.note, this.facts, this.more);
  }

  take(event) {
    if (event.error) throw failureOf(event.error);
    if (event.kvblend) this.open(event.kvblend);
    if (event.usage) this.usage = event.usage;
    const [choice] = event.choices ?? [];
    this.reason = choice?.finish_reason ?? this.reason;
    if (choice?.delta?.content) this.add(choice.delta.content);
  }

  open(kvblend) {
    this.opened = kvblend;
    this.wait.remove();
    this.began = performance.now();
    const { sources = [], figures, trace = [] } = kvblend;
    this.more.append(timeView(figures));
    if (this.alone) this.more.append(...sourcesView(sources), ...tokensView(trace, sources));
    this.tellFacts();
    announce(`Answering after ${seconds(figures.ttft_s)}`);
  }

  add(text) {
    this.text += text;
    this.prose.show(this.text);
  }

  tellFacts() {
    const figures = this.opened?.figures;
    if (!figures) return;
    const parts = [`${seconds(figures.ttft_s)} to the first token`, `${count(figures.rows, "prompt token")}, ${figures.rows_computed.toLocaleString("en")} computed`];
    if (figures.rows_reused) parts.push(`${figures.rows_reused.toLocaleString("en")} of an earlier prompt${figures.rows_inexact ? " that was blended" : ""}`);
    if (this.usage) parts.push(count(this.usage.completion_tokens, "answer token") + this.speed());
    this.facts.textContent = parts.join(" · ");
  }

  speed() {
    const passed = (this.ended - this.began) / 1000;
    const tokens = this.usage.completion_tokens - 1;
    return tokens > 0 && passed > 0 ? ` (${(tokens / passed).toFixed(tokens / passed < 9.95 ? 1 : 0)}/s)` : "";
  }

  close() {
    this.ended = performance.now();
    if (this.reason === "length") this.remark(CUT);
    else if (!this.text) this.remark(EMPTY);
    this.finish();
  }

  stopped() {
    this.remark("Stopped.");
    this.finish();
  }

  fail(error) {
    this.error = error;
    this.ended = performance.now();
    tell(this.note, error.message);
    this.finish();
  }

  remark(line) {
    this.note.classList.replace("trouble", "remark");
    tell(this.note, line);
  }

  finish() {
    this.wait.remove();
    this.prose.finish();
    this.tellFacts();
    this.spoken.setAttribute("aria-busy", "false");
  }
}
