// Shared by the whole page: texts, number formats, requests with the API key, event streams.
import { h, html, render, Component } from "./preact.js";
export { h, html, render, Component };

const KEY = "prge-key", LANGUAGE = "prge-language", TALK = "prge-talk";
const table = await (await fetch("/page/texts.json")).json();
const known = localStorage.getItem(LANGUAGE);
let language = Object.hasOwn(table, known) ? known : /^de\b/i.test(navigator.language) ? "de" : "en";

export const spoken = () => language;
/** Return a text by its name, with each `{}` replaced by the next value. */
export function t(name, ...values) {
  const text = Object.hasOwn(table[language], name) ? table[language][name] : String(name);
  return values.reduce((said, value) => said.replace("{}", () => value), text);
}
export function speak(other) {
  language = other;
  localStorage.setItem(LANGUAGE, language);
  document.documentElement.lang = language;
}

/** Format a number as prge does: four significant digits, thousands separated by a narrow space. */
export function number(value) {
  if (typeof value !== "number" || !isFinite(value)) return String(value ?? "–");
  if (Math.abs(value) >= 1e15) return value.toExponential(3);
  const is_whole = Number.isInteger(value) || Math.abs(value) >= 1000;
  if (is_whole) return String(Math.round(value)).replace(/\B(?=(\d{3})+$)/g, "\u202f");
  return String(Number(value.toPrecision(4)));
}
export function duration(seconds) {
  if (typeof seconds !== "number") return "–";
  const total = Math.round(seconds), minutes = Math.floor(total / 60);
  if (total < 60) return `${total} s`;
  return minutes < 60 ? `${minutes} min ${total % 60} s` : `${number(Math.floor(minutes / 60))} h ${minutes % 60} min`;
}

/** A request that the server refused; status 0 if the server is not reachable. */
export class Refused extends Error {
  constructor(status, message, code) {
    super(message);
    Object.assign(this, { status, code });
  }
}
/** Functions that are called with every Refused, before the caller sees it. */
export const watchers = new Set();
const told = (error) => {
  watchers.forEach((watch) => watch(error));
  return error;
};

/** Store a conversation in its tab for the next load of the page, unless it is too large. */
export function keep_talk(talk) {
  try {
    sessionStorage.setItem(TALK, JSON.stringify(talk));
  } catch {
    sessionStorage.removeItem(TALK);
  }
}
export function kept_talk() {
  try {
    const talk = JSON.parse(sessionStorage.getItem(TALK));
    return Array.isArray(talk?.turns) ? talk : {};
  } catch {
    return {};
  }
}

export const keep = (key) => sessionStorage.setItem(KEY, key);
/** Send a request, as POST if it has a body, and return the response. Throws Refused or an AbortError. */
export async function ask(path, body, signal) {
  const headers = body === undefined ? {} : { "Content-Type": "application/json" };
  const key = sessionStorage.getItem(KEY);
  if (key) headers.Authorization = `Bearer ${key}`;
  const method = body === undefined ? "GET" : "POST";
  let answer;
  try {
    answer = await fetch(path, { method, headers, body: body && JSON.stringify(body), signal, cache: "no-store" });
  } catch (error) {
    throw error.name === "AbortError" ? error : told(new Refused(0, t("unreachable")));
  }
  if (answer.ok) return answer;
  const said = await answer.json().catch(() => ({}));
  throw told(new Refused(answer.status, said.error?.message ?? `HTTP ${answer.status}`, said.error?.code));
}
export const get = async (path, signal) => (await ask(path, undefined, signal)).json();

/** Yield the events of a stream of `data: JSON` lines. Throws like `ask`. */
export async function* events(path, body, signal) {
  const reader = (await ask(path, body, signal)).body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const from = Math.max(0, held.length - 1);
      held += value;
      if (held.indexOf("\n\n", from) < 0) continue;
      const parts = held.split("\n\n");
      held = parts.pop();
      for (const part of parts) {
        if (part === "data: [DONE]") return;
        if (part.startsWith("data: ")) yield JSON.parse(part.slice(6));
      }
    }
  } catch (error) {
    throw error.name === "AbortError" || error instanceof Refused ? error : told(new Refused(0, t("unreachable")));
  } finally {
    reader.cancel().catch(() => {});
  }
}

export const pause = (milliseconds) => new Promise((go) => setTimeout(go, milliseconds));
/** A list of names and values, without unknown values. */
export const Facts = ({ facts }) => html`<dl class="facts">
  ${facts.filter(([, value]) => value !== undefined && value !== null && value !== "").map(
    ([name, value]) => html`<div key=${name}><dt>${name}</dt><dd>${value}</dd></div>`)}
</dl>`;
const HOW = ["base_model", "architecture", "parameters", "weights", "adapter", "rank", "alpha", "estimator", "objective",
  "optimizer", "learning_rate", "train", "training_rows", "steps_taken", "seconds", "best", "hash"];
/** Return the server's facts about a model or a run, with translated names. */
export const told_facts = (facts) => HOW.map((name) => {
  const value = facts[name];
  return [t(name), typeof value !== "number" ? value : name === "seconds" ? duration(value) : number(value)];
});

/** A button that does not submit a form. */
export const Button = ({ act, children, ...more }) => html`<button type="button" onClick=${act} ...${more}>${children}</button>`;

const LONGEST = 20000;
/** Show text as plain text, never as markup; of a very long text only the beginning, with a button for the rest. */
export class Text extends Component {
  shouldComponentUpdate(props, state) {
    return props.text !== this.props.text || state.all !== this.state.all || props.spoken !== this.props.spoken;
  }
  render({ text }, { all }) {
    const is_cut = text.length > LONGEST && !all;
    return html`<div class="text" dir="auto">${is_cut ? text.slice(0, LONGEST) : text}</div>
      ${is_cut && html`<${Button} act=${() => this.setState({ all: true })}>${t("show_all", number(text.length))}<//>`}`;
  }
}
