// What is asked for besides the question.

import { announce, byId, el } from "./dom.js";

const CORPUS = "+corpus";
const NOTHING = "nothing";

export class Options {
  constructor() {
    this.model = "";
  }

  // ids: of /v1/models. A name that ends in "+corpus" or "+corpus:NAME" is the same model answering from a corpus.
  showModels(ids) {
    this.model = ids.find((id) => !id.includes(CORPUS)) ?? ids[0];
    byId("model").textContent = this.model;
    const names = ids.filter((id) => id.startsWith(this.model + CORPUS)).map((id) => id.slice((this.model + CORPUS).length).replace(/^:/, ""));
    const select = byId("corpus");
    const chosen = select.value;
    select.replaceChildren(
      ...names.map((name) => el("option", { value: `corpus:${name}` }, name ? `Corpus ${name}` : "Your documents")),
      el("option", { value: NOTHING }, "The model alone"),
    );
    // What was chosen stays; but "the model alone" was no choice while there was nothing else.
    if (this.hadCorpus && [...select.options].some((option) => option.value === chosen)) select.value = chosen;
    this.hadCorpus = names.length > 0;
    this.lock();
  }

  lock() {
    byId("top-k").disabled = this.corpus() === null;
  }

  // The corpus's name, "" for the one without a name, null for none.
  corpus() {
    const value = byId("corpus").value;
    return value.startsWith("corpus:") ? value.slice("corpus:".length) : null;
  }

  compares() {
    return byId("compare").checked;
  }

  // Whether the numbers can be sent; the browser says what is wrong with them.
  check() {
    const wrong = [byId("top-k"), byId("max-tokens")].find((field) => !field.disabled && !field.checkValidity());
    if (!wrong) return true;
    byId("side").scrollIntoView();
    wrong.reportValidity();
    announce(wrong.validationMessage);
    return false;
  }

  body(messages, method) {
    const corpus = this.corpus();
    const retrieve = corpus === null ? {} : { retrieve: { top_k: Number(byId("top-k").value), ...(corpus && { corpus }) } };
    return {
      model: this.model,
      messages,
      max_tokens: Number(byId("max-tokens").value),
      temperature: 0,
      stream: true,
      stream_options: { include_usage: true },
      // What an earlier prompt left in memory would make full prefill look faster than it is.
      kvblend: { ...retrieve, method, cold: method === "full", trace: method === "blend" && byId("trace").checked },
    };
  }
}
