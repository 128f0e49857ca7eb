// The options of a question.

import { byId, el, keep, kept } from "./dom.js";

const CORPUS = "+corpus";
const NOTHING = "nothing";
const NUMBERS = ["top-k", "max-tokens"];
const SWITCHES = ["compare", "trace"];

export class Options {
  constructor() {
    this.model = "";
    const options = kept("options") ?? {};
    for (const id of NUMBERS) byId(id).value = options[id] ?? byId(id).value;
    for (const id of SWITCHES) byId(id).checked = options[id] ?? byId(id).checked;
    this.chosen = options.corpus ?? null;
  }

  keep() {
    const values = [...NUMBERS.map((id) => [id, byId(id).value]), ...SWITCHES.map((id) => [id, byId(id).checked])];
    keep("options", { ...Object.fromEntries(values), corpus: this.chosen });
  }

  choose() {
    this.chosen = byId("corpus").value;
    this.lock();
  }

  // ids: of /v1/models. "+corpus" or "+corpus:NAME" at the end names a corpus to retrieve from.
  showModels(ids) {
    this.model = ids.find((id) => !id.includes(CORPUS)) ?? ids[0];
    byId("model").textContent = this.model;
    const names = ids.filter((id) => id.startsWith(this.model + CORPUS)).map((id) => id.slice((this.model + CORPUS).length).replace(/^:/, ""));
    const select = byId("corpus");
    select.replaceChildren(
      ...names.map((name) => el("option", { value: `corpus:${name}` }, name ? `Corpus ${name}` : "Your documents")),
      el("option", { value: NOTHING }, "The model alone"),
    );
    if ([...select.options].some((option) => option.value === this.chosen)) select.value = this.chosen;
    this.lock();
  }

  lock() {
    byId("top-k").disabled = this.corpus() === null;
  }

  // The corpus's name: "" for the one without a name, null for none.
  corpus() {
    const value = byId("corpus").value;
    return value.startsWith("corpus:") ? value.slice("corpus:".length) : null;
  }

  compares() {
    return byId("compare").checked;
  }

  // The first invalid number field, or undefined.
  wrong() {
    return NUMBERS.map(byId).find((field) => !field.disabled && !field.checkValidity());
  }

  body(messages, method, temperature) {
    const corpus = this.corpus();
    const retrieve = corpus === null ? {} : { retrieve: { top_k: Number(byId("top-k").value), ...(corpus && { corpus }) } };
    return {
      model: this.model,
      messages,
      max_tokens: Number(byId("max-tokens").value),
      temperature,
      stream: true,
      stream_options: { include_usage: true },
      // The prefix cache would make full prefill look faster.
      kvblend: { ...retrieve, method, cold: method === "full", trace: method === "blend" && byId("trace").checked },
    };
  }
}
