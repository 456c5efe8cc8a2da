// Requests to the server that this page came from.

const KEY = "jaxinfer.key";

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export const apiKey = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (key) => sessionStorage.setItem(KEY, key),
};

function headers() {
  const key = apiKey.get();
  return key ? { authorization: `Bearer ${key}` } : {};
}

async function check(response) {
  if (response.ok) return response;
  let message = `${response.status} ${response.statusText}`;
  try {
    message = (await response.json()).error.message ?? message;
  } catch {
    // An answer that is not the API's: its status says what there is to say.
  }
  throw new ApiError(response.status, message);
}

export async function getJson(path, signal) {
  return (await check(await fetch(path, { headers: headers(), signal, cache: "no-store" }))).json();
}

// Yields the chunks of a streamed chat completion, parsed.
export async function* streamChat(body, signal) {
  const response = await check(
    await fetch("v1/chat/completions", {
      method: "POST",
      headers: { "content-type": "application/json", ...headers() },
      body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
      signal,
    }),
  );
  let complete = false;
  for await (const data of events(response.body)) {
    if (data === "[DONE]") {
      complete = true;
      break;
    }
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(chunk.error.code ?? 500, chunk.error.message);
    yield chunk;
  }
  if (!complete) throw new ApiError(0, "the connection ended before the answer did");
}

// The data of each server-sent event of a body, whatever the pieces it comes in.
async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (rest + value).split(/\r?\n\r?\n/);
      rest = parts.pop();
      for (const part of parts) {
        const lines = part.split(/\r?\n/).filter((line) => line.startsWith("data:"));
        if (lines.length) yield lines.map((line) => line.slice(5).replace(/^ /, "")).join("\n");
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
