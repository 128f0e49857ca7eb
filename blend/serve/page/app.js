// Assembles the page: question, options, API key, and the events between them.

import { getJson, key } from "./api.js";
import { Conversation } from "./conversation.js";
import { Documents } from "./documents.js";
import { announce, byId, showLine } from "./dom.js";
import { Options } from "./options.js";

const RELOAD_MS = 2000;

const options = new Options();
const documents = new Documents({ corpus: () => options.corpus(), onChange: loadModels, onError: failed });
const conversation = new Conversation({ options, onBusy: busy, onError: (error) => failed(error, byId("trouble")), onAgain: (turn) => ask(turn.question, turn) });
let loading = 0;

async function loadModels() {
  options.showModels((await getJson("v1/models")).data.map((model) => model.id));
}

async function load() {
  clearTimeout(loading);
  byId("forget").hidden = !key.get();
  try {
    await loadModels();
    await documents.refresh();
    showLine(byId("trouble"), "");
    showLine(byId("note"), "");
  } catch (error) {
    failed(error, byId("trouble"));
    if (error.status === 503) loadLater();
  }
}

function loadLater() {
  clearTimeout(loading);
  loading = setTimeout(load, RELOAD_MS);
}

// Asks for a key when the server requires one; shows other errors where they happened. A loading model is no error.
function failed(error, place) {
  const early = error.code === "loading";
  showLine(byId("note"), early ? "The model is loading. You can ask in a moment." : "");
  if (early) loadLater();
  if (error.status !== 401) return showLine(place, early ? "" : error.message);
  showLine(byId("key-trouble"), key.get() ? "This server does not know the key. Enter another." : "");
  if (!byId("key-dialog").open) byId("key-dialog").showModal();
  byId("key").select();
}

function busy(running) {
  byId("send").hidden = running;
  byId("stop").hidden = !running;
  document.body.classList.toggle("busy", running);
  if (!running) announce("Answer complete");
}

// replaced: the turn to regenerate. Returns whether an answer came.
async function ask(question, replaced = null) {
  if (!question || conversation.running) return false;
  const wrong = options.wrong();
  if (wrong) {
    unfold("options");
    wrong.reportValidity();
    announce(wrong.validationMessage);
    return false;
  }
  showLine(byId("trouble"), "");
  return conversation.ask(question, replaced);
}

async function send() {
  if (conversation.running) return;
  const question = byId("question").value.trim();
  const answer = ask(question);
  if (!conversation.running) return;
  byId("question").value = "";
  grow();
  byId("question").focus();
  if (!(await answer) && !byId("question").value) byId("question").value = question;
  grow();
}

// On a small screen one part of the side, or none, replaces the conversation (see the style sheet).
function unfold(part) {
  document.body.dataset.part = part;
  for (const name of ["documents", "options"]) byId(`show-${name}`).setAttribute("aria-expanded", String(name === part));
}

// Grows with its text up to the style sheet's maximum.
function grow() {
  const box = byId("question");
  box.style.height = "auto";
  box.style.height = `${box.scrollHeight + box.offsetHeight - box.clientHeight}px`;
}

function stop() {
  conversation.stop();
  byId("question").focus();
}

byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
byId("question").addEventListener("input", grow);
byId("question").addEventListener("keydown", (event) => {
  // Enter that ends a composition (Japanese, Chinese) does not send.
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
byId("stop").addEventListener("click", stop);
document.addEventListener("keydown", (event) => event.key === "Escape" && conversation.running && stop());
byId("renew").addEventListener("click", () => {
  conversation.clear();
  unfold("");
  showLine(byId("trouble"), "");
  byId("question").focus();
});
for (const part of ["documents", "options"]) {
  byId(`show-${part}`).addEventListener("click", () => {
    unfold(document.body.dataset.part === part ? "" : part);
    scrollTo(0, 0);
  });
}
byId("corpus").addEventListener("change", () => {
  options.choose();
  documents.attempt(() => documents.refresh());
});
byId("key-form").addEventListener("submit", () => {
  key.set(byId("key").value.trim());
  byId("key").value = "";
  load();
});
byId("key-cancel").addEventListener("click", () => {
  byId("key-dialog").close();
  showLine(byId("trouble"), "This server answers only with an API key: send a question, and you are asked for it again.");
});
byId("forget").addEventListener("click", () => {
  key.forget();
  conversation.clear();
  load();
});
// Before the browser aborts it, which would look like a lost server.
addEventListener("beforeunload", () => conversation.stop());
addEventListener("pagehide", () => {
  options.keep();
  conversation.keep();
});

load();
