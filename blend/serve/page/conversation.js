// The conversation: its turns, the one that runs, and what of it goes with the next question.

import { AnswerView } from "./answer.js";
import { events, postJson } from "./api.js";
import { verdict } from "./compare.js";
import { announce, byId, el } from "./dom.js";

export class Conversation {
  // onBusy(running), onError(error): the question got no answer and is no part of the conversation.
  constructor({ options, onBusy, onError }) {
    Object.assign(this, { options, onBusy, onError });
    this.messages = [];
    this.abort = null;
  }

  get running() {
    return this.abort !== null;
  }

  stop() {
    this.abort?.abort();
  }

  clear() {
    this.stop();
    this.messages = [];
    byId("welcome").hidden = false;
    byId("turns").replaceChildren(byId("welcome"));
  }

  // Whether an answer, or a part of one, came.
  async ask(question) {
    const before = this.messages;
    const messages = [...before, { role: "user", content: question }];
    const turn = addTurn(question);
    this.abort = new AbortController();
    this.onBusy(true);
    const [first] = await this.answers(turn, messages, this.abort.signal);
    this.abort = null;
    this.onBusy(false);
    if (first.error && !first.text) {
      turn.remove();
      byId("welcome").hidden = byId("turns").children.length > 1;
      this.onError(first.error);
      return false;
    }
    // A conversation that was begun anew meanwhile stays new.
    if (first.text && this.messages === before) this.messages = [...messages, { role: "assistant", content: first.text }];
    return true;
  }

  // One after the other: side by side they would slow each other down, and no time would be true.
  async answers(turn, messages, signal) {
    const compared = this.options.compares();
    const place = el("div", { class: "answers" });
    const said = compared ? verdict() : null;
    turn.append(...(said ? [said.element] : []), place);
    const views = [];
    for (const method of compared ? ["blend", "full"] : ["blend"]) {
      const view = new AnswerView(method, compared);
      views.push(view);
      place.append(view.element);
      await stream(view, this.options.body(messages, method), signal);
      if (view.error || signal.aborted) return views;
    }
    said?.tell(...views);
    return views;
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

function addTurn(question) {
  byId("welcome").hidden = true;
  const element = el("article", { class: "turn" }, el("h2", { class: "question" }, el("span", { class: "unseen" }, "You asked: "), question));
  byId("turns").append(element);
  element.scrollIntoView({ block: "start" });
  announce("Reading the prompt");
  return element;
}
