// Calls of the HTTP API, the API key, and errors as one line that says what to do.

const KEY = "kvblend.key";

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => sessionStorage.setItem(KEY, value),
  forget: () => sessionStorage.removeItem(KEY),
};

export class ServerError extends Error {
  constructor(message, status = 0, code = null) {
    super(message);
    Object.assign(this, { status, code });
  }
}

const UNREACHED = "The server cannot be reached. See whether `blend serve` is running, then try again.";

// Turns an error message of the server into a sentence.
const sentence = (text) => `${text[0].toUpperCase()}${text.slice(1)}${/[.!?]$/.test(text) ? "" : "."}`;

// error: the `error` object of OpenAI's shape.
export const failureOf = (error, status = 0) => new ServerError(sentence(error.message), status, error.code);

async function refusal(response) {
  // A proxy may have answered; its body is not shown.
  const body = await response.json().catch(() => null);
  if (body?.error?.message) return failureOf(body.error, response.status);
  return new ServerError(`The server answered ${response.status} ${response.statusText}. See whether \`blend serve\` is running.`, response.status);
}

// Throws ServerError, and AbortError after `signal`.
export async function request(path, { headers = {}, ...options } = {}) {
  const asked = key.get() ? { ...headers, Authorization: `Bearer ${key.get()}` } : headers;
  let response;
  try {
    response = await fetch(new URL(path, document.baseURI), { ...options, headers: asked });
  } catch (error) {
    throw error.name === "AbortError" ? error : new ServerError(UNREACHED);
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

export const getJson = async (path) => (await request(path)).json();

export const postJson = (path, body, signal) =>
  request(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), signal });

// Yields the JSON values of a stream of server-sent events up to [DONE].
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) throw new ServerError("The answer broke off. See whether `blend serve` is running, then try again.");
      const blocks = (rest + value).split(/\r?\n\r?\n/);
      rest = blocks.pop();
      for (const block of blocks) {
        const data = block.split(/\r?\n/).filter((field) => field.startsWith("data:")).map((field) => field.slice(5).trimStart()).join("\n");
        if (data === "[DONE]") return;
        if (data) yield JSON.parse(data);
      }
    }
  } catch (error) {
    if (error instanceof ServerError || error.name === "AbortError") throw error;
    throw new ServerError(UNREACHED);
  } finally {
    reader.cancel().catch(() => {});
  }
}
