// Puts the page together: the question, the options, the key, and who hears of what.

import { getJson, key } from "./api.js";
import { Conversation } from "./conversation.js";
import { Documents } from "./documents.js";
import { announce, byId, tell } from "./dom.js";
import { Options } from "./options.js";

const RELOAD_MS = 2000;

const options = new Options();
const documents = new Documents({ corpus: () => options.corpus(), onChange: loadModels, onError: failed });
const conversation = new Conversation({ options, onBusy: busy, onError: (error) => failed(error, byId("trouble")) });

async function loadModels() {
  options.showModels((await getJson("v1/models")).data.map((model) => model.id));
}

async function load() {
  byId("forget").hidden = !key.get();
  try {
    await loadModels();
    await documents.refresh();
    tell(byId("trouble"), "");
  } catch (error) {
    failed(error, byId("trouble"));
    // 503: the model is loading. The page is there before it.
    if (error.status === 503) setTimeout(load, RELOAD_MS);
  }
}

// A key is asked for wherever the server wants one; all else is told where it happened.
function failed(error, place) {
  if (error.status !== 401) return tell(place, error.message);
  tell(byId("key-trouble"), key.get() ? "This server does not know the key. Enter another." : "");
  if (!byId("key-dialog").open) byId("key-dialog").showModal();
  byId("key").select();
}

function busy(running) {
  byId("send").hidden = running;
  byId("stop").hidden = !running;
  if (!running) announce("Answer complete");
}

function send() {
  const question = byId("question").value.trim();
  if (!question || conversation.running) return;
  if (!options.check()) return;
  tell(byId("trouble"), "");
  byId("question").value = "";
  grow();
  byId("question").focus();
  conversation.ask(question).then((kept) => {
    if (!kept && !byId("question").value) byId("question").value = question;
    grow();
  });
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
  tell(byId("trouble"), "");
  byId("question").focus();
});
byId("unfold").addEventListener("click", () => {
  const open = document.body.classList.toggle("side-open");
  byId("unfold").setAttribute("aria-expanded", String(open));
  if (open) byId("side").scrollIntoView();
});
byId("corpus").addEventListener("change", () => {
  options.lock();
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
  load();
});

load();
