// The conversation: its turns, the running one, and the messages for the next question.

import { AnswerView } from "./answer.js";
import { events, postJson } from "./api.js";
import { verdict } from "./compare.js";
import { announce, byId, el, keep, kept } from "./dom.js";

const LONG = { characters: 1000, lines: 15 };
const SHOWN = { characters: 200, lines: 2 };
const SAMPLED = 0.7; // temperature of a regenerated answer

export class Conversation {
  // onBusy(running); onError(error): the question got no answer and leaves the conversation; onAgain(turn): regenerate its answer.
  constructor({ options, onBusy, onError, onAgain }) {
    Object.assign(this, { options, onBusy, onError, onAgain });
    this.turns = [];
    this.abort = null;
    try {
      for (const record of kept("conversation") ?? []) this.add(Turn.of(record, onAgain));
    } catch {
      // Stored by another version of the page.
      this.clear();
    }
    this.turns.at(-1)?.element.scrollIntoView({ behavior: "instant" });
  }

  get running() {
    return this.abort !== null;
  }

  stop() {
    this.abort?.abort();
  }

  clear() {
    this.stop();
    this.show([]);
    this.keep();
  }

  keep() {
    keep("conversation", this.turns.map((turn) => turn.record()));
  }

  add(turn) {
    this.show([...this.turns, turn]);
  }

  show(turns) {
    // Unchanged turns are not touched: they keep selection and focus.
    this.turns.filter((turn) => !turns.includes(turn)).forEach((turn) => turn.element.remove());
    byId("turns").append(...turns.filter((turn) => !turn.element.isConnected).map((turn) => turn.element));
    byId("welcome").hidden = turns.length > 0;
    this.turns = turns;
  }

  // replaced: the last turn, to regenerate its answer, or null. Returns whether any part of an answer came.
  async ask(question, replaced = null) {
    const before = this.turns.filter((turn) => turn !== replaced);
    const messages = [...before.flatMap((turn) => turn.messages()), { role: "user", content: question }];
    const turn = new Turn(question, this.options.compares(), this.onAgain);
    const shown = [...before, turn];
    this.show(shown);
    turn.element.scrollIntoView({ block: "start" });
    if (replaced) turn.element.focus({ preventScroll: true });
    announce("Reading the prompt");
    this.abort = new AbortController();
    this.onBusy(true);
    const temperature = replaced && !turn.compared ? SAMPLED : 0;
    await turn.answer((method) => this.options.body(messages, method, temperature), this.abort.signal);
    const { signal } = this.abort;
    this.abort = null;
    this.onBusy(false);
    const [first] = turn.views;
    const lost = !first.text && (first.error || (replaced && signal.aborted));
    // A conversation that was started meanwhile stays.
    if (lost && this.turns === shown) this.show(replaced ? [...before, replaced] : before);
    this.keep();
    if (lost && first.error) this.onError(first.error);
    return !lost;
  }
}

class Turn {
  constructor(question, compared, onAgain) {
    Object.assign(this, { question, compared, onAgain, views: [] });
    this.verdict = compared ? verdict() : null;
    this.place = el("div", { class: "answers" });
    this.shared = el("div", { class: "more" });
    this.element = el("article", { class: "turn", tabindex: "-1" }, questionView(question), this.verdict?.element, this.place, this.shared);
  }

  static of({ question, compared, answers }, onAgain) {
    const turn = new Turn(question, compared, onAgain);
    for (const answer of answers) turn.add(answer.method).restore(answer);
    turn.compare();
    return turn;
  }

  record() {
    return { question: this.question, compared: this.compared, answers: this.views.map((view) => view.record()) };
  }

  // The messages for the next question.
  messages() {
    const said = this.views[0]?.text;
    return said ? [{ role: "user", content: this.question }, { role: "assistant", content: said }] : [];
  }

  add(method) {
    const first = !this.views.length;
    const view = new AnswerView(method, this.compared, first ? this.shared : null, first ? () => this.onAgain(this) : null);
    this.views.push(view);
    this.place.append(view.element);
    return view;
  }

  // One after the other: in parallel they would slow each other down.
  async answer(body, signal) {
    for (const method of this.compared ? ["blend", "full"] : ["blend"]) {
      const view = this.add(method);
      view.start();
      await stream(view, body(method), signal);
      if (!view.complete) return;
    }
    this.compare();
  }

  compare() {
    const [blended, full] = this.views;
    if (!full?.complete) return;
    this.verdict.show(blended, full);
    if (blended.opened && full.opened) blended.showTimes(full.opened.figures.ttft_s);
  }
}

async function stream(view, body, signal) {
  try {
    for await (const event of events(await postJson("v1/chat/completions", body, signal))) view.take(event);
    view.close();
  } catch (error) {
    if (error.name === "AbortError") view.stopped();
    else view.fail(error);
  }
}

// Shows the beginning and the end of a long question, such as a pasted prompt.
function questionView(question) {
  const text = el("span", {}, question);
  const heading = el("h2", { class: "question" }, el("span", { class: "unseen" }, "You asked: "), text);
  const lines = question.split("\n");
  if (question.length <= LONG.characters && lines.length <= LONG.lines) return [heading];
  heading.classList.add("long");
  const ends = [lines.slice(0, SHOWN.lines).join("\n").slice(0, SHOWN.characters), lines.slice(-SHOWN.lines).join("\n").slice(-SHOWN.characters)];
  const button = el("button", { type: "button", class: "quiet fold" });
  const fold = (folded) => {
    text.textContent = folded ? ends.join("\n…\n") : question;
    button.textContent = folded ? `Show the whole message, ${question.length.toLocaleString("en")} characters` : "Fold the message";
    button.setAttribute("aria-expanded", String(!folded));
  };
  button.addEventListener("click", () => fold(button.getAttribute("aria-expanded") === "true"));
  fold(true);
  return [heading, button];
}
