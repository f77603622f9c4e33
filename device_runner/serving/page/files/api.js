// Requests to the server with the API key, and event streams.
import { t } from "./i18n.js";

const API_KEY_ITEM = "prge-key";
/** Remember the API key until the tab is closed. */
export const storeApiKey = (apiKey) => sessionStorage.setItem(API_KEY_ITEM, apiKey);

/** An error response of the server; its status is 0 if the server is not reachable. */
export class ApiError extends Error {
  constructor(status, message, code) {
    super(message);
    Object.assign(this, { status, code });
  }
}
/** Functions that are called with every ApiError, before it is thrown. */
export const errorListeners = new Set();
const notifyListeners = (error) => {
  errorListeners.forEach((listener) => listener(error));
  return error;
};

/** Send a request, as POST if it has a body, and return the response. Throws ApiError or an AbortError. */
export async function request(path, body, signal) {
  const headers = body === undefined ? {} : { "Content-Type": "application/json" };
  const apiKey = sessionStorage.getItem(API_KEY_ITEM);
  if (apiKey) headers.Authorization = `Bearer ${apiKey}`;
  const method = body === undefined ? "GET" : "POST";
  let response;
  try {
    response = await fetch(path, { method, headers, body: body && JSON.stringify(body), signal, cache: "no-store" });
  } catch (error) {
    throw error.name === "AbortError" ? error : notifyListeners(new ApiError(0, t("server_unreachable")));
  }
  if (response.ok) return response;
  const { error } = await response.json().catch(() => ({}));
  throw notifyListeners(new ApiError(response.status, error?.message ?? `HTTP ${response.status}`, error?.code));
}
/** Send a GET request and return the JSON of the response. Throws like `request`. */
export const getJson = async (path, signal) => (await request(path, undefined, signal)).json();

/** Send a request and yield the events of the response, a stream of `data: JSON` lines. Throws like `request`. */
export async function* streamEvents(path, body, signal) {
  const reader = (await request(path, body, signal)).body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      // The end of an event can only be in the new chunk, or begin with the last character before it.
      const searchStart = Math.max(0, buffer.length - 1);
      buffer += value;
      if (buffer.indexOf("\n\n", searchStart) < 0) continue;
      const events = buffer.split("\n\n");
      buffer = events.pop();
      for (const event of events) {
        if (event === "data: [DONE]") return;
        if (event.startsWith("data: ")) yield JSON.parse(event.slice(6));
      }
    }
  } catch (error) {
    if (error.name === "AbortError" || error instanceof ApiError) throw error;
    throw notifyListeners(new ApiError(0, t("server_unreachable")));
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** Wait before the next request. */
export const sleep = (milliseconds) => new Promise((resolve) => setTimeout(resolve, milliseconds));
