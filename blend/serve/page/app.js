// Puts the page together: the question, the options, the key, and who hears of what.

import { getJson, key } from "./api.js";
import { Conversation } from "./conversation.js";
import { Documents } from "./documents.js";
import { announce, byId, tell } from "./dom.js";
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
    tell(byId("trouble"), "");
    tell(byId("note"), "");
  } catch (error) {
    failed(error, byId("trouble"));
    if (error.status === 503) loadLater();
  }
}

function loadLater() {
  clearTimeout(loading);
  loading = setTimeout(load, RELOAD_MS);
}

// A key is asked for wherever the server wants one; all else is told where it happened. The page is there before the model: no error.
function failed(error, place) {
  const early = error.code === "loading";
  tell(byId("note"), early ? "The model is loading. You can ask in a moment." : "");
  if (early) loadLater();
  if (error.status !== 401) return tell(place, early ? "" : error.message);
  tell(byId("key-trouble"), key.get() ? "This server does not know the key. Enter another." : "");
  if (!byId("key-dialog").open) byId("key-dialog").showModal();
  byId("key").select();
}

function busy(running) {
  byId("send").hidden = running;
  byId("stop").hidden = !running;
  document.body.classList.toggle("busy", running);
  if (!running) announce("Answer complete");
}

// replaced: the turn whose answer is asked for once more. Returns whether an answer came.
async function ask(question, replaced = null) {
  if (!question || conversation.running) return false;
  const wrong = options.wrong();
  if (wrong) {
    unfold("options");
    wrong.reportValidity();
    announce(wrong.validationMessage);
    return false;
  }
  tell(byId("trouble"), "");
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

// On a small screen one part of the side, or none, stands in the conversation's place; a style sheet says so.
function unfold(part) {
  document.body.dataset.part = part;
  for (const name of ["documents", "options"]) byId(`show-${name}`).setAttribute("aria-expanded", String(name === part));
}

// As tall as what is written in it; the style sheet says how tall at most.
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
  // An Enter that ends a composed character (Japanese, Chinese) is no Enter.
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
byId("stop").addEventListener("click", stop);
document.addEventListener("keydown", (event) => event.key === "Escape" && conversation.running && stop());
byId("renew").addEventListener("click", () => {
  conversation.clear();
  unfold("");
  tell(byId("trouble"), "");
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
  tell(byId("trouble"), "This server answers only with an API key: send a question, and you are asked for it again.");
});
byId("forget").addEventListener("click", () => {
  key.forget();
  conversation.clear();
  load();
});
// Before the browser breaks it off, which would look like a server that is gone.
addEventListener("beforeunload", () => conversation.stop());
addEventListener("pagehide", () => {
  options.keep();
  conversation.keep();
});

load();
