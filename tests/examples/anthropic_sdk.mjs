// Asks a server with Anthropic's npm SDK, and prints what came as JSON.
// node anthropic_sdk.mjs FOLDER URL KEY MODEL; FOLDER: where node_modules is.
import { createRequire } from "node:module";

const [folder, baseURL, apiKey, model] = process.argv.slice(2);
const { Anthropic } = createRequire(`${folder}/`)("@anthropic-ai/sdk");
const client = new Anthropic({ baseURL, apiKey, maxRetries: 0 });
const question = { role: "user", content: "Say a word with the shell." };
const plain = { model, max_tokens: 6, messages: [question] };
const tools = [{ name: "Bash", input_schema: { type: "object", properties: { command: { type: "string" } } } }];

async function classOf(promise, ...classes) {
  const failure = await promise.then(() => null, (error) => error);
  return [classes.find((name) => failure instanceof Anthropic[name]), failure?.status, failure?.error?.error?.type];
}

const whole = await client.messages.create(plain);
const texts = [];
const stream = client.messages.stream(plain);
stream.on("text", (text) => texts.push(text));
const streamed = await stream.finalMessage();
const counted = await client.messages.countTokens({ model, messages: [question], tools });

const called = await client.messages.create({ ...plain, max_tokens: 100, tools });
const use = called.content.find((block) => block.type === "tool_use");
const result = { type: "tool_result", tool_use_id: use.id, content: [{ type: "text", text: "harbour" }] };
const messages = [question, { role: "assistant", content: called.content }, { role: "user", content: [result] }];
const next = await client.messages.stream({ ...plain, max_tokens: 100, tools, messages }).finalMessage();

const stranger = new Anthropic({ baseURL, apiKey: "wrong", maxRetries: 0 });
const bad = await classOf(client.messages.create({ ...plain, max_tokens: -1 }), "BadRequestError", "APIError");
const unknown = await classOf(stranger.messages.create(plain), "AuthenticationError", "APIError");
console.log(JSON.stringify({ whole, streamed, texts, counted, called, next, bad, unknown }));
