// The server's documented endpoints, its API key, and its refusals as one line that says what to do.

const KEY = "kvblend.key";

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => sessionStorage.setItem(KEY, value),
  forget: () => sessionStorage.removeItem(KEY),
};

export class ServerError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

const REMEDIES = {
  401: "Enter a key that this server knows.",
  413: "Send less at once.",
  500: "The server’s log says why.",
  502: "See whether `blend serve` is running.",
  503: "Try again in a moment.",
};
const UNREACHED = "The server cannot be reached. See whether `blend serve` is running, then try again.";

const sentence = (text) => `${text[0].toUpperCase()}${text.slice(1)}${/[.!?]$/.test(text) ? "" : "."}`;

// "Token limit reached; ask for fewer" -> with a full stop, and the remedy where the server names none.
function line(message, status, wait) {
  const remedy = wait ? `Try again in ${Math.ceil(Number(wait)) || 1} s.` : REMEDIES[status];
  return [message && sentence(message), remedy].filter(Boolean).join(" ") || `The server answered ${status} and gave no reason.`;
}

async function refusal(response) {
  let message = response.statusText;
  try {
    const { error } = await response.json();
    message = error?.message ?? message;
  } catch {
    // An answer of something in between, such as a proxy, is no JSON: its status has to do.
  }
  return new ServerError(line(message, response.status, response.headers.get("Retry-After")), response.status);
}

// Raises ServerError, and AbortError when `signal` fired.
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

// The JSON values of a stream of server-sent events, one by one, to its [DONE].
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
